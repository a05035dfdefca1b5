"""FP8 weights in blocks that share a scale."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

BLOCK = 128
"""Rows and columns of a block."""

# A table of all 256 codes: several times as fast as NumPy's conversion.
_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_LEAST, _MOST = 2.0**-9, 448.0  # of E4M3's positive numbers

Place = tuple[int, int]
"""A row and a column."""


def scale_shape(shape: tuple[int, int]) -> tuple[int, int]:
    """The scales of a weight [out, in]: one a block, those at the edges smaller."""
    return -(-shape[0] // BLOCK), -(-shape[1] // BLOCK)


def dequantized(weight: np.ndarray, scale: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Weights of a checkpoint in blocks of 128 x 128, each value times its block's scale.

    The product is taken in float32 or a wider dtype, where it is exact if the scales are powers of two (F8_E8M0), and
    rounded once: to bfloat16 that is exact too, as an E4M3 number has four significant bits, but for what `unheld`
    finds.

    Args:
        weight: float8_e4m3fn [O, I].
        scale: float8_e8m0fnu or float32 [ceil(O / 128), ceil(I / 128)].
        dtype: of the result.

    Returns:
        [O, I], in column-major order: modules hold the transpose, and this is twice as fast as transposing after it.
    """
    wide = _wide(dtype)
    codes, scale, values = weight.view(np.uint8), scale.astype(wide), _VALUES.astype(wide)
    out = np.empty(weight.shape, dtype, order="F")
    for block, factors in enumerate(scale):
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        # Not more than a few rows of blocks exist in float32 at once.
        out[rows] = (values[codes[rows]] * np.repeat(factors, BLOCK)[: weight.shape[1]]).astype(dtype)
    return out


def no_numbers(stored: np.ndarray) -> np.ndarray:
    """Where codes or scales are NaN, or infinite.

    Args:
        stored: float8_e4m3fn, float8_e8m0fnu or float32 [N, M].

    Returns:
        int [count, 2], rows and columns in order.
    """
    if stored.dtype != ml_dtypes.float8_e4m3fn:
        return np.argwhere(~np.isfinite(stored.astype(np.float32)))
    codes = stored.view(np.uint8)
    # NaN has all bits set but for the sign: the largest number of signed bytes, or of unsigned ones.
    if codes.max(initial=0) < 0xFF and codes.view(np.int8).max(initial=0) < 0x7F:
        return np.empty((0, 2), int)
    return np.argwhere(codes & 0x7F == 0x7F)


def blocks_in_doubt(scale: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """The blocks of which a number can lie below or beyond a dtype's range, as their scales say.

    In all others no number but 0 becomes 0, and none is rounded by more than the dtype does it to normal numbers, or
    than half of the block's own steps around 0.

    Args:
        scale: float8_e8m0fnu or float32.
        dtype: of dequantised numbers.

    Returns:
        int [count, 2], rows and columns of `scale`, in order.
    """
    limits, size = ml_dtypes.finfo(np.dtype(dtype)), np.abs(scale.astype(np.float64))
    smallest = float(limits.smallest_normal) * float(limits.eps)  # that is not 0
    small = (size > 0) & (size * _LEAST < smallest)
    return np.argwhere(small | (size * _MOST > float(limits.max)))


def unheld(weight: np.ndarray, scale: np.ndarray, dtype: DTypeLike) -> tuple[Place, float] | None:
    """A dequantised number that is too small or too large for a dtype.

    Args:
        weight: as in `dequantized`; NaN is passed over, in codes and scales.
        scale: likewise.
        dtype: what is to hold the products: any would become 0, infinite, or another by more than rounding.

    Returns:
        Where the first one is, block by block, and what it is. None where there is none.
    """
    codes, step = weight.view(np.uint8), float(ml_dtypes.finfo(np.dtype(dtype)).eps)
    for o, i in blocks_in_doubt(scale, dtype):
        exact = _VALUES.astype(np.float64) * float(scale[o, i])
        with np.errstate(over="ignore"):
            held = exact.astype(_wide(dtype)).astype(dtype).astype(np.float64)
        lost = np.abs(held - exact) > step * np.abs(exact)
        found = np.argwhere(lost[codes[o * BLOCK : (o + 1) * BLOCK, i * BLOCK : (i + 1) * BLOCK]])
        if found.size:
            row, column = int(o) * BLOCK + int(found[0, 0]), int(i) * BLOCK + int(found[0, 1])
            return (row, column), float(exact[codes[row, column]])
    return None


def _wide(dtype: DTypeLike) -> np.dtype:
    """The dtype of products that are then rounded to `dtype`: float32, or a wider one."""
    return np.promote_types(np.dtype(dtype), np.float32)
