"""Core attention where it could go wrong: odd indices, infinite sinks, poison, padding, large logits."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from foveal.geometry import Documents, Visibility
from foveal.testing.numerics import assert_close
from foveal.testing.reference import reference_visibility
from tests.support import core_attention as support
from tests.support.core_attention import IMPLEMENTATIONS, assert_same, both_ways

B, S, H, D, W, M, K = 2, 17, 3, 6, 4, 3, 4
C = S // M
# Row 0: documents at 2 and 12, padding left and right; row 1: one document.
PACKED = np.array([[0] * 2 + [1] * 10 + [2] * 4 + [0], [1] * S], np.int32)
PADDING = PACKED == 0
WINDOW_MASK, ENTRY_MASK = reference_visibility(PACKED, W, M)
VISIBILITY = Visibility(Documents.from_segment_ids(PACKED), W, M)
INT32 = np.iinfo(np.int32)

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def problem(seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    shapes = ((B, S, H, D), (B, S, D), (B, C, D), (H,))
    q, kv, entries, sinks = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return 2 * q, kv, entries, sinks


def cotangents_of(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, 2])
    return rng.normal(size=(B, S, H, D)).astype(np.float32), rng.normal(size=(B, S, H)).astype(np.float32)


@functools.partial(jax.jit, static_argnames="implementation")
def attend(args, indices, cotangents, visibility=VISIBILITY, *, implementation=None):
    return both_ways(args, visibility, indices, cotangents, implementation)


def expectation(args, entry_mask: np.ndarray = ENTRY_MASK, cotangents=None):
    return support.expectation(args, (WINDOW_MASK, entry_mask), cotangents or cotangents_of(), D**-0.5)


def assert_all_equal(actual, expected) -> None:
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def rows_of(*slots: int) -> np.ndarray:
    """The same indices for every query."""
    return np.broadcast_to(np.array(slots, np.int32), (B, S, len(slots)))


# ------------------------------------------------------------------------------------------------------------ indices


@every_implementation
@pytest.mark.parametrize(
    ("indices", "same_as"),
    [
        pytest.param((3, 0, 2, 1), (0, 1, 2, 3), id="any order"),
        pytest.param((2, 0, 2, 2), (0, 2, -1, -1), id="a duplicate counts once"),
        pytest.param((-1, 1, -1, 0), (0, 1, -1, -1), id="none stands anywhere"),
        pytest.param((1, C, C + 1, INT32.max), (1, -1, -1, -1), id="past the last slot"),
        pytest.param((INT32.min, -2, -C, 1), (1, -1, -1, -1), id="below -1, which would wrap around"),
        pytest.param((0, -1, -1, -1), (0, 0, 0, 0), id="-1 is not slot 0"),
        pytest.param((-1, -1, -1, -1), (C, C, C, C), id="the window and nothing else"),
    ],
)
def test_indices_are_a_set_of_slots(indices, same_as, implementation):
    args, cotangents = problem(), cotangents_of()
    actual = attend(args, rows_of(*indices), cotangents, implementation=implementation)
    used = np.isin(np.arange(C), same_as)
    assert_same(actual, expectation(args, ENTRY_MASK & used))
    assert_same(actual, attend(args, rows_of(*same_as), cotangents, implementation=implementation))
    np.testing.assert_array_equal(np.asarray(actual[1]["entries"]).any(-1), (ENTRY_MASK & used).any(1))


@every_implementation
def test_slots_that_a_query_does_not_see_are_ignored(implementation):
    """Asking for all slots is asking for what it sees: not what is later, of another document, or no entry at all."""
    args, cotangents = problem(), cotangents_of()
    assert not ENTRY_MASK.any(1).all()
    actual = attend(args, rows_of(*range(C)), cotangents, implementation=implementation)
    assert_same(actual, expectation(args))
    assert_same(actual, attend(args, None, cotangents, implementation=implementation))


@every_implementation
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64])
def test_indices_of_any_integer_dtype(unchecked_annotations, dtype, implementation):
    """What does not fit int32 must not wrap around into range: 2^32 + 1 is not slot 1, nor is 2^32 - 1 "none"."""
    limits = np.iinfo(dtype)
    beyond = min(limits.max, 2**32 + 1)
    indices = np.broadcast_to(np.array([0, 2, beyond, limits.min if limits.min < 0 else beyond], dtype), (B, S, 4))
    args, cotangents = problem(), cotangents_of()
    with jax.enable_x64(True):
        actual = attend(args, indices, cotangents, implementation=implementation)
    assert_all_equal(actual, attend(args, rows_of(0, 2, -1, -1), cotangents, implementation=implementation))


# -------------------------------------------------------------------------------------------------------------- sinks


@every_implementation
@pytest.mark.parametrize(
    "sinks",
    [
        *((sink,) * 3 for sink in (-np.inf, np.inf, -4.0, -8.0, -16.0, -30.0)),
        *((-np.inf, 0.3, np.inf), (np.inf, -80.0, 1.0), (300.0, -300.0, 0.0)),
    ],
)
def test_infinite_and_extreme_sinks(sinks, implementation):
    """-inf is no sink, +inf leaves zeros, each head on its own; gradients are finite; the log-sum-exp ignores it.

    Small shares are as over long contexts, where the keys take nearly all: 1 - sigmoid would cancel to few digits or 0.
    """
    args, cotangents = (*problem()[:3], np.array(sinks, np.float32)), cotangents_of()
    (out, lse), gradients = attend(args, None, cotangents, implementation=implementation)
    assert_same(((out, lse), gradients), expectation(args))
    (without, without_lse), _ = attend((*args[:3], None), None, cotangents, implementation=implementation)
    np.testing.assert_array_equal(lse, without_lse)
    for head, sink in enumerate(sinks):
        if sink == -np.inf:
            assert_close(out[:, :, head], without[:, :, head], np.float32)
        if sink == np.inf:
            np.testing.assert_array_equal(out[:, :, head], 0.0)
        if np.isinf(sink):
            assert gradients["sinks"][head] == 0.0
    assert all(np.isfinite(g).all() for g in gradients.values())


# ------------------------------------------------------------------------------------------------- poison and padding


@every_implementation
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_poison_in_a_key_reaches_those_who_see_it_and_nobody_else(poison, implementation):
    """One raw key or entry after the other: the others' outputs, log-sum-exps and gradients keep every bit."""
    args, indices = problem(2), rows_of(0, 1, 3, 4)
    selected = ENTRY_MASK & np.isin(np.arange(C), [0, 1, 3, 4])
    cases = [(1, n, WINDOW_MASK[:, :, n]) for n in range(S)] + [(2, c, selected[:, :, c]) for c in range(C)]
    clean = None
    for which, place, seeing in cases:
        # No cotangent comes in where NaN goes out.
        cotangents = tuple(
            np.where(seeing.reshape(B, S, *(1,) * (c.ndim - 2)), np.float32(0), c) for c in cotangents_of(2)
        )
        clean = attend(args, indices, cotangents, implementation=implementation)
        poisoned = [a.copy() for a in args]
        poisoned[which][:, place, place % D] = poison
        (out, lse), gradients = attend(poisoned, indices, cotangents, implementation=implementation)
        assert np.isnan(np.asarray(out)[seeing]).all()
        assert np.isnan(np.asarray(lse)[seeing]).all()
        for got, want in zip((out, lse), clean[0], strict=True):
            np.testing.assert_array_equal(np.asarray(got)[~seeing], np.asarray(want)[~seeing])
        assert_all_equal(gradients, clean[1])
    assert clean is not None
    assert (np.asarray(clean[1]["kv"]) != 0).any()


@every_implementation
def test_poison_in_a_query_stays_with_it(implementation):
    """Its output and its log-sum-exp are NaN, not the -inf of a query that sees nothing."""
    args, cotangents = problem(4), cotangents_of(4)
    (clean, clean_lse), _ = attend(args, None, cotangents, implementation=implementation)
    q = args[0].copy()
    q[1, 9, 1] = np.nan
    (out, lse), _ = attend((q, *args[1:]), None, cotangents, implementation=implementation)
    hit = np.zeros((B, S, H), bool)
    hit[1, 9, 1] = True
    np.testing.assert_array_equal(np.isnan(out).all(-1), hit)
    np.testing.assert_array_equal(np.asarray(out)[~hit], np.asarray(clean)[~hit])
    np.testing.assert_array_equal(np.asarray(lse)[~hit], np.asarray(clean_lse)[~hit])
    np.testing.assert_array_equal(np.isnan(lse), hit)


@every_implementation
@pytest.mark.parametrize("poison", [None, np.nan, np.inf])
@pytest.mark.parametrize("sinks", [True, False])
def test_padding_gives_exact_zeros_and_takes_no_gradient(sinks, poison, implementation):
    """Whatever padding rows hold; and what they hold is nothing to the other rows."""
    args: tuple[Any, ...] = problem(5) if sinks else (*problem(5)[:3], None)
    cotangents = cotangents_of(5)
    clean = attend(args, None, cotangents, implementation=implementation)
    if poison is not None:
        args = (*(a.copy() for a in args[:3]), args[3])
        args[0][PADDING] = args[1][PADDING] = args[2][~ENTRY_MASK.any(1)] = poison
    (out, lse), gradients = actual = attend(args, None, cotangents, implementation=implementation)
    np.testing.assert_array_equal(np.asarray(out)[PADDING], 0.0)
    np.testing.assert_array_equal(np.asarray(lse)[PADDING], -np.inf)
    np.testing.assert_array_equal(np.asarray(gradients["q"])[PADDING], 0.0)
    np.testing.assert_array_equal(np.asarray(gradients["kv"])[PADDING], 0.0)
    np.testing.assert_array_equal(np.asarray(gradients["entries"])[~ENTRY_MASK.any(1)], 0.0)
    assert_all_equal(actual, clean)


@every_implementation
def test_a_batch_of_nothing_but_padding(implementation):
    nothing = Visibility(Documents.from_segment_ids(np.zeros((B, S), np.int32)), W, M)
    args = (*(np.full_like(a, np.nan) for a in problem()[:3]), np.zeros(H, np.float32))
    (out, lse), gradients = attend(args, rows_of(0, 1), cotangents_of(), nothing, implementation=implementation)
    np.testing.assert_array_equal(out, 0.0)
    np.testing.assert_array_equal(lse, -np.inf)
    for gradient in gradients.values():
        np.testing.assert_array_equal(gradient, 0.0)


@every_implementation
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_large_logits(size, implementation):
    """Logits of +-1e4 or so: all of one sign, and of both."""
    for same_sign in (False, True):
        q, kv, entries, sinks = problem(6)
        if same_sign:
            q, kv, entries = (np.abs(a) for a in (q, kv, entries))
        args, cotangents = (q * np.float32(size), kv, entries, sinks), cotangents_of(6)
        (out, lse), gradients = attend(args, None, cotangents, implementation=implementation)
        assert np.abs(np.asarray(lse)[~PADDING]).max() > 1e4
        expected = expectation(args)
        # A logit of 1e4 is known to 1e-3 in float32, its gradients no better; the output hangs on the largest alone.
        np.testing.assert_allclose(lse, expected[0][1], rtol=1e-5)
        assert all(np.isfinite(g).all() for g in (out, *gradients.values()))
        seen_sink = np.asarray(lse)[..., None] < 0
        np.testing.assert_allclose(np.where(seen_sink, out, 0.0), np.where(seen_sink, expected[0][0], 0.0), atol=1e-5)
