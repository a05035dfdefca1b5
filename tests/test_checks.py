"""What an argument may be, rule by rule."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from foveal import checks

pytestmark = pytest.mark.usefixtures("unchecked_annotations")

ROWS = np.array([[1, 2], [3, 4]], np.int32)


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises(ValueError, match=r"^[a-z]+: expected ") as error:
        call(*args, **kwargs)
    return str(error.value)


def test_jax_is_imported_by_the_functions_that_take_arrays():
    """`foveal.config` shall not need it, and takes its rules from there."""
    script = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("checks", sys.argv[1])
checks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(checks)
assert checks.as_int("x", 3) == 3 and "jax" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script, checks.__file__], check=True, timeout=120)


@pytest.mark.parametrize("value", [3, np.int8(3), np.int64(3), np.uint64(3)])
def test_any_int_is_an_int(value):
    made = checks.as_int("size", value, 3, 3)
    assert made == 3
    assert type(made) is int


@pytest.mark.parametrize(
    "value", [True, np.True_, 3.0, "3", None, 2, 9, np.int64(2), np.array(3), jnp.int32(3), [3]], ids=repr
)
def test_what_is_no_int_in_range_is_none(value):
    assert refusal(checks.as_int, "size", value, 3, 8).startswith("size: expected an int >= 3 and <= 8, got ")


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int64(2)])
def test_any_finite_real_number_is_a_scale(value):
    assert checks.as_scale(value, 16) == 2.0
    assert type(checks.as_scale(value, 16)) is float
    assert checks.as_scale(None, 16) == 0.25


@pytest.mark.parametrize(
    "value", [True, np.nan, -np.inf, 10**400, 1j, "0.5", [2.0], np.ones(2), jnp.ones(())], ids=type
)
def test_what_is_no_finite_real_number_is_no_scale(value):
    assert refusal(checks.as_scale, value, 16).startswith("scale: expected a finite number, got ")


@pytest.mark.parametrize(
    "dtype", ["bfloat16", jnp.bfloat16, np.float16, np.dtype("float32"), jnp.float32.dtype, "float32", float], ids=str
)
def test_dtypes_however_they_are_spelled_become_one(dtype):
    made = checks.as_dtype("dtype", dtype)
    assert made in (jnp.bfloat16, jnp.float16, jnp.float32)
    assert made is getattr(jnp, jnp.dtype(made).name)


@pytest.mark.parametrize(
    "dtype",
    ["bf16", "int32", jnp.int32, bool, complex, jnp.float8_e4m3fn, np.float64, None, 3, slice(None), "f4x"],
    ids=str,
)
def test_dtypes_that_a_layer_does_not_have_are_refused(dtype):
    assert "got " in refusal(checks.as_dtype, "dtype", dtype)


def test_float64_is_a_dtype_where_jax_has_it():
    assert "jax_enable_x64" in refusal(checks.as_dtype, "dtype", "float64")
    with jax.enable_x64(True):
        assert checks.as_dtype("dtype", np.float64) is jnp.float64


@pytest.mark.parametrize("precision", [None, "highest", "bfloat16_3x", jax.lax.Precision.HIGH, ("high", "default")])
def test_precisions_are_those_of_jax(precision):
    assert checks.as_precision(precision) is precision
    jax.eval_shape(lambda x: jnp.einsum("ab,bc->ac", x, x, precision=precision), jnp.ones((2, 2)))


@pytest.mark.parametrize("precision", ["hi", "", 3, True, ["high", "high"], ("high",), jnp.float32, {}], ids=str)
def test_other_precisions_are_refused(precision):
    assert refusal(checks.as_precision, precision).startswith("precision: expected None, default, high, highest ")


@pytest.mark.parametrize("value", [np.ones((2, 3)), jnp.ones((2, 3)), jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)])
def test_arrays_of_any_maker_are_arrays(value):
    made = checks.as_array("x", value, "B E", (2, None))
    assert made.shape == (2, 3)
    assert not isinstance(made, np.ndarray)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[1.0]], "got a list; convert it with jnp.asarray"),
        (None, "got None"),
        (1.0, "got 1.0"),
        (np.ones((2, 3), int), "got int64 of shape (2, 3)"),
        (jnp.ones((2, 3), jnp.float8_e4m3fn), "got float8_e4m3fn of shape (2, 3)"),
        (np.array([["a"]]), "got <U1 of shape (1, 1)"),
        (np.ones((2, 3, 1)), "got float64 of shape (2, 3, 1)"),
        (np.ones(()), "got float64 of shape ()"),
        (np.ones((1, 3)), "got float64 of shape (1, 3)"),
        (jax.random.key(0), "got key<fry> of shape ()"),
        (slice(None), "got a slice"),
    ],
    ids=str,
)
def test_other_things_are_no_array_of_floats(value, message):
    assert refusal(checks.as_array, "x", value, "B E", (2, None)) == f"x: expected floats [B, E] = (2, E), {message}"


def test_messages_never_hold_an_array():
    big = np.arange(10_000)
    for message in (
        refusal(checks.as_int, "size", big),
        refusal(checks.as_lengths, "lengths", big, 2),
        refusal(checks.as_lengths, "lengths", [big] * 3, 2),
        refusal(checks.as_lengths, "lengths", big.tolist(), 2),
        refusal(checks.as_flags, "rows", big.tolist(), 2),
        refusal(checks.as_scale, {str(i): big for i in range(100)}, 2),
        refusal(checks.require, "lengths", big, lambda a: a < 7, "less than 7"),
    ):
        assert len(message) < 300
    assert message == "lengths: expected less than 7, got 7 at 7"


@pytest.mark.parametrize(
    "value", [[1, 2], (1, 2), np.array([1, 2]), np.array([1, 2], np.uint8), [np.int64(1), jnp.int32(2)]]
)
def test_lengths_come_in_arrays_and_sequences(value):
    counts, concrete = checks.as_lengths("lengths", value, 2)
    np.testing.assert_array_equal(counts, [1, 2])
    np.testing.assert_array_equal(concrete, np.array([1, 2], np.int32), strict=True)
    assert counts.dtype == jnp.int32


NO_LENGTHS = [None, "ab", 3, [1.0, 2.0], [True, False], [True, 2], [[1], [2, 3]], [None, 1], [1, 2, 3], [[1, 2]]]


@pytest.mark.parametrize("value", [*NO_LENGTHS, {1: 2}, [2**31, 0]], ids=str)
def test_other_things_are_no_lengths(value):
    refusal(checks.as_lengths, "lengths", value, 2)


def test_one_integer_for_all_rows_where_that_is_meant():
    for value in (3, np.int64(3), np.array(3), jnp.int32(3)):
        counts, concrete = checks.as_lengths("count", value, 2, or_one=True)
        assert counts.shape == ()
        assert counts == concrete == 3
    assert refusal(checks.as_lengths, "count", [1], 2, or_one=True).startswith("count: expected an integer or integers")


def test_no_rows_have_no_lengths():
    assert checks.as_lengths("lengths", [], 0)[0].dtype == jnp.int32
    assert checks.as_flags("rows", [], 0).dtype == bool


def test_traced_lengths_saturate_and_their_values_are_unknown():
    def run(traced):
        counts, concrete = checks.as_lengths("lengths", traced, 2)
        assert concrete is None
        return counts

    with jax.enable_x64(True):
        made = jax.jit(run)(np.array([2**32, -(2**40)]))
    np.testing.assert_array_equal(made, np.array([2**31 - 1, -(2**31)], np.int32))
    np.testing.assert_array_equal(jax.jit(lambda n: run([n, 3]))(1), [1, 3])


def test_constants_are_known_within_a_trace():
    given = jnp.array([1, 2])

    def run(x):
        np.testing.assert_array_equal(checks.as_lengths("lengths", given, 2)[1], [1, 2])
        return x

    jax.eval_shape(run, 1.0)
    assert checks.as_lengths("lengths", given, 2, fetch=False)[1] is None


@pytest.mark.parametrize("value", [[True, False], (np.True_, False), np.array([True, False]), jnp.array([True, False])])
def test_flags_come_in_arrays_and_sequences(value):
    assert checks.as_flags("rows", value, 2).tolist() == [True, False]


@pytest.mark.parametrize("value", [[1, 0], True, [True], None, "ab", [[True, False]]], ids=str)
def test_other_things_are_no_flags(value):
    refusal(checks.as_flags, "rows", value, 2)


def test_indices_shapes_and_dtypes():
    assert checks.as_indices("indices", np.zeros((1, 2, 3), np.int8), (1, 2)).dtype == jnp.int8
    message = refusal(checks.as_indices, "indices", np.zeros((1, 3, 3), int), (1, 2))
    assert message == "indices: expected integers [B, S, K] = (1, 2, K), got int64 of shape (1, 3, 3)"
    assert re.search("got a list", refusal(checks.as_indices, "indices", [[[0]]], (1, 1)))
    checks.same_shape("gate", ROWS, "kv", ROWS)
    assert refusal(checks.same_shape, "gate", ROWS[:1], "kv", ROWS) == "gate: expected kv's shape (2, 2), got (1, 2)"
    assert refusal(checks.same_dtype, "kv", ROWS, "q", ROWS > 0) == "kv: expected q's dtype bool, got int32"
