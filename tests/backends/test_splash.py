"""Splash Attention emulated on a CPU against `dense`.

An emulated case costs seconds, so each program here is compiled once and sees all the data that its tests have.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from foveal import Splash, SplashBlocks, SplashDynamic
from foveal.backends.splash import heads, kernel
from foveal.geometry import Documents, Visibility
from tests.backends.splash_problem import (
    DYNAMIC,
    STATIC,
    B,
    D,
    H,
    M,
    W,
    assert_matches_dense,
    attend,
    densely,
    packed,
    padding_of,
    problem,
    unpacked,
)
from tests.support.core_attention import NAMES, assert_same

SINKS = np.array([0.3, -np.inf, np.inf, 2.0], np.float32)  # of all kinds

# -------------------------------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize(
    ("length", "ratio", "window", "scale", "with_sinks"),
    [
        pytest.param(489, M, W, None, True, id="rows that no block divides"),
        pytest.param(60, M, W, None, True, id="shorter than a window"),
        pytest.param(1, M, W, None, True, id="one row, too short for an entry"),
        pytest.param(150, 1, 1, 0.37, False, id="window of one, an entry for each row, another scale, no sinks"),
    ],
)
def test_unpacked_rows_match_dense(length, ratio, window, scale, with_sinks):
    (q, kv, entries, sinks), cotangents = problem(length, ratio)
    entries = np.zeros((B, 0, D), np.float32) if entries is None else entries
    args = q, kv, entries, sinks if with_sinks else None
    _, gradients = assert_matches_dense(args, unpacked(length, ratio, window), cotangents, STATIC, scale=scale)
    reached = {name for name, gradient in gradients.items() if gradient is not None and np.any(gradient)}
    # One row: a softmax over one key, whatever the query.
    assert {"kv"} | ({"sinks"} if with_sinks else set()) | ({"q", "entries"} if length > 1 else set()) <= reached


def test_bfloat16_matches_dense():
    args, cotangents = problem(489, M, 1, jnp.bfloat16)
    _, gradients = assert_matches_dense(args, unpacked(489, M), cotangents, STATIC)
    dtypes = {name: g.dtype for name, g in gradients.items()}
    assert dtypes == dict.fromkeys(NAMES, jnp.bfloat16) | {"sinks": np.float32}
    d_sinks = np.asarray(gradients["sinks"])
    assert (d_sinks != d_sinks.astype(jnp.bfloat16).astype(np.float32)).any(), "rounded to the queries' dtype"


def assert_padding_is_silent(got, padding: np.ndarray) -> None:
    (out, lse), gradients = got
    np.testing.assert_array_equal(np.asarray(out)[padding], 0.0)
    np.testing.assert_array_equal(np.asarray(lse)[padding], -np.inf)
    for name in ("q", "kv"):
        np.testing.assert_array_equal(np.asarray(gradients[name])[padding], 0.0, err_msg=name)


def test_packed_rows_match_dense():
    """One program for all documents, and the right answer for each."""
    starts = set()
    for seed in range(3):
        args, cotangents = problem(489, M, seed)
        visibility = packed(489, seed)
        assert visibility.documents.alignment == M
        padding = padding_of(visibility)
        assert 0 < padding.sum() < padding.size / 2
        assert_padding_is_silent(assert_matches_dense(args, visibility, cotangents, STATIC), padding)
        starts.add(np.asarray(visibility.documents.document_start).tobytes())
    assert len(starts) == 3


def test_a_sliding_layer_takes_documents_that_start_anywhere():
    """And logits as they are."""
    args, cotangents = problem(300, 0)
    assert_matches_dense(args, packed(300, 4, ratio=0, align=1), cotangents, STATIC, scale=1.0)


def test_right_padded_rows_match_dense():
    """Each a document from row 0 on: nothing but the mask says who sees what. A row of padding alone, too."""
    right_padded = jax.jit(Documents.from_lengths, static_argnums=1)(np.array([0, 200], np.int32), 489)
    visibility = Visibility(right_padded, W, M)
    assert visibility.documents.alignment == 0
    (q, kv, entries, sinks), cotangents = problem(489, M)
    want = densely((q, kv, entries, sinks), visibility, None, cotangents)
    padding = padding_of(visibility)
    q[padding], kv[padding] = np.nan, np.nan  # whatever padding holds
    got = attend((q, kv, entries, sinks), visibility, None, cotangents, STATIC)
    assert_same(got, want)
    assert_padding_is_silent(got, padding)
    assert not np.any(got[1]["entries"][0])


@pytest.mark.parametrize("sinks", [(-np.inf, np.inf), (1e4, -1e4), (80.0, 3e38)])
def test_sinks_of_any_size(sinks):
    """No NaN anywhere; +inf leaves the keys nothing, -inf all, and large ones do not overflow."""
    args, cotangents = problem(60, M)
    args = *args[:3], np.array(sinks, np.float32)
    (out, lse), gradients = got = assert_matches_dense(args, unpacked(60, M), cotangents, STATIC)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(got))
    for head, sink in enumerate(sinks):
        assert np.any(out[:, :, head]) == (sink < 1e3), sink
        assert np.any(lse[:, :, head])
        assert not np.isinf(sink) or gradients["sinks"][head] == 0


def test_logits_of_thousands():
    (q, *others), cotangents = problem(489, M)
    args = q * np.float32(1e3), *others
    (out, lse), gradients = attend(args, unpacked(489, M), None, cotangents, STATIC)
    (want, want_lse), _ = densely(args, unpacked(489, M), None, cotangents)
    peak = np.abs(lse).max()
    assert peak > 1e3
    # A logit of thousands is known to 1e-3 in float32, and a softmax over such no better.
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-6 * peak)
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-2)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))


def counted_call(calls, real, call, info, operands, *others):
    calls.add(operands.q.shape[0])
    return real(call, info, operands, *others)


@pytest.mark.parametrize(
    ("blocks", "space", "forward", "backward"),
    [
        pytest.param(SplashBlocks(256, 128, 256, 256), 3, 1, 2, id="of four, three would fit"),
        # Two share a tile and are not parted. Backward tiles that neither divide the forward ones nor are divided.
        pytest.param(SplashBlocks(256, 128, 384, 256, stacked_heads=2), 0, 2, 1, id="none would fit"),
    ],
)
def test_some_heads_at_a_time_match_dense(blocks, space, forward, backward, monkeypatch):
    """As in long rows. Each head with its own sink, gradients of what they share summed over all; NaN stays."""
    monkeypatch.setattr(heads, "_AT_A_TIME", space * 512 * 6 * D * 4)
    taken: dict[str, set[int]] = {"forward": set(), "backward": set()}
    for name, calls in taken.items():
        monkeypatch.setattr(kernel, name, functools.partial(counted_call, calls, getattr(kernel, name)))
    (q, kv, entries, _), cotangents = problem(489, M, 3, heads=4)
    visibility = packed(489, 3)
    q[0, np.flatnonzero(~padding_of(visibility)[0])[20], 1, 3] = np.nan
    # A program of its own, by its blocks: nothing else has them.
    assert_matches_dense((q, kv, entries, SINKS), visibility, cotangents, Splash(blocks=blocks, interpret=True))
    assert taken == {"forward": {forward}, "backward": {backward}}


# ------------------------------------------------------------------------------------------------------ not a number


@pytest.mark.parametrize(
    ("length", "ratio", "window", "scale", "with_sinks"),
    [pytest.param(489, M, W, None, True, id="sinks"), pytest.param(150, 1, 1, 0.37, False, id="no sinks")],
)
def test_what_is_not_finite_reaches_those_who_see_it_alone(length, ratio, window, scale, with_sinks):
    """Lost queries are NaN, and all else is what it is without their cotangents, to the last bit."""
    (*clean, sinks), (d_out, d_lse) = problem(length, ratio)
    sinks, visibility, slot = sinks if with_sinks else None, unpacked(length, ratio, window), length // ratio - 10
    q, kv, entries = jax.tree.map(np.copy, clean)
    lost = np.zeros((B, length, H), bool)
    q[0, 100, 1, 0] = q[1, -1, 0] = np.nan
    q[1, 0, 1, 3] = -np.inf  # of the first query, which sees one key only
    lost[0, 100, 1] = lost[1, -1, 0] = lost[1, 0, 1] = True
    kv[1, 100, 1], entries[0, slot, 5] = np.nan, np.inf
    lost[1, 100 : 100 + window] = lost[0, (slot + 1) * ratio - 1 :] = True
    (out, lse), gradients = assert_matches_dense(
        (q, kv, entries, sinks), visibility, (d_out, d_lse), STATIC, scale=scale
    )
    others = np.where(lost[..., None], np.float32(0), d_out), np.where(lost, np.float32(0), d_lse)
    (want, want_lse), expected = attend((*clean, sinks), visibility, None, others, STATIC, scale)
    np.testing.assert_array_equal(out, np.where(lost[..., None], np.nan, want))
    np.testing.assert_array_equal(lse, np.where(lost, np.nan, want_lse))
    for name in NAMES if with_sinks else NAMES[:3]:
        assert np.any(expected[name])
        np.testing.assert_array_equal(gradients[name], expected[name], err_msg=name)


# ------------------------------------------------------------------------------------------- a mask that is data


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_selected_entries_and_documents_that_start_anywhere_match_dense(dtype):
    """CSA. Documents at unaligned starts, padding among them; sinks of all kinds, and a query that holds NaN."""
    length, ratio = 300, 4
    for seed, sinks in enumerate((SINKS[:2], SINKS[2:])):
        (q, kv, entries, _), cotangents = problem(length, ratio, seed, dtype)
        visibility = packed(length, seed, ratio=ratio, align=1)
        q[0, np.flatnonzero(~padding_of(visibility)[0])[40], 1 - seed, 0] = np.nan  # where the sink is infinite
        # In any order, with duplicates, with none, out of range and not visible.
        slots = np.random.default_rng([seed, 3]).integers(-2, length // ratio + 2, (B, length, 9)).astype(np.int32)
        got = assert_matches_dense((q, kv, entries, sinks), visibility, cotangents, DYNAMIC, slots)
        (out, _), gradients = got
        assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in jax.tree.leaves(gradients))
        assert np.isnan(np.asarray(out, np.float32)).any(axis=-1).sum() == 1
        assert gradients["sinks"].dtype == np.float32


@pytest.mark.parametrize(
    ("length", "ratio", "blocks", "many"),
    [
        pytest.param(489, M, SplashBlocks(256, 128, 384, 256, stacked_heads=2), 4, id="all entries, chosen blocks"),
        pytest.param(21, 0, None, H, id="a window alone, and a row shorter than it"),
    ],
)
def test_a_mask_that_is_data_matches_dense(length, ratio, blocks, many):
    args, cotangents = problem(length, ratio, 4, heads=many)
    visibility = packed(length, 6, ratio=ratio, align=1)
    assert_matches_dense(args, visibility, cotangents, SplashDynamic(blocks=blocks, interpret=True))
