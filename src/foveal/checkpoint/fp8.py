"""Dequantising FP8 weights stored in blocks that share a scale."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

BLOCK = 128
"""Rows and columns per block."""

# A table of all 256 codes is several times as fast as NumPy's conversion.
_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_LEAST, _MOST = 2.0**-9, 448.0  # the smallest and the largest positive E4M3 number

Place = tuple[int, int]
"""A row and a column."""


def scale_shape(shape: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scales of a weight [out, in]: one per block; blocks at the edges may be smaller."""
    return -(-shape[0] // BLOCK), -(-shape[1] // BLOCK)


def dequantized(weight: np.ndarray, scale: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Dequantise a weight stored in blocks of 128 x 128: multiply each value by its block's scale.

    The product is computed in float32 or a wider dtype and rounded once. It is exact if the scales are powers of two
    (F8_E8M0). Rounding it to bfloat16 is exact as well, as an E4M3 number has four significant bits, except for the
    numbers that `unheld` finds.

    Args:
        weight: float8_e4m3fn [O, I].
        scale: float8_e8m0fnu or float32 [ceil(O / 128), ceil(I / 128)].
        dtype: dtype of the result.

    Returns:
        [O, I], in column-major order: modules hold the transpose, and this is twice as fast as transposing afterwards.
    """
    wide = _wide(dtype)
    codes, scale, values = weight.view(np.uint8), scale.astype(wide), _VALUES.astype(wide)
    out = np.empty(weight.shape, dtype, order="F")
    for block, factors in enumerate(scale):
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        # One row of blocks at a time bounds the memory of the float32 products.
        out[rows] = (values[codes[rows]] * np.repeat(factors, BLOCK)[: weight.shape[1]]).astype(dtype)
    return out


def no_numbers(stored: np.ndarray) -> np.ndarray:
    """Find the codes or scales that are NaN or infinite.

    Args:
        stored: float8_e4m3fn, float8_e8m0fnu or float32 [N, M].

    Returns:
        int [count, 2], rows and columns, in order.
    """
    if stored.dtype != ml_dtypes.float8_e4m3fn:
        return np.argwhere(~np.isfinite(stored.astype(np.float32)))
    codes = stored.view(np.uint8)
    # NaN has all bits set except possibly the sign: the largest signed byte, or the largest unsigned one.
    if codes.max(initial=0) < 0xFF and codes.view(np.int8).max(initial=0) < 0x7F:
        return np.empty((0, 2), int)
    return np.argwhere(codes & 0x7F == 0x7F)


def blocks_in_doubt(scale: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Find the blocks whose scales allow a number below or beyond a dtype's range.

    In all other blocks no number but 0 becomes 0. Rounding changes a number by no more than it changes the dtype's
    normal numbers, or by no more than half of the block's own step around 0.

    Args:
        scale: float8_e8m0fnu or float32.
        dtype: dtype of the dequantised numbers.

    Returns:
        int [count, 2], rows and columns of `scale`, in order.
    """
    limits, size = ml_dtypes.finfo(np.dtype(dtype)), np.abs(scale.astype(np.float64))
    smallest = float(limits.smallest_normal) * float(limits.eps)  # the smallest subnormal
    small = (size > 0) & (size * _LEAST < smallest)
    return np.argwhere(small | (size * _MOST > float(limits.max)))


def unheld(weight: np.ndarray, scale: np.ndarray, dtype: DTypeLike) -> tuple[Place, float] | None:
    """Find a dequantised number that is too small or too large for a dtype.

    Such a number would become 0 or infinite, or change by more than rounding.

    Args:
        weight: as in `dequantized`; NaN codes are ignored.
        scale: as in `dequantized`; NaN scales are ignored.
        dtype: the dtype that is to hold the products.

    Returns:
        The place and value of the first such number, searching block by block; None if there is none.
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
    """The dtype in which products are computed before rounding to `dtype`: float32 or a wider one."""
    return np.promote_types(np.dtype(dtype), np.float32)
