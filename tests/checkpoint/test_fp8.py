"""FP8 in blocks, against numbers put together from their bits."""

import ml_dtypes
import numpy as np
import pytest

from foveal.checkpoint.fp8 import dequantized, no_numbers, scale_shape, unheld
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


VALUES = np.array([e4m3(code) for code in range(256)])


def expected(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    rows, columns = np.indices(codes.shape)
    return VALUES[codes] * scales[rows // 128, columns // 128].astype(np.float64)


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
    np.testing.assert_array_equal(got[0], VALUES)
    assert np.nanmax(got) == 448.0


CODES = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_every_code_times_every_power_of_two_is_exact_or_known_not_to_be(dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    weight = CODES[:, None].view(ml_dtypes.float8_e4m3fn)
    values = VALUES[CODES]
    for byte in range(255):
        scale = np.array([[byte], [127]], np.uint8).view(ml_dtypes.float8_e8m0fnu)
        exact = values * np.where(np.arange(254) < 128, 2.0 ** (byte - 127), 1.0)
        with np.errstate(over="ignore"):
            got = dequantized(weight, scale, kind)[:, 0].astype(np.float64)
        (wrong,) = np.nonzero(got != exact)
        expected = ((int(wrong[0]), 0), exact[wrong[0]]) if wrong.size else None
        assert unheld(weight, scale, kind) == expected, byte


def test_float32_scales_lose_no_number_but_what_is_found(rng):
    """Of the others none becomes zero or infinite, or moves by more than rounding or half a step of its block."""
    weight, values = CODES[:127, None].view(ml_dtypes.float8_e4m3fn), VALUES[CODES[:127]]
    for dtype, eps in (("bfloat16", 2.0**-8), ("float16", 2.0**-11), ("float32", 2.0**-24), ("float64", 0.0)):
        kind, lost = np.dtype(getattr(ml_dtypes, dtype, dtype)), 0
        for exponent in range(-149, 128):
            scale = np.float32(rng.uniform(1, 2)) * np.ldexp(np.float32(1), exponent)
            exact, step = values * float(scale), float(scale) * 2.0**-9
            with np.errstate(over="ignore"):
                got = dequantized(weight, np.array([[scale]]), kind)[:, 0].astype(np.float64)
            found = unheld(weight, np.array([[scale]]), kind)
            lost += found is not None
            if found is None:
                assert (np.abs(got - exact) <= np.maximum(eps * exact, step / 2)).all(), (dtype, exponent)
                assert ((got != 0) == (exact != 0)).all(), (dtype, exponent)
            else:
                (row, _), value = found
                assert value == exact[row]
                assert abs(got[row] - value) > eps * value
        assert 0 < lost < 277 or dtype == "float64"


def test_codes_that_are_no_numbers_are_found_wherever_they_are():
    codes = CODES[np.arange(300 * 257) % 254].reshape(300, 257).copy()
    assert no_numbers(codes.view(ml_dtypes.float8_e4m3fn)).shape == (0, 2)
    for code in (0x7F, 0xFF):
        for place in ((0, 0), (299, 256), (130, 1)):
            wrong = codes.copy()
            wrong[place] = code
            np.testing.assert_array_equal(no_numbers(wrong.view(ml_dtypes.float8_e4m3fn)), [place])


@pytest.mark.parametrize("scales", ["e8m0", "float32"])
def test_what_the_generator_quantizes_is_near_and_not_saturated(scales, rng):
    weight = (rng.normal(size=(300, 257)) * np.exp(rng.normal(size=(300, 1)))).astype(np.float32)
    codes, scale = quantized(weight, scales)
    assert scale.dtype == (np.float32 if scales == "float32" else ml_dtypes.float8_e8m0fnu)
    got = dequantized(codes, scale, np.float32)
    of_block = np.kron(scale.astype(np.float32), np.ones((128, 128)))[:300, :257]
    # Half a unit in the last of four significant bits, or half of the smallest number.
    assert (np.abs(got - weight) <= np.maximum(np.abs(weight) / 16, of_block * 2.0**-10) * 1.001).all()
