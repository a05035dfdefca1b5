"""Modules into files."""

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

_WRITTEN = tuple(DTYPES[name] for name in ("F32", "F16", "BF16"))  # an FP8 weight is nothing without its scales


def save_attention(
    path: str | os.PathLike[str],
    layers: Mapping[int, CompressedAttention],
    *,
    dialect: Dialect | str = Dialect.DEEPSEEK,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes attention layers as safetensors files, an index and a `config.json`.

    Every parameter is written in its own dtype, and is what `load_attention` returns, to the bit. The dtype of
    activations is no part of a checkpoint: a layer that computes in another one than its kernels' must be loaded with
    `dtype` and `param_dtype`. For the state of a training run, optimizer included, use Orbax.

    Args:
        path: of a directory, which must not exist or be empty; it appears when everything is written.
        layers: the layers by index, as `load_attention` returns them. If these are not all of a model's, name them when
            loading.
        dialect: whose names to give: "deepseek", "transformers" or "transformers-saved" (see `Dialect`).
        shard_bytes: how large a file may become; that much memory is taken. A larger tensor has a file for itself.

    Raises:
        ValueError: no layers, layers of different models or types, parameters of a dtype that files do not hold or
            that other processes hold parts of, an unknown dialect, or something is at the path already.
        OSError: it cannot be written; nothing is left behind but parent directories.
        ImportError: safetensors is missing (`pip install '.[checkpoint]'` in a checkout).
    """
    dialect = as_dialect(dialect)
    config = common_config(layers)
    tensors = [tensor for layer in sorted(layers) for tensor in _tensors(layers[layer], layer, dialect)]
    write_checkpoint(path, tensors, config.to_hf_config(), shard_bytes)


def common_config(layers: Mapping[int, CompressedAttention]) -> AttentionConfig:
    """The config of all these layers.

    Raises:
        ValueError: there are none, or they are not of one model, or one is not of the type that its index has.
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
    """Every parameter of a layer with its row of the table."""
    flat = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(layer, nnx.Param))}
    for row in rows_of(layer.spec):
        yield row, flat[row.path]


def _tensors(layer: CompressedAttention, index: int, dialect: Dialect) -> Iterator[ToWrite]:
    for row, value in parameters(layer):
        if value.dtype not in _WRITTEN:
            known = ", ".join(dtype.name for dtype in _WRITTEN)
            raise ValueError(f"layers[{index}].{row.path}: expected one of {known}, got {value.dtype}")
        if not value.is_fully_addressable:
            raise ValueError(f"layers[{index}].{row.path}: expected an array that this process holds, got parts of one")
        yield ToWrite(full_name(row, dialect, index), value.nbytes, functools.partial(_to_file, row, value))


def _to_file(row: Row, value: Array) -> np.ndarray:
    return row.to_file(np.asarray(jax.device_get(value)))
