"""Splash Attention emulated on a CPU against `dense`.

An emulated case costs seconds, so each program here is compiled once and sees all the data that its tests have.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from foveal import Splash, SplashBlocks, SplashDynamic
from foveal.backends.splash import heads, kernel
from foveal.geometry import Documents, Visibility
from foveal.testing.numerics import assert_close
from tests.backends.splash_problem import (
    DYNAMIC,
    STATIC,
    B,
    D,
    H,
    M,
    W,
    assert_same,
    attend,
    densely,
    of_other_queries,
    output_of,
    output_only,
    packed,
    problem,
    unpacked,
)
from tests.support.core_attention import NAMES, UNOPTIMIZED, both_ways

# -------------------------------------------------------------------------------------------------------------- parity


@dataclasses.dataclass(frozen=True)
class Case:
    """A row that is one document."""

    length: int
    ratio: int = M
    window: int = W
    scale: float | None = None


CASES = {
    "rows that no block divides": Case(489),
    "shorter than a window": Case(60),
    "shorter than a window, of which an entry is made too": Case(9),
    "one row": Case(1),
    "sliding layer, logits as they are": Case(300, ratio=0, scale=1.0),
    "window of one, an entry for each row, another scale": Case(150, ratio=1, window=1, scale=0.37),
}


@pytest.mark.parametrize("name", CASES)
def test_unpacked_rows_match_dense(name):
    case = CASES[name]
    args, cotangents = problem(case.length, case.ratio)
    args = args if case.length // max(case.ratio, 1) else (*args[:2], np.zeros((B, 0, D), np.float32), args[3])
    visibility = unpacked(case.length, case.ratio, case.window)
    got = attend(args, visibility, None, cotangents, STATIC, case.scale)
    assert_same(got, densely(args, visibility, None, cotangents, case.scale))
    reached = {name for name, gradient in got[1].items() if gradient is not None and np.any(gradient)}
    # One row: a softmax over one key, whatever the query.
    expected = {"kv", "sinks"} | ({"q"} if case.scale or case.length > 1 else set())
    assert expected <= reached


def test_bfloat16_matches_dense():
    args, cotangents = problem(489, M, 1, jnp.bfloat16)
    got = attend(args, unpacked(489, M), None, cotangents, STATIC)
    assert_same(got, densely(args, unpacked(489, M), None, cotangents), jnp.bfloat16)
    (_, gradients) = got
    assert {name: g.dtype for name, g in gradients.items()} == dict.fromkeys(NAMES, jnp.bfloat16) | {
        "sinks": np.float32
    }
    d_sinks = np.asarray(gradients["sinks"])
    assert (d_sinks != d_sinks.astype(jnp.bfloat16).astype(np.float32)).any(), "rounded to the queries' dtype"


def test_packed_rows_match_dense():
    """One program for all documents, and the right answer for each."""
    length = 500
    assert packed(length, 0).documents.alignment == M
    for seed in range(3):
        args, cotangents = problem(length, M, seed)
        visibility = packed(length, seed)
        padding = np.asarray(visibility.documents.is_padding)
        assert 0 < padding.sum() < padding.size / 2
        (out, lse), gradients = got = attend(args, visibility, None, cotangents, STATIC)
        assert_same(got, densely(args, visibility, None, cotangents))
        np.testing.assert_array_equal(np.asarray(out)[padding], 0.0)
        np.testing.assert_array_equal(np.asarray(lse)[padding], -np.inf)
        for name in ("q", "kv"):
            np.testing.assert_array_equal(np.asarray(gradients[name])[padding], 0.0, err_msg=name)
    assert len({np.asarray(packed(length, seed).documents.document_start).tobytes() for seed in range(3)}) == 3


def test_a_sliding_layer_takes_documents_that_start_anywhere():
    visibility = packed(300, 4, ratio=0, align=1)
    args, cotangents = problem(300, 0)
    got = attend(args, visibility, None, cotangents, STATIC)
    assert_same(got, densely(args, visibility, None, cotangents))


def test_right_padded_rows_match_dense():
    """Each a document from row 0 on: nothing but the mask says who sees what. A row of padding alone, too."""
    visibility = Visibility(Documents.from_lengths(np.array([0, 200], np.int32), 300), W, M)
    assert visibility.documents.alignment == 0
    args, cotangents = problem(300, M)
    (out, lse), gradients = got = attend(args, visibility, None, cotangents, STATIC)
    assert_same(got, densely(args, visibility, None, cotangents))
    padding = np.asarray(visibility.documents.is_padding)
    np.testing.assert_array_equal(np.asarray(out)[padding], 0.0)
    np.testing.assert_array_equal(np.asarray(lse)[padding], -np.inf)
    assert not np.any(gradients["entries"][0])
    # Whatever padding holds.
    q, kv, entries, sinks = args
    q, kv = (np.where(padding.reshape(B, 300, *[1] * (a.ndim - 2)), np.nan, a).astype(np.float32) for a in (q, kv))
    assert_same(attend((q, kv, entries, sinks), visibility, None, cotangents, STATIC), got)


def test_sinks_of_any_size():
    """No NaN anywhere; +inf leaves the keys nothing, -inf all, and large ones do not overflow."""
    args, cotangents = problem(489, M)
    for sinks in ([0.3, -np.inf, np.inf, 2.0], [1e4, -1e4, 80.0, 3e38]):
        args = (*args[:3], np.array(sinks, np.float32))
        (out, lse), gradients = got = attend(args, unpacked(489, M), None, cotangents, STATIC)
        assert all(np.isfinite(a).all() for a in jax.tree.leaves(got))
        assert_same(got, densely(args, unpacked(489, M), None, cotangents))
        for head, sink in enumerate(sinks):
            assert np.any(out[:, :, head]) == (sink < 1e3), sink
            assert np.any(lse[:, :, head])
            assert not np.isinf(sink) or gradients["sinks"][head] == 0


def test_logits_of_thousands():
    (q, *others), cotangents = problem(489, M)
    args = (q * np.float32(1e3), *others)
    (out, lse), gradients = attend(args, unpacked(489, M), None, cotangents, STATIC)
    (want, want_lse), _ = densely(args, unpacked(489, M), None, cotangents)
    peak = np.abs(lse).max()
    assert peak > 1e3
    # A logit of thousands is known to 1e-3 in float32, and a softmax over such no better.
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-6 * peak)
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-2)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))


def test_chosen_blocks_change_nothing():
    """Forward and backward of different ones, neither dividing the other, and heads that share a tile."""
    blocks = SplashBlocks(q=256, kv=128, q_backward=384, kv_backward=256, stacked_heads=2)
    args, cotangents = problem(489, M, 2)
    got = attend(args, unpacked(489, M), None, cotangents, Splash(blocks=blocks, interpret=True))
    assert_same(got, densely(args, unpacked(489, M), None, cotangents))


def counted_call(calls, real, call, info, operands, *others):
    calls.append(operands.q.shape[0])
    return real(call, info, operands, *others)


@pytest.fixture
def some_heads(monkeypatch):
    """As of rows so long that the kernels take some of the four heads at a time; lists how many each call takes."""
    taken: dict[str, list[int]] = {"forward": [], "backward": []}
    for name in taken:
        monkeypatch.setattr(kernel, name, functools.partial(counted_call, taken[name], getattr(kernel, name)))
    monkeypatch.setattr(heads, "_AT_A_TIME", 3 * 512 * 6 * D * 4)  # three heads backward, and 3 | 4 not
    return taken


@pytest.mark.parametrize("backward", [2, 1])
def test_some_heads_at_a_time_match_dense(backward, some_heads, monkeypatch):
    """Each with its own sink, and the gradients of what heads share summed over all; padding and NaN stay."""
    if backward == 1:  # however long the row
        monkeypatch.setattr(heads, "_AT_A_TIME", 0)
    blocks = SplashBlocks(q=256, kv=128, q_backward=256, kv_backward=256)
    (q, kv, entries, _), cotangents = problem(500, M, 3)
    visibility = packed(500, 3)
    row = int(np.flatnonzero(~np.asarray(visibility.documents.is_padding)[0])[20])
    q[0, row, 1, 3] = np.nan
    args = q, kv, entries, np.array([0.3, -np.inf, np.inf, 2.0], np.float32)
    backend = Splash(blocks=blocks, interpret=True)
    # Its own program: another of these shapes takes other heads at a time.
    run = jax.jit(lambda a, v, c: both_ways(a, v, None, c, backend), compiler_options=UNOPTIMIZED)
    got = run(args, visibility, cotangents)
    assert_same(got, densely(args, visibility, None, cotangents))
    assert {name: set(calls) for name, calls in some_heads.items()} == {"forward": {1}, "backward": {backward}}


def test_stacked_heads_stay_together(some_heads):
    """Four that share a tile are not parted, whatever the space."""
    if not kernel.CAN_STACK_HEADS:
        pytest.skip("this Tokamax has no stacked heads")
    blocks = SplashBlocks(q=128, kv=128, q_backward=256, kv_backward=256, stacked_heads=4)
    args, _ = problem(300, M, 4)
    run = jax.jit(lambda a: output_only(a, unpacked(300, M), None, Splash(blocks=blocks, interpret=True)))
    assert_close(run(args), output_of(args, unpacked(300, M), None, "dense"), np.float32)
    assert set(some_heads["forward"]) == {4}


# ------------------------------------------------------------------------------------------------------ not a number


@pytest.mark.parametrize(
    "with_sinks",
    [
        False,
        True,
    ],
)
def test_nan_in_a_query_reaches_that_query_alone(with_sinks):
    args, cotangents = problem(489, M)
    args, visibility = args if with_sinks else (*args[:3], None), unpacked(489, M)
    lost = np.zeros((B, 489, H), bool)
    lost[0, 100, 1] = lost[1, 488, 0] = True
    q = np.where(lost[..., None], np.nan, args[0]).astype(np.float32)
    q[0, 100, 1, 1:] = args[0][0, 100, 1, 1:]
    assert_poison_stays(args, (q, *args[1:]), visibility, cotangents, lost)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_nan_in_a_key_reaches_those_who_see_it_alone(with_sinks):
    """And infinity in a query, here the first, which sees one key only."""
    args, cotangents = problem(489, M)
    args = args if with_sinks else (*args[:3], None)
    assert args[2] is not None
    q, kv, entries = args[0].copy(), args[1].copy(), args[2].copy()
    kv[1, 100, 1], entries[0, 20, 5], q[1, 0, 2, 3] = np.nan, np.inf, -np.inf
    lost = np.zeros((B, 489, H), bool)
    lost[1, 100 : 100 + W] = lost[0, 21 * M - 1 :] = lost[1, 0, 2] = True
    assert_poison_stays(args, (q, kv, entries, args[3]), unpacked(489, M), cotangents, lost)


def assert_poison_stays(clean, poisoned, visibility, cotangents, lost: np.ndarray) -> None:
    """Lost queries are NaN, and all else is what it is without their cotangents, to the last bit."""
    (out, lse), gradients = got = attend(poisoned, visibility, None, cotangents, STATIC)
    assert_same(got, densely(poisoned, visibility, None, cotangents))
    (want, want_lse), expected = attend(clean, visibility, None, of_other_queries(cotangents, lost), STATIC)
    np.testing.assert_array_equal(out, np.where(lost[..., None], np.nan, want))
    np.testing.assert_array_equal(lse, np.where(lost, np.nan, want_lse))
    for name in NAMES:
        if expected[name] is not None:
            assert np.any(expected[name])
            np.testing.assert_array_equal(gradients[name], expected[name], err_msg=name)


# ------------------------------------------------------------------------------------------- a mask that is data


def selected(length: int, ratio: int, count: int, seed: int) -> np.ndarray:
    """In any order, with duplicates, with none, out of range and not visible."""
    slots = length // ratio
    return np.random.default_rng([seed, 3]).integers(-2, slots + 2, (B, length, count)).astype(np.int32)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_selected_entries_and_documents_that_start_anywhere_match_dense(dtype):
    """CSA. Documents at unaligned starts, padding among them; sinks of all kinds, and a query that holds NaN."""
    length, ratio = 300, 4
    for seed in range(2):
        (q, kv, entries, _), cotangents = problem(length, ratio, seed, dtype)
        visibility = packed(length, seed, ratio=ratio, align=1)
        row = np.flatnonzero(~np.asarray(visibility.documents.is_padding)[0])[40]
        q[0, row, 2, 0] = np.nan
        args = q, kv, entries, np.array([0.3, -np.inf, np.inf, 2.0], np.float32)
        indices = selected(length, ratio, 9, seed)
        (out, _), gradients = got = attend(args, visibility, indices, cotangents, DYNAMIC)
        assert_same(got, densely(args, visibility, indices, cotangents), dtype)
        assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in jax.tree.leaves(gradients))
        assert np.isnan(np.asarray(out, np.float32)).any(axis=-1).sum() == 1
        assert gradients["sinks"].dtype == np.float32


def test_all_entries_with_chosen_blocks_match_dense():
    blocks = SplashBlocks(q=256, kv=128, q_backward=384, kv_backward=256, stacked_heads=2)
    args, cotangents = problem(300, M, 4)
    visibility = packed(300, 6, align=1)
    got = attend(args, visibility, None, cotangents, SplashDynamic(blocks=blocks, interpret=True))
    assert_same(got, densely(args, visibility, None, cotangents))


def test_a_dynamic_window_alone_in_a_row_shorter_than_it():
    args, cotangents = problem(21, 0)
    visibility = packed(21, 0, ratio=0, align=1)
    got = attend(args, visibility, None, cotangents, DYNAMIC)
    assert_same(got, densely(args, visibility, None, cotangents))
