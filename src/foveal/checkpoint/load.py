"""Loading released weights into modules."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from foveal.checkpoint import fp8
from foveal.checkpoint.files import DTYPES, CheckpointError
from foveal.checkpoint.find import AttentionCheckpoint, Source, find_attention
from foveal.checkpoint.layers import abstract_layer
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
    """Load the attention layers of a DeepSeek-V4 checkpoint.

    Reads the released files (Flash, Pro and their Base variants), those of transformers and those of `save_attention`,
    and recognises their names. FP8 weights are dequantised exactly. Only the requested layers are read, one tensor at a
    time. Embeddings, experts, hyper-connections and MTP layers are ignored.

    Args:
        path: a directory with `config.json` and safetensors files, with or without an index; or the index or one such
            file beside a `config.json`. Symbolic links are followed, as the Hugging Face cache consists of them.
        config: the model's config; read from `config.json` by default.
        layers: indices of the layers to load; all by default.
        dtype: dtype of activations, as in `CompressedAttention`. By default, for each layer, the narrowest dtype that
            holds all of its kernels exactly: bfloat16 for the releases; float32 for FP8 with float32 scales, or with
            numbers below bfloat16's range.
        param_dtype: dtype of the kernels; `dtype` by default. FP8 numbers must not fall below its range; other numbers
            are rounded to it. Sinks, position biases and norm scales are always float32.
        precision: precision of the matmuls.
        sharding: where the parameters go. A mesh places each parameter by its axis names, under the current rules
            (`flax.core.spmd.logical_axis_rules`). A sharding applies to all parameters. By default, JAX's default
            device.

    Returns:
        The layers by index, in ascending order.

    Raises:
        CheckpointError: a subclass of `ValueError`. Tensors are missing, unexpected, or of another shape or dtype, all
            listed in its `problems`; or a file is missing, damaged or hostile; or FP8 scales are NaN or infinite, FP8
            weights are NaN, or numbers are too large or (FP8 only) too small for the dtype. Such numbers are reported
            per tensor, for the first layer that has any.
        ValueError: no such layer, a dtype that is not floating, a sharding that does not fit, or a config that is not
            that of a DeepSeek-V4 model.
        ImportError: safetensors is missing (`pip install '.[checkpoint]'` in a checkout).
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
    """Load one of the layers that were found; arguments and errors are those of `load_attention`."""
    sources = found.layers[layer]
    scales = [None if source.scale is None else source.scale.read() for source in sources]
    kind = as_dtype("dtype", _narrowest(sources, scales) if dtype is None else dtype)
    param_kind = kind if param_dtype is None else as_dtype("param_dtype", param_dtype)
    graph, state = nnx.split(abstract_layer(found.config, layer, kind, param_kind, precision))
    flat, placements = dict(nnx.to_flat_state(state)), _placements(state, sharding)
    problems: list[str] = []
    for source, scale in zip(sources, scales, strict=True):
        path = tuple(source.row.path.split("."))
        value, wrong = _read(source, scale, flat[path].shape, np.dtype(flat[path].dtype))
        problems += wrong
        if value is not None:
            flat[path] = flat[path].replace(_place(source.row.path, value, placements[path]))
    if problems:
        raise CheckpointError(found.files.path, problems)
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


def _narrowest(sources: Sequence[Source], scales: Sequence[np.ndarray | None]) -> np.dtype:
    """The narrowest dtype that holds every kernel exactly; float32 if none does, as with float32 scales."""
    pairs = zip(sources, scales, strict=True)
    kinds = {_holding(source, scale) for source, scale in pairs if source.row.is_kernel}
    return kinds.pop() if len(kinds) == 1 else DTYPES["F32"]


def _holding(source: Source, scale: np.ndarray | None) -> np.dtype:
    if scale is None:
        return DTYPES[source.weight.dtype]
    if scale.dtype == np.float32:
        return DTYPES["F32"]
    narrow = DTYPES["BF16"]
    # Read the kernel here, and again in `_read`, only if its scales alone do not decide.
    if len(fp8.blocks_in_doubt(scale, narrow)) and fp8.unheld(source.weight.read(), scale, narrow):
        return DTYPES["F32"]
    return narrow


def _read(
    source: Source, scale: np.ndarray | None, shape: tuple[int, ...], dtype: np.dtype
) -> tuple[np.ndarray | None, list[str]]:
    """Read a parameter; return it, or None and the problems of its numbers."""
    weight = source.weight.read()
    if scale is None:
        stored, problems = _rounded(source.weight.name, weight, dtype)
    else:
        problems = _fp8_problems(source, weight, scale, dtype)
        stored = weight if problems else fp8.dequantized(weight, scale, dtype)
    return None if problems else np.ascontiguousarray(source.row.to_module(stored, shape)), problems


def _fp8_problems(source: Source, weight: np.ndarray, scale: np.ndarray, dtype: np.dtype) -> list[str]:
    problems = [
        f"{tensor.name}: expected numbers, got {problem}"
        for tensor, stored in zip(source.tensors[::-1], (scale, weight), strict=True)
        if (problem := _no_numbers(stored))
    ]
    if problems or (found := fp8.unheld(weight, scale, dtype)) is None:
        return problems
    (row, column), value = found
    size = "small" if abs(value) < 1 else "large"
    return [f"{source.weight.name}: has numbers too {size} for {dtype.name}: {value:g} at [{row}, {column}]"]


def _no_numbers(stored: np.ndarray) -> str:
    places = fp8.no_numbers(stored)
    if not len(places):
        return ""
    row, column = map(int, places[0])
    more = f", the first of {len(places):,}" if len(places) > 1 else ""
    return f"{float(stored[row, column])} at [{row}, {column}]{more}"


def _rounded(name: str, stored: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, list[str]]:
    with np.errstate(over="ignore"):  # overflow is counted below: NumPy's warning misses ml_dtypes
        rounded = stored.astype(dtype, copy=False)
    if ml_dtypes.finfo(dtype).max >= ml_dtypes.finfo(stored.dtype).max:
        return rounded, []
    infinite = np.count_nonzero(np.isinf(rounded))
    if infinite and infinite > np.count_nonzero(np.isinf(stored)):
        return rounded, [f"{name}: has numbers too large for {dtype.name}"]
    return rounded, []


def _place(name: str, value: np.ndarray, sharding: jax.sharding.Sharding | None) -> Array:
    if sharding is None:
        return jnp.asarray(value)
    try:
        # Unlike device_put, this also works where some of the devices belong to other processes.
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
    except ValueError as error:
        raise ValueError(f"sharding: {name}, {list(value.shape)}: {error}") from error
