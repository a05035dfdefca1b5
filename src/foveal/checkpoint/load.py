"""Released weights into modules."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from foveal.checkpoint import fp8
from foveal.checkpoint.files import CheckpointError
from foveal.checkpoint.find import AttentionCheckpoint, Source, abstract_layer, find_attention
from foveal.checks import as_dtype
from foveal.config import AttentionConfig
from foveal.nn.attention import CompressedAttention
from foveal.typing import Array, DTypeLike, Precision

Placement = jax.sharding.Mesh | jax.sharding.Sharding | None


def load_attention(
    path: str | os.PathLike[str],
    config: AttentionConfig | None = None,
    layers: Iterable[int] | None = None,
    *,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
    precision: Precision = None,
    sharding: Placement = None,
) -> dict[int, CompressedAttention]:
    """The attention layers of a DeepSeek-V4 checkpoint.

    Released files (Flash, Pro and their Base variants), transformers' and those of `save_attention` are understood,
    whichever names they have; FP8 weights are dequantised exactly. Only what is asked for is read, a tensor at a time.
    Embeddings, experts and hyper-connections are passed over, and so are MTP layers.

    Args:
        path: a directory with `config.json` and safetensors files, with an index or without; or the index, or one such
            file, beside a `config.json`. Links are followed: the Hugging Face cache is made of them.
        config: of the model; read from `config.json` by default.
        layers: indices of the layers to load; all by default.
        dtype: of activations, as in `CompressedAttention`. By default, layer by layer, the narrowest that holds every
            kernel of the file exactly: bfloat16 for the releases, float32 for FP8 with float32 scales.
        param_dtype: of the kernels; `dtype` by default. Sinks, position biases and norm scales are float32 in any case.
        precision: of the matmuls.
        sharding: where the parameters go. A mesh: each by the names of its axes, under the rules in force
            (`flax.core.spmd.logical_axis_rules`). A sharding: all by it. By default, JAX's default device.

    Returns:
        The layers by index, in ascending order.

    Raises:
        CheckpointError: a `ValueError`. Tensors are missing, unexpected, or of another shape or dtype, all of them
            listed in its `problems`; or a file is missing, damaged or hostile; or a number is too large for the dtype.
        ValueError: no such layer, a dtype that is not floating, a sharding that does not fit, or not the config of a
            DeepSeek-V4 model.
        ImportError: safetensors is missing (`pip install foveal[checkpoint]`).
    """
    _check_sharding(sharding)
    for name, kind in (("dtype", dtype), ("param_dtype", param_dtype)):
        if kind is not None:
            as_dtype(name, kind)  # before anything is read
    found = find_attention(path, config, layers)
    options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "precision": precision}
    return {layer: load_layer(found, layer, sharding=sharding, **options) for layer in found.layers}


def load_layer(
    found: AttentionCheckpoint,
    layer: int,
    *,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
    precision: Precision = None,
    sharding: Placement = None,
) -> CompressedAttention:
    """One of the layers that were found; arguments and errors are those of `load_attention`."""
    kind = as_dtype("dtype", found.dtype(layer) if dtype is None else dtype)
    param_kind = kind if param_dtype is None else as_dtype("param_dtype", param_dtype)
    graph, state = nnx.split(abstract_layer(found.config, layer, kind, param_kind, precision))
    flat, placements = dict(nnx.to_flat_state(state)), _placements(state, sharding)
    for source in found.layers[layer]:
        path = tuple(source.row.path.split("."))
        value = _read(source, flat[path].shape, flat[path].dtype)
        flat[path] = flat[path].replace(_place(source.row.path, value, placements[path]))
    return nnx.merge(graph, nnx.from_flat_state(flat))


def _check_sharding(sharding: object) -> None:
    if sharding is not None and not isinstance(sharding, jax.sharding.Mesh | jax.sharding.Sharding):
        raise ValueError(f"sharding: expected a Mesh, a Sharding or None, got {type(sharding).__name__}")


def _placements(state: Any, sharding: Placement) -> dict[tuple[Any, ...], jax.sharding.Sharding | None]:
    paths = [path for path, _ in nnx.to_flat_state(state)]
    if not isinstance(sharding, jax.sharding.Mesh):
        return dict.fromkeys(paths, sharding)
    try:
        by_axes = dict(nnx.to_flat_state(nnx.get_named_sharding(state, sharding)))
    except ValueError as error:
        raise ValueError(f"sharding: expected a rule for every axis (logical_axis_rules), got {error}") from error
    return {path: by_axes[path].get_value() for path in paths}


def _read(source: Source, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    weight = source.weight.read()
    try:
        with np.errstate(over="raise"):
            stored = weight if source.scale is None else fp8.dequantized(weight, source.scale.read(), dtype)
            return np.ascontiguousarray(source.row.to_module(stored.astype(dtype, copy=False), shape))
    except FloatingPointError:
        problem = f"{source.weight.name}: has numbers too large for {jnp.dtype(dtype).name}"
        raise CheckpointError(source.weight.file, [problem]) from None


def _place(name: str, value: np.ndarray, sharding: jax.sharding.Sharding | None) -> Array:
    if sharding is None:
        return jnp.asarray(value)
    try:
        # Unlike device_put also where some of the devices belong to other processes.
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
    except ValueError as error:
        raise ValueError(f"sharding: {name}, {list(value.shape)}: {error}") from error
