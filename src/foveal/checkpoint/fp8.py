"""FP8 weights in blocks that share a scale."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

BLOCK = 128
"""Rows and columns of a block."""

# A table of all 256 codes: several times as fast as NumPy's conversion.
_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def scale_shape(shape: tuple[int, int]) -> tuple[int, int]:
    """The scales of a weight [out, in]: one a block, those at the edges smaller."""
    return -(-shape[0] // BLOCK), -(-shape[1] // BLOCK)


def dequantized(weight: np.ndarray, scale: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Weights of a checkpoint in blocks of 128 x 128, each value times its block's scale.

    The product is taken in float32, where it is exact if the scales are powers of two (F8_E8M0), and rounded once: to
    bfloat16 that is exact too, as an E4M3 number has four significant bits.

    Args:
        weight: float8_e4m3fn [O, I].
        scale: float8_e8m0fnu or float32 [ceil(O / 128), ceil(I / 128)].
        dtype: of the result.

    Returns:
        [O, I], in column-major order: modules hold the transpose, and this is twice as fast as transposing after it.
    """
    codes, scale = weight.view(np.uint8), scale.astype(np.float32)
    out = np.empty(weight.shape, dtype, order="F")
    for block, factors in enumerate(scale):
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        # Not more than a few rows of blocks exist in float32 at once.
        out[rows] = (_VALUES[codes[rows]] * np.repeat(factors, BLOCK)[: weight.shape[1]]).astype(dtype)
    return out
