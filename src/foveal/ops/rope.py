"""Rotary position embedding of trailing dims in interleaved pairs: plain and YaRN frequencies, and the inverse."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from foveal.checks import as_array, as_bool, as_int, as_integers, described
from foveal.layers import RopeConfig, YarnConfig
from foveal.meshes import any_mesh
from foveal.program import varying
from foveal.typing import Array, Float, Float32, Int, Int32


class RopeTable(NamedTuple):
    """Cosines and sines of the angles, one per position and pair of dims: float32 [B, T, R / 2] each."""

    cos: Float32[Array, "B T pairs"]
    sin: Float32[Array, "B T pairs"]


def rope_frequencies(rope: RopeConfig, rope_dim: int) -> np.ndarray:
    """Angle per position of each pair of dims: float32 [rope_dim / 2], where pair i is dims 2 i and 2 i + 1.

    f = theta ** (-2 i / R). YaRN (arXiv 2309.00071, section 3.2) uses f / factor for the pairs that turn less than
    `beta_slow` times over the original context, f for those that turn more than `beta_fast` times, and a blend in
    between. DeepSeek-V4 applies YaRN's attention factor neither to the cosines nor to the softmax.

    Every step is rounded to float32, to give the same bits as DeepSeek's inference code and transformers: one unit in
    the last place of a frequency is 0.06 radians at a million tokens.

    Raises:
        ValueError: `rope_dim` is odd or below 2, or `rope` is not a `RopeConfig`.
    """
    return _frequencies(*_checked(rope, rope_dim)).copy()


def _checked(rope: RopeConfig, rope_dim: int) -> tuple[RopeConfig, int]:
    if not isinstance(rope, RopeConfig):
        raise ValueError(f"rope: expected a RopeConfig, got {described(rope)}")
    rope_dim = as_int("rope_dim", rope_dim, 2)
    if rope_dim % 2:
        raise ValueError(f"rope_dim: expected an even int, got {rope_dim}")
    return rope, rope_dim


@functools.lru_cache(maxsize=64)
def _frequencies(rope: RopeConfig, rope_dim: int) -> np.ndarray:
    exponent = np.arange(0, rope_dim, 2, dtype=np.float32) / np.float32(rope_dim)
    # float32 powers differ by an ulp between libraries; a float64 power rounded once is near all of them.
    frequency = np.float32(1) / np.power(rope.theta, exponent.astype(np.float64)).astype(np.float32)
    return frequency if rope.yarn is None else _yarn(frequency, rope.theta, rope_dim, rope.yarn)


def _yarn(frequency: np.ndarray, theta: float, rope_dim: int, yarn: YarnConfig) -> np.ndarray:
    def pair_that_turns(times: float) -> float:
        turns = yarn.original_max_position_embeddings / (times * 2 * math.pi)
        return rope_dim * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), rope_dim - 1)
    span = np.float32(high - low if high != low else 0.001)
    ramp = np.clip((np.arange(rope_dim // 2, dtype=np.float32) - np.float32(low)) / span, np.float32(0), np.float32(1))
    keep = np.float32(1) - ramp
    return frequency / np.float32(yarn.factor) * (np.float32(1) - keep) + frequency * keep


@any_mesh(like="positions")
def rope_table(
    positions: Int[Array, "B T"] | np.ndarray | Sequence[Sequence[int]], rope: RopeConfig, rope_dim: int
) -> RopeTable:
    """Cosines and sines for integer `positions` [B, T]: float32 [B, T, rope_dim / 2] each.

    Positions below 2**24 are exact in float32; the angle is one float32 product, as in DeepSeek's inference code.

    Raises:
        ValueError: positions that are not integers [B, T], or as `rope_frequencies`.
    """
    position, _ = as_integers("positions", positions, ndims=(2,), fetch=False)
    return table_for(position, *_checked(rope, rope_dim))


def table_for(position: Int32[Array, "B T"], rope: RopeConfig, rope_dim: int) -> RopeTable:
    """`rope_table` for checked arguments."""
    frequency = _frequencies(rope, rope_dim)
    angle = position.astype(jnp.float32)[:, :, None] * jnp.asarray(frequency)[None, None]
    return RopeTable(jnp.cos(angle), jnp.sin(angle))


@any_mesh(like="x")
def apply_rope(x: Float[Array, "B T *heads D"], table: RopeTable, *, inverse: bool = False) -> Float[Array, "..."]:
    """Rotate the trailing R dims of `x` by the table's angles, or back; the leading D - R pass through.

    The pair (a, b) = (x[2 i], x[2 i + 1]) becomes (a cos - b sin, a sin + b cos) in float32, then takes x's dtype.
    Linear in x, and differentiable in x in any mode. The table, computed from integers, gets no derivative.

    Args:
        x: [B, T, D] or [B, T, H, D].
        table: from `rope_table` for positions [B, T]; R is twice its last axis.
        inverse: rotate by the negative angle. V4's values carry RoPE, so its attention output is rotated back by the
            query's position (technical report, arXiv 2606.19348, section 2.3.3).

    Raises:
        ValueError: x's [B, T] is not the table's, or x is narrower than R.
    """
    table, inverse = _as_table(table), as_bool("inverse", inverse)
    x, rope_dim = as_array("x", x, "B T *", table.cos.shape[:2]), 2 * table.cos.shape[-1]
    if x.ndim < 3 or x.shape[-1] < rope_dim:
        raise ValueError(f"x: expected [B, T, ..., D] with D >= {rope_dim} to match the table, got shape {x.shape}")
    return rotate(x, table, inverse=inverse)


def rotate(x: Array, table: RopeTable, *, inverse: bool = False) -> Array:
    """`apply_rope` for checked arguments."""
    cos, sin = (array.reshape(*array.shape[:2], *(1,) * (x.ndim - 3), array.shape[2]) for array in table)
    if jax.typeof(x).manual_axis_type != jax.typeof(cos).manual_axis_type:
        x, cos, sin = varying((x, cos, sin), (x, cos, sin))
    return _rope.bind(x, cos, sin, inverse=inverse)


def _as_table(table: object) -> RopeTable:
    if not (isinstance(table, tuple) and len(table) == 2):
        raise ValueError(f"table: expected a RopeTable, got {described(table)}")
    cos = as_array("table.cos", table[0], "B T R/2")
    return RopeTable(cos, as_array("table.sin", table[1], "B T R/2", cos.shape))


def _rotated(x: Array, cos: Array, sin: Array, *, inverse: bool) -> Array:
    """Rotate vectors [..., D] in one pass, keeping the leading dims; cos and sin are [..., R / 2].

    Each dim finds its partner by a shift of one dim, chosen by parity. An axis of length 2 for the pairs would take 64
    times its size on TPUs, whose registers are 128 wide, and a concatenation would copy.
    """
    still = x.shape[-1] - 2 * cos.shape[-1]
    before = [(0, 0)] * (x.ndim - 1) + [(still, 0)]
    cos, sin = (jnp.pad(jnp.repeat(t.astype(jnp.float32), 2, axis=-1), before) for t in (cos, sin))
    dim = jax.lax.broadcasted_iota(jnp.int32, (1,) * (x.ndim - 1) + x.shape[-1:], x.ndim - 1) - still
    is_first = dim % 2 == 0
    wide = x.astype(jnp.float32)
    partner = jnp.where(is_first, _shifted(wide, -1), _shifted(wide, 1))
    rotated = wide * cos + partner * jnp.where(is_first != inverse, -sin, sin)
    return jnp.where(dim < 0, x, rotated.astype(x.dtype))


def _shifted(x: Array, by: int) -> Array:
    """Shift the last axis by `by` dims, filling with zeros."""
    return jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * (x.ndim - 1) + [(by, -by, 0)])


# A primitive, since a rotation's transpose is its inverse: JAX's own transpose of the shifts would build float32 arrays
# of x's size.
_rope = Primitive("foveal_rope")
_rope.def_impl(jax.jit(_rotated, static_argnames="inverse"))
_rope.def_abstract_eval(lambda x, cos, sin, *, inverse: x)
# Not jitted: when lowered to a function call, a layer took a tenth more memory with XLA for TPUs.
mlir.register_lowering(_rope, mlir.lower_fun(_rotated, multiple_results=False))


def _rope_transpose(cotangent: Any, x: Any, *table: Any, inverse: bool) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(x.aval), None, None]
    return [_rope.bind(cotangent, *table, inverse=not inverse), None, None]


def _rope_batch(operands: Sequence[Any], axes: Sequence[Any], *, inverse: bool) -> tuple[Any, int]:
    """Move the batch dim to the front; operands without one get a leading dim of length 1."""
    size = next(a.shape[axis] for a, axis in zip(operands, axes, strict=True) if axis is not None)
    moved = [
        jnp.expand_dims(a, 0) if axis is None else jnp.moveaxis(a, axis, 0)
        for a, axis in zip(operands, axes, strict=True)
    ]
    if moved[0].shape[0] != size:
        moved[0] = jnp.broadcast_to(moved[0], (size, *moved[0].shape[1:]))
    return _rope.bind(*moved, inverse=inverse), 0


# The table is computed from integers and has no tangents.
ad.defjvp(_rope, lambda tangent, x, cos, sin, *, inverse: _rope.bind(tangent, cos, sin, inverse=inverse), None, None)
ad.primitive_transposes[_rope] = _rope_transpose
batching.primitive_batchers[_rope] = _rope_batch
