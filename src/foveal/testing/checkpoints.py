"""Small checkpoints in every dialect, FP8 included, for tests and for trying the loader without a download."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator

import ml_dtypes
import numpy as np

from foveal.checkpoint.fp8 import BLOCK
from foveal.checkpoint.names import Dialect, Row, Stored, as_dialect, full_name, rows_of, scale_name
from foveal.checkpoint.writing import SHARD_BYTES, ToWrite, write_checkpoint
from foveal.config import AttentionConfig
from foveal.testing.generators import random_params

_LARGEST = 448.0  # in E4M3
_PLAIN = {Stored.BF16: np.dtype(ml_dtypes.bfloat16), Stored.F32: np.dtype(np.float32)}


def write_random_checkpoint(
    path: str | os.PathLike[str],
    config: AttentionConfig | None = None,
    *,
    layers: Iterable[int] | None = None,
    dialect: Dialect | str = Dialect.DEEPSEEK,
    weights: str = "fp8",
    scales: str = "e8m0",
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a checkpoint of attention layers with the random parameters of `expected_params`.

    Args:
        path: directory to write, which must not exist or be empty.
        config: of the model; `AttentionConfig.tiny()` by default.
        layers: indices of the layers to write; all by default.
        dialect: the naming of the tensors.
        weights: "fp8" stores each tensor as the releases do: E4M3 with scales, bfloat16 or float32. "bfloat16" stores
            the releases' FP8 tensors in bfloat16 too, "float32" stores everything in float32.
        scales: dtype of the FP8 blocks' scales: "e8m0" as in the releases, "float32" as in their Base models.
        seed: random seed; each layer draws different numbers from it.
        shard_bytes: maximum size of a file.

    Raises:
        ValueError: an argument has a value other than those above, or `path` exists and is not an empty directory.
        ImportError: safetensors is missing.
    """
    config = AttentionConfig.tiny() if config is None else config
    dialect = as_dialect(dialect)
    _check("weights", weights, ("fp8", "bfloat16", "float32"))
    _check("scales", scales, ("e8m0", "float32"))
    chosen = range(config.num_layers) if layers is None else layers
    tensors = [tensor for layer in chosen for tensor in _layer_tensors(config, layer, dialect, weights, scales, seed)]
    write_checkpoint(path, tensors, config.to_hf_config(), shard_bytes)


def expected_params(
    config: AttentionConfig, layer: int, *, weights: str = "fp8", scales: str = "e8m0", seed: int = 0
) -> dict[str, np.ndarray]:
    """Parameters that such a checkpoint holds: those of `random_params`, rounded to the stored dtypes.

    Args:
        config: of the model.
        layer: the layer's index.
        weights: as in `write_random_checkpoint`.
        scales: likewise.
        seed: likewise.

    Returns:
        float32 arrays by the module's dotted names, as `random_params` returns them.
    """
    found = {}
    for row, value in _rows(config, layer, seed):
        stored = _stored(row, value, weights, scales)
        rounded = stored[0].astype(np.float32)
        if len(stored) == 2:
            scale = np.kron(stored[1].astype(np.float32), np.ones((BLOCK, BLOCK), np.float32))
            rounded = rounded * scale[: rounded.shape[0], : rounded.shape[1]]
        found[row.path] = row.to_module(rounded, value.shape)
    return found


def quantized(weight: np.ndarray, scales: str = "e8m0") -> tuple[np.ndarray, np.ndarray]:
    """Quantise a weight to FP8, in blocks of 128 x 128 that use all of E4M3's range.

    Args:
        weight: float32 [O, I].
        scales: "e8m0", powers of two, or "float32".

    Returns:
        float8_e4m3fn [O, I], and scales [ceil(O / 128), ceil(I / 128)], float8_e8m0fnu or float32.
    """
    blocks = [-(-size // BLOCK) for size in weight.shape]
    padded = np.zeros([n * BLOCK for n in blocks], np.float32)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    tiles = padded.reshape(blocks[0], BLOCK, blocks[1], BLOCK)
    scale = np.maximum(np.abs(tiles).max((1, 3)), np.float32(1e-12)) / np.float32(_LARGEST)
    if scales == "e8m0":
        scale = np.exp2(np.ceil(np.log2(scale)))
    codes = np.clip(tiles / scale[:, None, :, None], -_LARGEST, _LARGEST).astype(ml_dtypes.float8_e4m3fn)
    codes = np.ascontiguousarray(codes.reshape(padded.shape)[: weight.shape[0], : weight.shape[1]])
    return codes, scale.astype(ml_dtypes.float8_e8m0fnu if scales == "e8m0" else np.float32)


def _layer_tensors(
    config: AttentionConfig, layer: int, dialect: Dialect, weights: str, scales: str, seed: int
) -> Iterator[ToWrite]:
    for row, value in _rows(config, layer, seed):
        name = full_name(row, dialect, layer)
        names = (name, scale_name(name, dialect))
        for part, stored in enumerate(_stored(row, value, weights, scales)):
            yield ToWrite(names[part], stored.nbytes, functools.partial(np.asarray, stored))


def _rows(config: AttentionConfig, layer: int, seed: int) -> Iterator[tuple[Row, np.ndarray]]:
    layer_type = config.layer_type(layer)
    params = random_params(config, layer_type, seed=1000 * seed + layer)
    return ((row, params[row.path]) for row in rows_of(config.layer(layer_type)))


def _stored(row: Row, value: np.ndarray, weights: str, scales: str) -> tuple[np.ndarray, ...]:
    """The tensor as stored in the file, followed by its scales if it has any."""
    array = row.to_file(value)
    if weights == "float32":
        return (array,)
    if row.stored is Stored.F8:
        return quantized(array, scales) if weights == "fp8" else (array.astype(_PLAIN[Stored.BF16]),)
    return (array.astype(_PLAIN[row.stored]),)


def _check(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, known))}, got {value!r}")
