"""Abstract layers: the parameters and shapes by which files are read and written, without any arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType

import jax.numpy as jnp
from flax import nnx

from foveal.config import AttentionConfig
from foveal.nn.attention import CompressedAttention
from foveal.typing import DTypeLike, Precision


def abstract_layer(
    config: AttentionConfig,
    layer: int,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    precision: Precision = None,
) -> CompressedAttention:
    """Return a layer whose parameters are shapes and dtypes only: nothing is allocated."""
    return nnx.eval_shape(
        lambda: CompressedAttention(
            config, layer, dtype=dtype, param_dtype=param_dtype, precision=precision, rngs=nnx.Rngs(0)
        )
    )


def parameter_shapes(config: AttentionConfig, layer: int) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a layer's parameters, by dotted path."""
    return _shapes_of_type(dataclasses.replace(config, layer_types=(config.layer_type(layer),)))


@functools.lru_cache(maxsize=16)  # a model has dozens of layers of three types
def _shapes_of_type(config: AttentionConfig) -> Mapping[str, tuple[int, ...]]:
    flat = nnx.to_flat_state(nnx.state(abstract_layer(config, 0), nnx.Param))
    return MappingProxyType({".".join(map(str, path)): variable.shape for path, variable in flat})
