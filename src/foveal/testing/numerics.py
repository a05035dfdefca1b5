"""Tolerances that say what counts as equal. Callers name a dtype, never a number.

float32: outputs elementwise at rtol = atol = 1e-5; a gradient at max |difference| <= 1e-5 max |expected| for each
tensor, because gradients sum over many tokens and a small element carries the rounding of the large ones.
float64: the same with 1e-11. bfloat16: results and intermediate steps are rounded to 8 bits, so a bound per element
says little. The L2 norm of the difference must be small relative to the whole tensor's, and no single element may be
off by more than a few roundings of the tensor's largest.

For every dtype, non-finite values must be in the same places.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Bounds on the difference of two tensors; None where a bound does not apply.

    Attributes:
        elementwise: |difference| <= elementwise * (1 + |expected|) for outputs.
        of_peak: max |difference| <= of_peak * max |expected|, for gradients, and for outputs without `elementwise`.
        relative_l2: ||difference|| <= relative_l2 * ||expected||.
    """

    elementwise: float | None
    of_peak: float
    relative_l2: float


_TOLERANCES = {
    "float64": Tolerance(elementwise=1e-11, of_peak=1e-11, relative_l2=1e-11),
    "float32": Tolerance(elementwise=1e-5, of_peak=1e-5, relative_l2=1e-5),
    "bfloat16": Tolerance(elementwise=None, of_peak=4e-2, relative_l2=2e-2),
}


def tolerance(dtype: DTypeLike) -> Tolerance:
    """The tolerance for results computed in `dtype`.

    Raises:
        ValueError: a dtype without one.
    """
    name = np.dtype(dtype).name
    if name not in _TOLERANCES:
        raise ValueError(f"dtype: expected one of {', '.join(_TOLERANCES)}, got {name}")
    return _TOLERANCES[name]


def assert_close(actual: ArrayLike, expected: ArrayLike, dtype: DTypeLike, *, what: str = "output") -> None:
    """Raise AssertionError unless an output computed in `dtype` equals the expected one within the dtype's tolerance.

    Args:
        actual: the result.
        expected: the expected result, of the same shape, ideally computed in a wider dtype.
        dtype: dtype that `actual` was computed in.
        what: name of the output in the message.
    """
    limit = tolerance(dtype)
    got, want, finite = _aligned(actual, expected, what)
    difference = np.abs(got - want)[finite]
    if limit.elementwise is None:
        _assert_norms(difference, want[finite], limit, what)
        return
    excess = difference - limit.elementwise * (1 + np.abs(want[finite]))
    if excess.size and excess.max() > 0:
        worst = int(np.argmax(excess))
        raise AssertionError(
            f"{what}: {int((excess > 0).sum())} of {excess.size} elements differ by more than rtol = atol = "
            f"{limit.elementwise:g}; worst: expected {want[finite][worst]:.9g}, got {got[finite][worst]:.9g}"
        )


def assert_gradients_close(actual: object, expected: object, dtype: DTypeLike) -> None:
    """Raise AssertionError unless each tensor of two trees of gradients is equal within the tolerance of `dtype`.

    A tensor that is expected to be zero must be exactly zero.
    """
    limit = tolerance(dtype)
    got_leaves, got_tree = jax.tree.flatten_with_path(actual)
    want_leaves, want_tree = jax.tree.flatten_with_path(expected)
    if got_tree != want_tree:
        raise AssertionError(f"gradients: expected the tree {want_tree}, got {got_tree}")
    for (path, got_leaf), (_, want_leaf) in zip(got_leaves, want_leaves, strict=True):
        what = f"gradient{jax.tree_util.keystr(path)}"
        got, want, finite = _aligned(got_leaf, want_leaf, what)
        _assert_norms(np.abs(got - want)[finite], want[finite], limit, what)


def _aligned(actual: ArrayLike, expected: ArrayLike, what: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Both arrays as float64, with non-finite values compared and set to zero, and the mask of finite ones."""
    got, want = (np.asarray(a).astype(np.float64) for a in (actual, expected))
    if got.shape != want.shape:
        raise AssertionError(f"{what}: expected shape {want.shape}, got {got.shape}")
    for name, places in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        if (places(got) != places(want)).any():
            raise AssertionError(f"{what}: expected {places(want).sum()} {name}, got {places(got).sum()}, or elsewhere")
    finite = np.isfinite(want)
    return np.where(finite, got, 0.0), np.where(finite, want, 0.0), finite


def _assert_norms(difference: np.ndarray, want: np.ndarray, limit: Tolerance, what: str) -> None:
    if not difference.size:
        return
    peak, norm = np.abs(want).max(), np.linalg.norm(want)
    if difference.max() > limit.of_peak * peak:
        raise AssertionError(
            f"{what}: max |difference| {difference.max():.3g} > {limit.of_peak:g} of max |expected| {peak:.3g}"
        )
    if np.linalg.norm(difference) > limit.relative_l2 * norm:
        raise AssertionError(
            f"{what}: ||difference|| is {np.linalg.norm(difference) / norm:.3g} of ||expected||, "
            f"expected <= {limit.relative_l2:g}"
        )
