"""Saving attention modules to files."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping

import jax
import numpy as np
from flax import nnx

from foveal.checkpoint.files import DTYPES
from foveal.checkpoint.names import Dialect, Row, as_dialect, full_name, rows_of
from foveal.checkpoint.writing import SHARD_BYTES, ToWrite, write_checkpoint
from foveal.config import AttentionConfig
from foveal.nn.attention import CompressedAttention
from foveal.typing import Array

_WRITTEN = tuple(DTYPES[name] for name in ("F32", "F16", "BF16"))  # FP8 weights need scales, which modules do not have


def save_attention(
    path: str | os.PathLike[str],
    layers: Mapping[int, CompressedAttention],
    *,
    dialect: Dialect | str = Dialect.DEEPSEEK,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Save attention layers as safetensors files, an index and a `config.json`.

    Every parameter is written in its own dtype, and `load_attention` returns it unchanged, to the bit. The dtype of
    activations is not part of a checkpoint: a layer whose activations have another dtype than its kernels must be
    loaded with `dtype` and `param_dtype`. For the state of a training run, optimizer included, use Orbax.

    Args:
        path: a directory that does not exist or is empty. It appears only when everything has been written.
        layers: the layers by index, as `load_attention` returns them. If they are not all layers of a model, pass their
            indices when loading.
        dialect: the naming scheme: "deepseek", "transformers" or "transformers-saved" (see `Dialect`).
        shard_bytes: maximum size of a file, and about the memory needed. A larger tensor gets a file of its own.

    Raises:
        ValueError: no layers, layers of different models or types, parameters whose dtype cannot be written or that are
            partly held by other processes, an unknown dialect, or a path that exists and is not an empty directory.
        OSError: the files cannot be written; only parent directories are left behind.
        ImportError: safetensors is missing (`pip install '.[checkpoint]'` in a checkout).
    """
    dialect = as_dialect(dialect)
    config = common_config(layers)
    tensors = [tensor for layer in sorted(layers) for tensor in _tensors(layers[layer], layer, dialect)]
    write_checkpoint(path, tensors, config.to_hf_config(), shard_bytes)


def common_config(layers: Mapping[int, CompressedAttention]) -> AttentionConfig:
    """Return the config that all layers share.

    Raises:
        ValueError: there are no layers, their configs differ, or a layer's type is not that of its index.
    """
    if not isinstance(layers, Mapping) or not layers:
        got = "an empty one" if isinstance(layers, Mapping) else type(layers).__name__
        raise ValueError(f"layers: expected a mapping of indices to layers, got {got}")
    for index, layer in layers.items():
        if not isinstance(layer, CompressedAttention):
            raise ValueError(f"layers[{index!r}]: expected a CompressedAttention, got {type(layer).__name__}")
    config = next(iter(layers.values())).config
    for index, layer in layers.items():
        if layer.config != config:
            raise ValueError(
                f"layers[{index!r}]: expected a layer of the same config as the others, got {layer.config}"
            )
        if config.layer_type(index) != layer.layer_type:
            expected = config.layer_type(index)
            raise ValueError(f"layers[{index!r}]: expected a {expected} layer, got a {layer.layer_type} layer")
    return config


def parameters(layer: CompressedAttention) -> Iterator[tuple[Row, Array]]:
    """Yield every parameter of a layer with its row of the table in `names`."""
    flat = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(layer, nnx.Param))}
    for row in rows_of(layer.spec):
        yield row, flat[row.path]


def _tensors(layer: CompressedAttention, index: int, dialect: Dialect) -> Iterator[ToWrite]:
    for row, value in parameters(layer):
        if value.dtype not in _WRITTEN:
            known = ", ".join(dtype.name for dtype in _WRITTEN)
            raise ValueError(f"layers[{index}].{row.path}: expected one of {known}, got {value.dtype}")
        if not value.is_fully_addressable:
            raise ValueError(f"layers[{index}].{row.path}: expected a fully addressable array, got parts of one")
        yield ToWrite(full_name(row, dialect, index), value.nbytes, functools.partial(_to_file, row, value))


def _to_file(row: Row, value: Array) -> np.ndarray:
    return row.to_file(np.asarray(jax.device_get(value)))
