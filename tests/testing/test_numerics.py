"""Tolerances let rounding pass and nothing else: each is shown a right answer and wrong ones of every kind."""

import jax.numpy as jnp
import numpy as np
import pytest

from foveal.testing.numerics import assert_close, assert_gradients_close, tolerance

DTYPES = {"float64": np.dtype(np.float64), "float32": np.dtype(np.float32), "bfloat16": np.dtype(jnp.bfloat16)}
RNG = np.random.default_rng(0)
ROWS, COLUMNS = 40, 30
EXACT = RNG.normal(size=(ROWS, COLUMNS))

every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
every_check = pytest.mark.parametrize("check", [assert_close, assert_gradients_close])


def rejects(check, actual, expected, dtype, match: str | None = None) -> None:
    with pytest.raises(AssertionError, match=match):
        check(actual, expected, dtype)


def rounded_matmul(dtype) -> tuple[np.ndarray, np.ndarray]:
    """A product of what `dtype` keeps of its operands, computed in it (bfloat16: rounded at the end), and exactly."""
    a, b = (RNG.normal(size=(64, 64)).astype(dtype) for _ in range(2))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    if dtype == DTYPES["float32"]:
        return a @ b, exact
    return exact.astype(dtype), exact


# ------------------------------------------------------------------------------------------------------ right answers


@every_dtype
@every_check
def test_rounding_passes(check, dtype):
    check(EXACT.astype(dtype), EXACT, dtype)
    check(*rounded_matmul(dtype), dtype)
    check(np.zeros((3, 4), dtype), np.zeros((3, 4)), dtype)
    check(np.zeros((0, 4), dtype), np.zeros((0, 4)), dtype)
    check(jnp.ones(3), np.ones(3), dtype)  # arrays of any library


def test_rounding_of_bfloat16_steps_passes():
    """Operands and result rounded, as in a real layer; and a sum that was rounded after each of a few steps."""
    a, b = RNG.normal(size=(64, 64)), RNG.normal(size=(64, 64))
    narrow = (x.astype(jnp.bfloat16).astype(np.float64) for x in (a, b))
    assert_close(np.matmul(*narrow).astype(jnp.bfloat16), a @ b, jnp.bfloat16)
    parts = np.stack([a, 2 * a, 3 * a]).astype(jnp.bfloat16).astype(np.float64)
    steps = parts.sum(0).astype(jnp.bfloat16)
    assert_gradients_close(steps, 6 * a, jnp.bfloat16)


@every_dtype
@every_check
def test_equal_non_finite_places_pass(check, dtype):
    expected = EXACT.copy()
    expected[0, :4] = np.nan, np.inf, -np.inf, np.nan
    check(expected.astype(dtype), expected, dtype)
    check(np.full(3, np.nan, dtype), np.full(3, np.nan), dtype)


def test_a_small_element_of_a_gradient_may_carry_the_rounding_of_a_large_one():
    expected = np.array([1000.0, 1e-3])
    actual = np.array([1000.0, 1.1e-3])
    assert_gradients_close(actual, expected, np.float32)
    rejects(assert_close, actual, expected, np.float32)


# ------------------------------------------------------------------------------------------------------ wrong answers


WRONG = {
    "another row": lambda x: np.roll(x, 1, axis=0),
    "another column": lambda x: np.roll(x, 1, axis=1),
    "two rows exchanged": lambda x: x[[1, 0, *range(2, len(x))]],
    "backwards": lambda x: x[:, ::-1],
    "shuffled": lambda x: np.random.default_rng(1).permutation(x.ravel()).reshape(x.shape),
    "zeros": np.zeros_like,
    "a constant": lambda x: np.full_like(x, x.mean()),
    "the other sign": lambda x: -x,
    "scaled by 1.05": lambda x: x * 1.05,
    "everything off by 0.05": lambda x: x + 0.05,
    "the last row missing": lambda x: np.concatenate([x[:-1], 0 * x[-1:]]),
    "one large element missing": lambda x: np.where(np.abs(x) == np.abs(x).max(), 0, x),
}


@every_dtype
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_answer_fails(mistake, dtype):
    wrong = WRONG[mistake](EXACT).astype(dtype)
    rejects(assert_close, wrong, EXACT, dtype)
    rejects(assert_gradients_close, wrong, EXACT, dtype, "^gradient")
    rejects(assert_gradients_close, {"a": EXACT.astype(dtype), "b": wrong}, {"a": EXACT, "b": EXACT}, dtype, r"\['b'\]")


@pytest.mark.parametrize(("name", "slip"), [("float32", 1e-3), ("float32", 1e-4), ("float64", 1e-3), ("float64", 1e-9)])
@every_check
def test_one_element_slightly_off_fails(check, name, slip):
    """What the answer of a narrower dtype would look like, too."""
    for place in ((0, 0), (ROWS - 1, COLUMNS - 1)):
        wrong = EXACT.copy()
        wrong[place] += slip
        rejects(check, wrong.astype(DTYPES[name]), EXACT, DTYPES[name])
    narrower = {"float32": jnp.bfloat16, "float64": np.float32}[name]
    rejects(check, EXACT.astype(narrower).astype(DTYPES[name]), EXACT, DTYPES[name])


@every_dtype
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@every_check
def test_non_finite_values_in_other_places_fail(check, value, dtype):
    poisoned = EXACT.copy()
    poisoned[3, 4] = value
    moved = EXACT.copy()
    moved[3, 5] = value
    rejects(check, poisoned.astype(dtype), EXACT, dtype)
    rejects(check, EXACT.astype(dtype), poisoned, dtype)
    rejects(check, moved.astype(dtype), poisoned, dtype)
    other = np.where(np.isfinite(poisoned), poisoned, np.inf if np.isnan(value) else -value)
    rejects(check, other.astype(dtype), poisoned, dtype)


@every_dtype
@every_check
def test_finite_values_are_compared_beside_non_finite_ones(check, dtype):
    expected, wrong = EXACT.copy(), np.roll(EXACT, 1, axis=0)
    expected[0, 0] = wrong[0, 0] = np.inf
    rejects(check, wrong.astype(dtype), expected, dtype)


@every_dtype
def test_a_gradient_that_should_be_zero_must_be(dtype):
    zero, tiny = np.zeros((3, 4)), np.zeros((3, 4), dtype)
    tiny[1, 2] = 1e-30
    rejects(assert_gradients_close, tiny, zero, dtype)
    rejects(assert_gradients_close, {"q": EXACT, "sinks": tiny}, {"q": EXACT, "sinks": zero}, dtype, "sinks")


@every_dtype
@every_check
def test_another_shape_fails(check, dtype):
    """Also where numpy would broadcast."""
    for shape in ((ROWS, COLUMNS, 1), (1, ROWS, COLUMNS), (ROWS * COLUMNS,), (COLUMNS, ROWS)):
        rejects(check, EXACT.reshape(shape).astype(dtype), EXACT, dtype, "expected shape")
    for shape, expected in (((), 5), ((0,), 5), ((5,), 0)):
        rejects(check, np.zeros(shape, dtype), np.zeros(expected), dtype, "expected shape")


def test_other_trees_of_gradients_fail():
    """A gradient that is not there is not a gradient of zero."""
    tree = {"q": EXACT, "sinks": EXACT[0]}
    assert_gradients_close(dict(tree), tree, np.float64)
    for other in ({"q": EXACT}, {**tree, "kv": EXACT}, {"q": EXACT, "sinks": None}, [EXACT, EXACT[0]], {}):
        rejects(assert_gradients_close, other, tree, np.float64, "expected the tree")
    rejects(assert_gradients_close, {"q": EXACT, "sinks": 2 * EXACT[0]}, tree, np.float64, r"gradient\['sinks'\]")


def test_each_tensor_is_measured_by_itself():
    """A large gradient does not cover for a small one of another parameter."""
    expected = {"large": 1e6 * EXACT, "small": 1e-6 * EXACT}
    wrong = {"large": expected["large"], "small": 1.001 * expected["small"]}
    for dtype in (np.float32, np.float64):
        rejects(assert_gradients_close, wrong, expected, dtype, "small")


def test_messages_name_what_is_compared():
    with pytest.raises(AssertionError, match=r"^lse: 1 of 3 elements differ.*expected 2, got 3"):
        assert_close(np.array([1.0, 3.0, 5.0]), np.array([1.0, 2.0, 5.0]), np.float32, what="lse")


# ---------------------------------------------------------------------------------------------------------- the table


def test_tolerances_stay_as_tight_as_they_are():
    """Loosening one is a decision, not a detail of another change."""
    assert tolerance(np.float32).elementwise == 1e-5
    assert tolerance(np.float32).of_peak == tolerance(np.float32).relative_l2 == 1e-5
    assert tolerance(np.float64).elementwise == tolerance(np.float64).of_peak == 1e-11
    assert tolerance(jnp.bfloat16).of_peak <= 4e-2
    assert tolerance(jnp.bfloat16).relative_l2 <= 2e-2


@pytest.mark.parametrize("dtype", [np.float16, np.int32, np.complex64])
def test_a_dtype_without_a_tolerance_is_refused(dtype):
    with pytest.raises(ValueError, match=f"dtype: expected one of .*float32.*, got {np.dtype(dtype).name}"):
        tolerance(dtype)
    with pytest.raises(ValueError, match="dtype: expected one of"):
        assert_close(EXACT, EXACT, dtype)
