"""Numbers that a dtype does not hold, and scales and codes that are no numbers: none of them arrives unsaid."""

import ml_dtypes
import numpy as np
import pytest

from foveal import CheckpointError, load_attention
from foveal.testing.parameters import get_params
from tests.checkpoint.rewriting import Arrays, rewrite, tensors_of

WKV, WQ_A = "layers.0.attn.wkv", "layers.0.attn.wq_a"  # [48, 160] and [136, 160]: one block by two, two by two
FIVE = np.array([0x00, 0x01, 0x83, 0x0B, 0x7E], np.uint8)  # 0, 2**-9, -3 * 2**-9, 11 * 2**-9, 448
FIVE_VALUES = np.array([0, 1, -3, 11, 448 * 2**9]) * 2.0**-9
NARROW = ["bfloat16", "float16"]


@pytest.fixture
def changed(written, tmp_path):
    """A checkpoint with these arrays instead of its own, which are FP8 with such scales."""

    def change(arrays: Arrays, **options):
        own = {name: array for name, array in tensors_of(written(**options)).items() if name.startswith("layers.0.")}
        rewrite(written(**options), tmp_path / "changed", own | arrays)
        return tmp_path / "changed"

    return change


def codes(name: str, written, values: np.ndarray | list[int] | int) -> np.ndarray:
    """A weight all of whose codes are these in turn, row by row."""
    shape = tensors_of(written())[name + ".weight"].shape
    return np.resize(np.asarray(values, np.uint8), shape).view(ml_dtypes.float8_e4m3fn)


def powers(*blocks: list[int]) -> np.ndarray:
    """Scales of these bytes: 2 ** (byte - 127)."""
    return np.array(blocks, np.uint8).view(ml_dtypes.float8_e8m0fnu)


def problems(path, **options) -> list[str]:
    with pytest.raises(CheckpointError) as raised:
        load_attention(path, layers=[0], **options)
    assert raised.value.path == path
    return list(raised.value.problems)


# ------------------------------------------------------------------------------------------------------ the small end


@pytest.mark.parametrize("byte", [0, 1, 2, 3])
def test_the_smallest_numbers_come_out_exactly_in_the_narrowest_dtype_that_holds_them(byte, changed, written):
    weight = codes(WKV, written, FIVE)
    path = changed({WKV + ".weight": weight, WKV + ".scale": powers([byte, 130])})
    kernel = np.asarray(get_params(load_attention(path, layers=[0])[0])["kv_proj.kernel"])
    assert kernel.dtype == (ml_dtypes.bfloat16 if byte == 3 else np.float32)
    want = np.resize(FIVE_VALUES, weight.shape) * np.repeat([2.0 ** (byte - 127), 8.0], [128, 32])
    np.testing.assert_array_equal(kernel.astype(np.float64), want.T)


def test_a_small_scale_alone_makes_nothing_wider(changed, written):
    """As many quantisers give a block of zeros; and even codes have a bit less."""
    for values, byte in (([0x00, 0x80], 0), ([0x02, 0x7E], 2)):
        path = changed({WKV + ".weight": codes(WKV, written, values), WKV + ".scale": powers([byte, 127])})
        params = get_params(load_attention(path, layers=[0])[0])
        assert params["kv_proj.kernel"].dtype == ml_dtypes.bfloat16
        assert load_attention(path, layers=[0], dtype="float16" if byte == 0 else "bfloat16")


def test_one_number_in_the_last_block_is_found(changed, written):
    weight = codes(WQ_A, written, 0x7E)
    weight.view(np.uint8)[130, 150] = 0x01
    path = changed({WQ_A + ".weight": weight, WQ_A + ".scale": powers([127, 127], [127, 2])})
    assert load_attention(path, layers=[0])[0].q_a_proj.kernel.dtype == np.float32
    (problem,) = problems(path, dtype="bfloat16")
    assert problem == f"{WQ_A}.weight: has numbers too small for bfloat16: 4.59177e-41 at [130, 150]"


@pytest.mark.parametrize(("dtype", "byte"), [("bfloat16", 2), ("float16", 111)])
def test_a_dtype_that_is_asked_for_must_hold_every_number(dtype, byte, changed, written):
    for code, lost in ((0x01, True), (0x03, True), (0x02, False), (0x81, True), (0x82, False)):
        path = changed({WKV + ".weight": codes(WKV, written, code), WKV + ".scale": powers([127, byte])})
        if lost:
            (problem,) = problems(path, dtype=dtype)
            assert problem.startswith(f"{WKV}.weight: has numbers too small for {dtype}: ")
            assert problem.endswith(" at [0, 128]")
            assert problems(path, dtype="float32", param_dtype=dtype) == [problem]
        else:
            assert load_attention(path, layers=[0], dtype=dtype)[0].kv_proj.kernel.dtype.name == dtype
        wide = load_attention(path, layers=[0], dtype=dtype, param_dtype="float32")[0]
        assert np.count_nonzero(np.asarray(wide.kv_proj.kernel[...])) == 48 * 160


def test_what_not_even_float32_holds_is_refused(changed, written):
    tiny, least = np.float32(2.0**-141), np.float32(2.0**-140)  # times 2**-9
    for code in (0x01, 0x81):
        weight = codes(WKV, written, code)
        path = changed({WKV + ".weight": weight, WKV + ".scale": np.array([[1, tiny]], np.float32)}, scales="float32")
        assert problems(path) == [
            f"{WKV}.weight: has numbers too small for float32: {'-' * (code > 1)}7.00649e-46 at [0, 128]"
        ]
        path = changed({WKV + ".weight": weight, WKV + ".scale": np.array([[1, least]], np.float32)}, scales="float32")
        kernel = np.asarray(load_attention(path, layers=[0])[0].kv_proj.kernel[...])
        assert abs(kernel[128, 0]) == 2.0**-149


def test_float32_scales_are_rounded_to_the_dtype_asked_for(written):
    """Each number by no more than half of the step of its block."""
    for dtype in NARROW:
        layer = load_attention(written(scales="float32"), dtype=dtype)[0]
        assert layer.kv_proj.kernel.dtype.name == dtype


# ------------------------------------------------------------------------------------------------------ the large end


def test_numbers_too_large_for_a_dtype(changed, written):
    large = tensors_of(written(weights="float32"))["layers.0.attn.wo_b.weight"] * np.float32(1e7)
    path = changed({"layers.0.attn.wo_b.weight": large}, weights="float32")
    load_attention(path, layers=[0], dtype="bfloat16")
    assert problems(path, dtype="float16") == ["layers.0.attn.wo_b.weight: has numbers too large for float16"]
    # From bfloat16 too, and beyond what bfloat16 holds of float32's range.
    path = changed({"layers.0.attn.wo_b.weight": large.astype(ml_dtypes.bfloat16)}, weights="bfloat16")
    assert problems(path, dtype="float16") == ["layers.0.attn.wo_b.weight: has numbers too large for float16"]
    path = changed({"layers.0.attn.wo_b.weight": np.full_like(large, -3.4e38)}, weights="float32")
    load_attention(path, layers=[0], dtype="float32")
    assert problems(path, dtype="bfloat16") == ["layers.0.attn.wo_b.weight: has numbers too large for bfloat16"]


def test_infinities_that_the_file_has_are_not_too_large(changed, written):
    infinite = np.full_like(tensors_of(written(weights="float32"))[WKV + ".weight"], np.inf)
    layer = load_attention(changed({WKV + ".weight": infinite}, weights="float32"), layers=[0], dtype="float16")[0]
    assert np.isposinf(np.asarray(layer.kv_proj.kernel[...])).all()


def test_products_too_large_for_a_dtype(changed, written):
    path = changed({WKV + ".weight": codes(WKV, written, FIVE), WKV + ".scale": powers([127, 254])})
    for options in ({}, {"dtype": "float32"}):
        assert problems(path, **options) == [
            f"{WKV}.weight: has numbers too large for float32: 7.62233e+40 at [0, 129]"
        ]
    scales = np.array([[1, 3.4e38 / 448]], np.float32)
    path = changed({WKV + ".weight": codes(WKV, written, 0x7E), WKV + ".scale": scales}, scales="float32")
    assert np.asarray(load_attention(path, layers=[0])[0].kv_proj.kernel[...]).max() > 3.39e38
    assert problems(path, dtype="bfloat16") == [
        f"{WKV}.weight: has numbers too large for bfloat16: 3.4e+38 at [0, 128]"
    ]


# ---------------------------------------------------------------------------------------------------- what is no number


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_a_scale_or_a_code_that_is_no_number_is_named(dtype, changed, written):
    weight = codes(WQ_A, written, FIVE)
    weight.view(np.uint8)[[3, 131], [7, 0]] = 0xFF, 0x7F
    path = changed({WQ_A + ".weight": weight})
    assert problems(path, dtype=dtype) == [f"{WQ_A}.weight: expected numbers, got nan at [3, 7], the first of 2"]
    path = changed({WQ_A + ".scale": powers([127, 127], [255, 127])})
    assert problems(path, dtype=dtype) == [f"{WQ_A}.scale: expected numbers, got nan at [1, 0]"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_float32_scale_that_is_no_number_is_named(value, changed):
    path = changed({WKV + ".scale": np.array([[1, value]], np.float32)}, scales="float32")
    assert problems(path) == [f"{WKV}.scale: expected numbers, got {value} at [0, 1]"]


def test_of_a_layer_all_is_said_at_once(changed, written):
    weight = codes(WKV, written, 0x01)
    weight.view(np.uint8)[1, 1] = 0x7F
    found = {
        WKV + ".weight": weight,
        WKV + ".scale": powers([255, 255]),
        WQ_A + ".weight": codes(WQ_A, written, 0x01),
        WQ_A + ".scale": powers([2, 2], [2, 2]),
    }
    assert problems(changed(found), dtype="bfloat16") == [
        f"{WQ_A}.weight: has numbers too small for bfloat16: 4.59177e-41 at [0, 0]",
        f"{WKV}.scale: expected numbers, got nan at [0, 0], the first of 2",
        f"{WKV}.weight: expected numbers, got nan at [1, 1]",
    ]
