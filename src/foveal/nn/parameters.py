"""Construction of parameters: dtypes, initial values, logical axes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from foveal.checks import as_dtype, as_float, as_precision, described
from foveal.typing import Array, DTypeLike, Float, Precision, accumulation_dtype


@dataclasses.dataclass(frozen=True)
class Numerics:
    """The dtypes and matmul precision of a layer.

    Attributes:
        dtype: of activations and of matmul operands.
        param_dtype: of the linear kernels. Sinks, position biases and norm scales are always float32.
        precision: of the matmuls, as in `jax.lax.dot_general`.
        init_std: standard deviation of the kernels' initial values.

    Raises:
        ValueError: a dtype that layers do not support, a precision that JAX does not know, or a negative deviation.
    """

    __no_type_check__ = True  # __post_init__'s errors say more

    dtype: DTypeLike
    param_dtype: DTypeLike
    precision: Precision
    init_std: float

    def __post_init__(self) -> None:
        """Check every field and turn the dtypes into `jax.numpy`'s scalar types."""
        for name in ("dtype", "param_dtype"):
            object.__setattr__(self, name, as_dtype(name, getattr(self, name)))
        as_precision(self.precision)
        as_float("init_std", self.init_std, ">= 0", 0.0, inclusive=True)

    @property
    def wide(self) -> DTypeLike:
        """Dtype of norms and softmax: float32, or float64 in a float64 layer. RoPE and pooling stay float32."""
        return accumulation_dtype(self.dtype)


def as_numerics(value: object) -> Numerics:
    """Return a `Numerics` unchanged, or raise ValueError."""
    if not isinstance(value, Numerics):
        raise ValueError(f"numerics: expected Numerics, got {described(value)}")
    return value


def as_rngs(value: object) -> nnx.Rngs:
    """Return Flax's random streams unchanged, or raise ValueError."""
    if not isinstance(value, nnx.Rngs):
        raise ValueError(f"rngs: expected flax.nnx.Rngs, such as nnx.Rngs(0), got {described(value)}")
    return value


def logical_axes(*names: str | None) -> dict[str, Any]:
    """Parameter metadata that names the axes, for `nnx.get_partition_spec` and a mesh's rules.

    Sharding is lazy: without `eager_sharding=False` Flax requires a mesh and rules at construction.
    """
    return {"out_sharding": names, "eager_sharding": False}


def linear(
    in_features: int,
    out_features: int,
    axes: tuple[str, str],
    *,
    numerics: Numerics,
    rngs: nnx.Rngs,
    wide_output: bool = False,
) -> nnx.Linear:
    """Linear projection without bias; `wide_output` keeps the accumulation dtype instead of rounding to `dtype`."""
    return nnx.Linear(
        in_features,
        out_features,
        use_bias=False,
        dtype=numerics.dtype,
        param_dtype=numerics.param_dtype,
        precision=numerics.precision,
        preferred_element_type=numerics.wide if wide_output else numerics.dtype,
        kernel_init=jax.nn.initializers.normal(numerics.init_std),
        kernel_metadata=logical_axes(*axes),
        rngs=rngs,
    )


class RMSNorm(nnx.RMSNorm):
    """Flax's RMSNorm, but with NaN as the result for a vector whose squares overflow.

    Division by infinity would give zeros, as in transformers: a lost token that looks like an answer.
    """

    def __call__(self, x: Float[Array, "*rows D"], mask: Array | None = None) -> Float[Array, "*rows D"]:
        """Norm over the last axis, in `dtype`."""
        square = jnp.mean(jax.lax.square(x.astype(self.dtype)), axis=-1, keepdims=True)  # XLA computes it once
        return jnp.where(jnp.isinf(square), jnp.nan, super().__call__(x, mask))


def rms_norm(features: int, *, epsilon: float, numerics: Numerics, rngs: nnx.Rngs, use_scale: bool = True) -> RMSNorm:
    """Norm x * rsqrt(mean(x^2) + epsilon) * scale, computed and returned in `numerics.wide`: the caller casts once."""
    return RMSNorm(
        features,
        epsilon=epsilon,
        dtype=numerics.wide,
        param_dtype=jnp.float32,
        use_scale=use_scale,
        scale_metadata=logical_axes("norm"),
        rngs=rngs,
    )


def zeros_parameter(shape: tuple[int, ...], *axes: str) -> nnx.Param[Array]:
    """A float32 parameter that starts at zero."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), **logical_axes(*axes))
