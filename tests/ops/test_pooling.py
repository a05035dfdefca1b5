"""Window pooling against a float64 brute force: packed rows, both kinds of window, and what must reach nothing."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foveal.geometry import Documents, WindowLayout
from foveal.ops import pool_windows
from foveal.testing.generators import distinct_values, random_segment_ids
from foveal.testing.numerics import assert_close, assert_gradients_close
from tests.support.documents import documents_of

B, S, M, D = 2, 22, 4, 3  # two rows are left over after the last slot
SLOTS = S // M
# Padding first, starts at 3 and 14 that are no multiples of 4, a document shorter than a window, a returning id.
UNALIGNED = np.array([[0] * 3 + [1] * 11 + [2] * 3 + [1] * 5, [5] * 9 + [0] * 2 + [6] * 8 + [0] * 3], np.int32)
PLAIN, OVERLAP = False, True


def pool_of(kv, gate, position_bias, segment_ids, *, overlap: bool, ratio: int = M):
    return pool_windows(
        kv, gate, position_bias, WindowLayout.of(Documents.from_segment_ids(segment_ids), ratio), overlap=overlap
    )


pool = jax.jit(pool_of, static_argnames=("overlap", "ratio"))


def pool_by_hand(kv, gate, bias, segment_ids: np.ndarray, *, overlap: bool, ratio: int = M):
    """Document by document, window by window, feature by feature; in the arrays' own module and dtype."""
    xp = np if isinstance(kv, np.ndarray) else jnp
    width = kv.shape[-1] // 2 if overlap else kv.shape[-1]
    rows = []
    for b in range(kv.shape[0]):
        slots = [xp.zeros(width, kv.dtype)] * (kv.shape[1] // ratio)
        for start, stop in documents_of(segment_ids[b]):
            for first in range(start, stop - ratio + 1, ratio):
                terms = [(first + j, j, slice(kv.shape[-1] - width, None)) for j in range(ratio)]
                if overlap and first > start:
                    terms += [(first - ratio + j, j, slice(0, width)) for j in range(ratio)]
                mass = xp.exp(xp.stack([gate[b, row, half] + bias[j, half] for row, j, half in terms]))
                value = xp.stack([kv[b, row, half] for row, j, half in terms])
                slots[first // ratio] = (mass * value).sum(0) / mass.sum(0)
        rows.append(xp.stack(slots))
    return xp.stack(rows)


def problem(overlap: bool, seed: int = 0, length: int = S, ratio: int = M) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    width = 2 * D if overlap else D
    kv = distinct_values((B, length, width), seed)
    gate = 2 * distinct_values((B, length, width), seed + 1)
    return kv, gate, 2 * distinct_values((ratio, width), seed + 2)


def wide(*arrays) -> list[np.ndarray]:
    return [np.asarray(a).astype(np.float64) for a in arrays]


def in_window(segment_ids: np.ndarray, ratio: int = M) -> np.ndarray:
    """bool [B, S]: rows that belong to a complete window."""
    inside = np.zeros(segment_ids.shape, bool)
    for b, row in enumerate(segment_ids):
        for start, stop in documents_of(row):
            inside[b, start : start + (stop - start) // ratio * ratio] = True
    return inside


def slot_used(segment_ids: np.ndarray) -> np.ndarray:
    used = np.zeros((B, SLOTS), bool)
    for b, row in enumerate(segment_ids):
        for start, stop in documents_of(row):
            used[b, [first // M for first in range(start, stop - M + 1, M)]] = True
    return used


# ------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("overlap", [PLAIN, OVERLAP])
def test_unaligned_documents_match_brute_force(overlap):
    kv, gate, bias = problem(overlap)
    actual = pool(kv, gate, bias, UNALIGNED, overlap=overlap)
    assert actual.shape == (B, SLOTS, D)
    assert actual.dtype == jnp.float32
    expected = pool_by_hand(*wide(kv, gate, bias), segment_ids=UNALIGNED, overlap=overlap)
    assert_close(actual, expected, np.float32)
    used = slot_used(UNALIGNED)
    assert not used.all()
    np.testing.assert_array_equal(np.asarray(actual)[~used], 0.0)
    assert (np.asarray(actual)[used] != 0).all()


@pytest.mark.parametrize("overlap", [PLAIN, OVERLAP])
@given(seed=st.integers(0, 1 << 30), longest=st.sampled_from([1, 3, 4, 5, 9, 22]), padding=st.booleans())
def test_any_packed_rows_match_brute_force(overlap, seed, longest, padding):
    ids = random_segment_ids(seed, B, S, max_document=longest, padding=padding)
    kv, gate, bias = problem(overlap, seed)
    actual = pool(kv, gate, bias, ids, overlap=overlap)
    expected = pool_by_hand(*wide(kv, gate, bias), segment_ids=ids, overlap=overlap)
    assert_close(actual, expected, np.float32)


@pytest.mark.parametrize("overlap", [PLAIN, OVERLAP])
def test_contiguous_windows_are_the_gathered_ones(overlap):
    """A row without packing needs no gather, nor do aligned documents: the numbers stay the same."""
    kv, gate, bias = problem(overlap)
    full, aligned = np.ones((B, S), np.int32), np.array([[1] * 7 + [0] + [2] * 14, [0] * 4 + [3] * 12 + [4] * 6])
    for ids, documents in (
        (full, Documents.unpacked(B, S)),
        (aligned.astype(np.int32), Documents.from_segment_ids(aligned.astype(np.int32), alignment=M)),
    ):
        layout = WindowLayout.of(documents, M)
        assert layout.contiguous
        gathered = pool(kv, gate, bias, ids, overlap=overlap)
        contiguous = jax.jit(pool_windows, static_argnames="overlap")(kv, gate, bias, layout, overlap=overlap)
        np.testing.assert_allclose(contiguous, gathered, rtol=1e-6, atol=1e-6)
        expected = pool_by_hand(*wide(kv, gate, bias), segment_ids=ids, overlap=overlap)
        assert_close(contiguous, expected, np.float32)


def test_first_window_of_a_document_has_no_previous_part():
    """Rows before a document's first window must not matter, whatever they are; they are another document's."""
    kv, gate, bias = problem(OVERLAP)
    ids = np.array([[1] * 8 + [2] * 14] * B, np.int32)
    before = np.asarray(pool(kv, gate, bias, ids, overlap=OVERLAP))
    kv[:, :8], gate[:, :8] = 7.0, 7.0
    after = np.asarray(pool(kv, gate, bias, ids, overlap=OVERLAP))
    assert (after[:, :2] != before[:, :2]).all()
    np.testing.assert_array_equal(after[:, 2:], before[:, 2:])
    # The second window of the same document does have one.
    kv[:, 8:12, :D] += 1.0
    assert (np.asarray(pool(kv, gate, bias, ids, overlap=OVERLAP))[:, 3] != before[:, 3]).all()


def test_position_bias_counts_from_the_windows_first_token():
    """With a bias that lets one position through alone, each entry is that token, wherever the document starts."""
    kv, gate, _ = problem(PLAIN)
    for position in range(M):
        bias = np.full((M, D), -200.0, np.float32)
        bias[position] = 0.0
        entries = np.asarray(pool(kv, gate, bias, UNALIGNED, overlap=PLAIN))
        for first in (3, 7):  # slots 0 and 1, rows 3-6 and 7-10
            np.testing.assert_allclose(entries[0, first // M], kv[0, first + position], rtol=1e-6)


def test_position_bias_enters_the_gate_alone():
    """A bias that is the same at all positions changes no softmax, so it changes nothing."""
    kv, gate, bias = problem(OVERLAP)
    shifted = pool(kv, gate, bias + np.float32(0.75), UNALIGNED, overlap=OVERLAP)
    assert_close(shifted, pool(kv, gate, bias, UNALIGNED, overlap=OVERLAP), np.float32)


def test_features_have_weights_of_their_own():
    kv, gate, bias = problem(PLAIN)
    before = np.asarray(pool(kv, gate, bias, UNALIGNED, overlap=PLAIN))
    gate[0, 4, 1] += 1.0
    changed = np.asarray(pool(kv, gate, bias, UNALIGNED, overlap=PLAIN)) != before
    assert changed[0, 0, 1]
    assert changed.sum() == 1


def test_large_gates_overflow_nothing():
    kv, gate, bias = problem(OVERLAP)
    entries = np.asarray(pool(kv, gate * np.float32(1e4), bias, UNALIGNED, overlap=OVERLAP))
    assert np.isfinite(entries).all()
    assert np.abs(entries).max() <= 1.0


def test_bfloat16_is_pooled_in_float32():
    kv, gate, bias = problem(OVERLAP)
    kv, gate = (jnp.asarray(a).astype(jnp.bfloat16) for a in (kv, gate))
    actual = pool(kv, gate, bias, UNALIGNED, overlap=OVERLAP)
    assert actual.dtype == jnp.float32
    assert_close(actual, pool_by_hand(*wide(kv, gate, bias), segment_ids=UNALIGNED, overlap=OVERLAP), np.float32)


@pytest.mark.parametrize("overlap", [PLAIN, OVERLAP])
@pytest.mark.parametrize("documents", [Documents.unpacked(B, 3), Documents.from_segment_ids(np.ones((B, 3), np.int32))])
def test_a_row_shorter_than_a_window_has_no_entries_and_zero_gradients(overlap, documents):
    args = problem(overlap, length=3)
    layout = WindowLayout.of(documents, M)
    entries, pull = jax.vjp(lambda *args: pool_windows(*args, layout=layout, overlap=overlap), *map(jnp.asarray, args))
    assert entries.shape == (B, 0, D)
    for gradient, arg in zip(pull(entries), args, strict=True):
        np.testing.assert_array_equal(gradient, np.zeros_like(arg))


# ---------------------------------------------------------------------------------------------------------- gradients


def gradients(args, segment_ids, cotangent, *, overlap: bool):
    return jax.vjp(lambda *args: pool(*args, segment_ids=segment_ids, overlap=overlap), *map(jnp.asarray, args))[1](
        cotangent
    )


@pytest.mark.parametrize("overlap", [PLAIN, OVERLAP])
@pytest.mark.parametrize("ids", [UNALIGNED, np.ones((B, S), np.int32)], ids=["packed", "full"])
def test_gradients_match_float64(overlap, ids):
    args, cotangent = problem(overlap), distinct_values((B, SLOTS, D), 9)
    actual = gradients(args, ids, jnp.asarray(cotangent), overlap=overlap)
    with jax.enable_x64(True):
        _, pull = jax.vjp(
            lambda *args: pool_by_hand(*args, segment_ids=ids, overlap=overlap),
            *(jnp.asarray(a, jnp.float64) for a in args),
        )
        expected = pull(jnp.asarray(cotangent, jnp.float64))
    assert_gradients_close(actual, expected, np.float32)
    assert all((np.asarray(e) != 0).any() for e in expected)


@pytest.mark.parametrize("overlap", [PLAIN, OVERLAP])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_poison_in_rows_outside_any_window_reaches_nothing(overlap, poison):
    args, cotangent = problem(overlap), jnp.asarray(distinct_values((B, SLOTS, D), 9))
    outside = ~in_window(UNALIGNED)
    assert outside.sum() > 10
    clean, clean_gradients = (
        pool(*args, segment_ids=UNALIGNED, overlap=overlap),
        gradients(args, UNALIGNED, cotangent, overlap=overlap),
    )
    args = tuple(a.copy() for a in args)  # the calls above may not have read them yet
    args[0][outside] = args[1][outside] = poison
    np.testing.assert_array_equal(pool(*args, segment_ids=UNALIGNED, overlap=overlap), clean)
    for actual, expected in zip(gradients(args, UNALIGNED, cotangent, overlap=overlap), clean_gradients, strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("overlap", [PLAIN, OVERLAP])
def test_poison_in_left_over_rows_of_an_unpacked_row_reaches_nothing(overlap):
    kv, gate, bias = problem(overlap)
    layout = WindowLayout.of(Documents.unpacked(B, S), M)
    kv[:, SLOTS * M :] = gate[:, SLOTS * M :] = np.nan
    entries, pull = jax.vjp(
        lambda *args: pool_windows(*args, layout=layout, overlap=overlap), *map(jnp.asarray, (kv, gate, bias))
    )
    assert np.isfinite(entries).all()
    assert all(np.isfinite(g).all() for g in pull(jnp.ones_like(entries)))


@pytest.mark.parametrize("overlap", [PLAIN, OVERLAP])
@pytest.mark.parametrize("aligned", [False, True])
def test_poison_in_one_document_reaches_no_other(overlap, aligned):
    """Also where documents touch, and where windows are a reshape and "the window before" wraps around the row."""
    ids = np.array([[1] * 8 + [2] * 8 + [3] * 6, [4] * 4 + [5] * 4 + [6] * 14], np.int32)
    layout = WindowLayout.of(Documents.from_segment_ids(ids, alignment=M if aligned else 1), M)
    assert layout.contiguous == aligned
    run = jax.jit(lambda *args: pool_windows(*args, layout=layout, overlap=overlap))
    args, cotangent = problem(overlap), jnp.asarray(distinct_values((B, SLOTS, D), 9))
    clean, pull = jax.vjp(run, *map(jnp.asarray, args))
    clean_gradients = pull(cotangent)
    for document in range(1, 7):
        kv, gate, bias = (a.copy() for a in args)
        inside = ids == document
        kv[inside] = gate[inside] = np.nan
        poisoned, pull = jax.vjp(run, *map(jnp.asarray, (kv, gate, bias)))
        hit = inside[:, : SLOTS * M].reshape(B, SLOTS, M).all(-1)
        np.testing.assert_array_equal(np.isnan(poisoned), np.broadcast_to(hit[..., None], poisoned.shape))
        np.testing.assert_array_equal(np.asarray(poisoned)[~hit], np.asarray(clean)[~hit])
        # The bias is shared by all documents; what belongs to the others alone stays as it was.
        for actual, expected in zip(pull(cotangent)[:2], clean_gradients[:2], strict=True):
            np.testing.assert_array_equal(np.asarray(actual)[~inside], np.asarray(expected)[~inside])


# ------------------------------------------------------------------------------------------------------------- errors

BAD = {
    "kv: rank": ("kv", (B, S), (B, S, 6), (M, 6), OVERLAP),
    "kv: batch": ("kv", (3, S, 6), (3, S, 6), (M, 6), OVERLAP),
    "kv: rows": ("kv", (B, S + M, 6), (B, S + M, 6), (M, 6), OVERLAP),
    "kv: odd width": ("kv", (B, S, 5), (B, S, 5), (M, 5), OVERLAP),
    "gate: rows": ("gate", (B, S, 6), (B, S - 1, 6), (M, 6), OVERLAP),
    "gate: width": ("gate", (B, S, 6), (B, S, 3), (M, 6), PLAIN),
    "position_bias: positions": ("position_bias", (B, S, 6), (B, S, 6), (M + 1, 6), PLAIN),
    "position_bias: half width": ("position_bias", (B, S, 6), (B, S, 6), (M, 3), OVERLAP),
    "position_bias: rank": ("position_bias", (B, S, 6), (B, S, 6), (6,), PLAIN),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("jitted", [False, True])
def test_shapes_that_do_not_fit_are_refused_by_name(monkeypatch, case, jitted):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as users call it
    name, *shapes, overlap = BAD[case]
    layout = WindowLayout.of(Documents.unpacked(B, S), M)

    def call(*args):
        return pool_windows(*args, layout=layout, overlap=overlap)

    with pytest.raises(ValueError, match=f"^{name}: .*got"):
        (jax.jit(call) if jitted else call)(*map(jnp.zeros, shapes))
