"""FP8 in blocks, against numbers put together from their bits, one at a time."""

import ml_dtypes
import numpy as np
import pytest

from foveal.checkpoint.fp8 import dequantized, scale_shape
from foveal.testing.checkpoints import quantized

SHAPES = [(1, 1), (127, 129), (128, 128), (256, 384), (300, 257)]


def e4m3(code: int) -> float:
    """One sign bit, four of the exponent (bias 7), three of the fraction; no infinities, NaN where all bits are set."""
    sign, exponent, fraction = -1.0 if code & 0x80 else 1.0, code >> 3 & 0xF, code & 7
    if code & 0x7F == 0x7F:
        return np.nan
    if exponent == 0:
        return sign * fraction * 2.0**-9
    return sign * (8 + fraction) * 2.0 ** (exponent - 10)


def expected(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    made = np.empty(codes.shape)
    for (o, i), code in np.ndenumerate(codes):
        made[o, i] = e4m3(int(code)) * float(scales[o // 128, i // 128])
    return made


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_powers_of_two_as_scales_are_exact(shape, dtype, rng):
    codes = rng.integers(0, 256, shape, np.uint8)
    scales = rng.integers(127 - 60, 127 + 60, scale_shape(shape), np.uint8)
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    got = dequantized(codes.view(ml_dtypes.float8_e4m3fn), scales.view(ml_dtypes.float8_e8m0fnu), dtype)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.astype(np.float64), expected(codes, 2.0 ** (scales.astype(int) - 127)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_scales_are_rounded_once(shape, rng):
    codes = rng.integers(0, 256, shape, np.uint8)
    scales = rng.uniform(0.5, 2, scale_shape(shape)).astype(np.float32)
    exact = expected(codes, scales)  # in float64: four bits times 24
    got = dequantized(codes.view(ml_dtypes.float8_e4m3fn), scales, np.float32)
    np.testing.assert_array_equal(got, exact.astype(np.float32))


def test_every_code_at_once():
    codes = np.arange(256, dtype=np.uint8)[None]
    ones = np.full((1, 2), 127, np.uint8).view(ml_dtypes.float8_e8m0fnu)
    got = dequantized(codes.view(ml_dtypes.float8_e4m3fn), ones, np.float32)
    np.testing.assert_array_equal(got[0], [e4m3(code) for code in range(256)])
    assert np.nanmax(got) == 448.0


@pytest.mark.parametrize("scales", ["e8m0", "float32"])
def test_what_the_generator_quantizes_is_near_and_not_saturated(scales, rng):
    weight = (rng.normal(size=(300, 257)) * np.exp(rng.normal(size=(300, 1)))).astype(np.float32)
    codes, scale = quantized(weight, scales)
    assert scale.dtype == (np.float32 if scales == "float32" else ml_dtypes.float8_e8m0fnu)
    got = dequantized(codes, scale, np.float32)
    of_block = np.kron(scale.astype(np.float32), np.ones((128, 128)))[:300, :257]
    # Half a unit in the last of four significant bits, or half of the smallest number.
    assert (np.abs(got - weight) <= np.maximum(np.abs(weight) / 16, of_block * 2.0**-10) * 1.001).all()
