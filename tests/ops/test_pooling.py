"""Window pooling against a float64 brute force: packed rows, both kinds of window, and what must reach nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foveal.geometry import Documents, WindowLayout
from foveal.ops import pool_windows
from foveal.testing.generators import distinct_values, random_segment_ids
from foveal.testing.numerics import assert_close, assert_gradients_close
from tests.support.documents import documents_in, documents_of

B, S, M, D = 2, 22, 4, 3  # two rows are left over after the last slot
SLOTS = S // M
# Padding first, starts at 3 and 14 that are no multiples of 4, a document shorter than a window, a returning id.
UNALIGNED = np.array([[0] * 3 + [1] * 11 + [2] * 3 + [1] * 5, [5] * 9 + [0] * 2 + [6] * 8 + [0] * 3], np.int32)
FULL = np.ones((B, S), np.int32)
PLAIN, OVERLAP = False, True
COTANGENT = distinct_values((B, SLOTS, D), 9)


def layout_of(ids: np.ndarray, alignment: int = 1) -> WindowLayout:
    return WindowLayout.of(documents_in(ids, alignment=alignment), M)


@functools.partial(jax.jit, static_argnames="overlap")
def pool(kv, gate, position_bias, segment_ids, *, overlap: bool):
    layout = WindowLayout.of(Documents.from_segment_ids(segment_ids), M)
    return pool_windows(kv, gate, position_bias, layout, overlap=overlap)


@functools.partial(jax.jit, static_argnames="overlap")
def both_ways(args, layout: WindowLayout, cotangent, *, overlap: bool):
    """Entries, and the gradients of kv, gate and bias."""
    entries, pull = jax.vjp(lambda *args: pool_windows(*args, layout=layout, overlap=overlap), *args)
    return entries, pull(cotangent)


def pool_by_hand(kv, gate, bias, segment_ids: np.ndarray, *, overlap: bool):
    """Document by document, window by window, feature by feature; in the arrays' own module and dtype."""
    xp = np if isinstance(kv, np.ndarray) else jnp
    width = kv.shape[-1] // 2 if overlap else kv.shape[-1]
    rows = []
    for b in range(kv.shape[0]):
        slots = [xp.zeros(width, kv.dtype)] * (kv.shape[1] // M)
        for start, stop in documents_of(segment_ids[b]):
            for first in range(start, stop - M + 1, M):
                terms = [(first + j, j, slice(kv.shape[-1] - width, None)) for j in range(M)]
                if overlap and first > start:
                    terms += [(first - M + j, j, slice(0, width)) for j in range(M)]
                mass = xp.exp(xp.stack([gate[b, row, half] + bias[j, half] for row, j, half in terms]))
                value = xp.stack([kv[b, row, half] for row, j, half in terms])
                slots[first // M] = (mass * value).sum(0) / mass.sum(0)
        rows.append(xp.stack(slots))
    return xp.stack(rows)


def problem(overlap: bool, seed: int = 0, length: int = S) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    width = 2 * D if overlap else D
    kv = distinct_values((B, length, width), seed)
    gate = 2 * distinct_values((B, length, width), seed + 1)
    return kv, gate, 2 * distinct_values((M, width), seed + 2)


def assert_as_by_hand(actual, args, segment_ids: np.ndarray, *, overlap: bool) -> None:
    expected = pool_by_hand(*(np.asarray(a).astype(np.float64) for a in args), segment_ids=segment_ids, overlap=overlap)
    assert actual.dtype == jnp.float32
    assert_close(actual, expected, np.float32)


# ------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("overlap", [PLAIN, OVERLAP])
def test_unaligned_documents_match_brute_force(overlap):
    args = problem(overlap)
    actual = np.asarray(pool(*args, UNALIGNED, overlap=overlap))
    assert_as_by_hand(actual, args, UNALIGNED, overlap=overlap)
    used = np.zeros((B, SLOTS), bool)
    for b, row in enumerate(UNALIGNED):
        for start, stop in documents_of(row):
            used[b, np.arange(start, stop - M + 1, M) // M] = True
    assert not used.all()
    np.testing.assert_array_equal(actual[~used], 0.0)
    assert (actual[used] != 0).all()


@pytest.mark.parametrize("overlap", [PLAIN, OVERLAP])
@given(seed=st.integers(0, 1 << 30), longest=st.sampled_from([1, 3, 4, 5, 9, 22]), padding=st.booleans())
def test_any_packed_rows_match_brute_force(overlap, seed, longest, padding):
    ids, args = random_segment_ids(seed, B, S, max_document=longest, padding=padding), problem(overlap, seed)
    assert_as_by_hand(pool(*args, ids, overlap=overlap), args, ids, overlap=overlap)


ALIGNED = np.array([[1] * 7 + [0] + [2] * 14, [0] * 4 + [3] * 12 + [4] * 6], np.int32)


@pytest.mark.parametrize("overlap", [PLAIN, OVERLAP])
@pytest.mark.parametrize(
    ("ids", "layout"),
    [
        pytest.param(FULL, WindowLayout.of(Documents.unpacked(B, S), M), id="unpacked"),
        pytest.param(ALIGNED, layout_of(ALIGNED, M), id="aligned"),
    ],
)
def test_contiguous_windows_are_the_gathered_ones(ids, layout, overlap):
    """A row without packing needs no gather, nor do aligned documents: the numbers stay the same."""
    assert layout.contiguous
    args = problem(overlap)
    contiguous, _ = both_ways(args, layout, COTANGENT, overlap=overlap)
    np.testing.assert_allclose(contiguous, pool(*args, ids, overlap=overlap), rtol=1e-6, atol=1e-6)
    assert_as_by_hand(contiguous, args, ids, overlap=overlap)


def test_large_gates_overflow_nothing():
    kv, gate, bias = problem(OVERLAP)
    entries = np.asarray(pool(kv, gate * np.float32(1e4), bias, UNALIGNED, overlap=OVERLAP))
    assert np.isfinite(entries).all()
    assert np.abs(entries).max() <= 1.0


def test_bfloat16_is_pooled_in_float32():
    kv, gate, bias = problem(OVERLAP)
    kv, gate = (jnp.asarray(a).astype(jnp.bfloat16) for a in (kv, gate))
    assert_as_by_hand(pool(kv, gate, bias, UNALIGNED, overlap=OVERLAP), (kv, gate, bias), UNALIGNED, overlap=OVERLAP)


@pytest.mark.parametrize("overlap", [PLAIN, OVERLAP])
@pytest.mark.parametrize("documents", [Documents.unpacked(B, 3), documents_in(np.ones((B, 3), np.int32))])
def test_a_row_shorter_than_a_window_has_no_entries_and_zero_gradients(overlap, documents):
    args, nothing = problem(overlap, length=3), np.zeros((B, 0, D), np.float32)
    entries, gradients = both_ways(args, WindowLayout.of(documents, M), nothing, overlap=overlap)
    assert entries.shape == (B, 0, D)
    for gradient, arg in zip(gradients, args, strict=True):
        np.testing.assert_array_equal(gradient, np.zeros_like(arg))


# ---------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("overlap", [PLAIN, OVERLAP])
@pytest.mark.parametrize("ids", [UNALIGNED, FULL], ids=["packed", "full"])
def test_gradients_match_float64(overlap, ids):
    args = problem(overlap)

    @jax.jit
    def expectation(args, cotangent):
        return jax.vjp(lambda *args: pool_by_hand(*args, segment_ids=ids, overlap=overlap), *args)[1](cotangent)

    with jax.enable_x64(True):
        expected = expectation(*jax.tree.map(lambda a: a.astype(np.float64), (args, COTANGENT)))
    assert_gradients_close(both_ways(args, layout_of(ids), COTANGENT, overlap=overlap)[1], expected, np.float32)
    assert all((np.asarray(e) != 0).any() for e in expected)


@pytest.mark.parametrize("overlap", [PLAIN, OVERLAP])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_poison_in_rows_outside_any_window_reaches_nothing(overlap, poison):
    outside = np.ones((B, S), bool)
    for b, row in enumerate(UNALIGNED):
        for start, stop in documents_of(row):
            outside[b, start : start + (stop - start) // M * M] = False
    assert outside.sum() > 10
    args, layout = problem(overlap), layout_of(UNALIGNED)
    clean = jax.block_until_ready(both_ways(args, layout, COTANGENT, overlap=overlap))  # the arrays change below
    args[0][outside] = args[1][outside] = poison
    jax.tree.map(np.testing.assert_array_equal, both_ways(args, layout, COTANGENT, overlap=overlap), clean)


@pytest.mark.parametrize("overlap", [PLAIN, OVERLAP])
def test_poison_in_left_over_rows_of_an_unpacked_row_reaches_nothing(overlap):
    args, layout = problem(overlap), WindowLayout.of(Documents.unpacked(B, S), M)
    for array in args[:2]:
        array[:, SLOTS * M :] = np.nan
    everything = both_ways(args, layout, COTANGENT, overlap=overlap)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(everything))


@pytest.mark.parametrize("overlap", [PLAIN, OVERLAP])
@pytest.mark.parametrize("aligned", [False, True])
def test_poison_in_one_document_reaches_no_other(overlap, aligned):
    """Also where documents touch, and where windows are a reshape and "the window before" wraps around the row."""
    ids = np.array([[1] * 8 + [2] * 8 + [3] * 6, [4] * 4 + [5] * 4 + [6] * 14], np.int32)
    args, layout = problem(overlap), layout_of(ids, M if aligned else 1)
    assert layout.contiguous == aligned
    clean, clean_gradients = both_ways(args, layout, COTANGENT, overlap=overlap)
    for document in range(1, 7):
        kv, gate, bias = (a.copy() for a in args)
        inside = ids == document
        kv[inside] = gate[inside] = np.nan
        poisoned, gradients = both_ways((kv, gate, bias), layout, COTANGENT, overlap=overlap)
        hit = inside[:, : SLOTS * M].reshape(B, SLOTS, M).all(-1)
        np.testing.assert_array_equal(np.isnan(poisoned), np.broadcast_to(hit[..., None], poisoned.shape))
        np.testing.assert_array_equal(np.asarray(poisoned)[~hit], np.asarray(clean)[~hit])
        # The bias is shared by all documents; what belongs to the others alone stays as it was.
        for actual, expected in zip(gradients[:2], clean_gradients[:2], strict=True):
            np.testing.assert_array_equal(np.asarray(actual)[~inside], np.asarray(expected)[~inside])


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("name", "shapes", "overlap"),
    [
        pytest.param("kv", ((B, S), (B, S, 6), (M, 6)), OVERLAP, id="kv: rank"),
        pytest.param("kv", ((3, S, 6), (3, S, 6), (M, 6)), OVERLAP, id="kv: batch"),
        pytest.param("kv", ((B, S + M, 6), (B, S + M, 6), (M, 6)), OVERLAP, id="kv: rows"),
        pytest.param("kv", ((B, S, 5), (B, S, 5), (M, 5)), OVERLAP, id="kv: odd width"),
        pytest.param("gate", ((B, S, 6), (B, S - 1, 6), (M, 6)), OVERLAP, id="gate: rows"),
        pytest.param("gate", ((B, S, 6), (B, S, 3), (M, 6)), PLAIN, id="gate: width"),
        pytest.param("position_bias", ((B, S, 6), (B, S, 6), (M + 1, 6)), PLAIN, id="position_bias: positions"),
        pytest.param("position_bias", ((B, S, 6), (B, S, 6), (M, 3)), OVERLAP, id="position_bias: half width"),
        pytest.param("position_bias", ((B, S, 6), (B, S, 6), (6,)), PLAIN, id="position_bias: rank"),
    ],
)
@pytest.mark.parametrize("jitted", [False, True])
def test_shapes_that_do_not_fit_are_refused_by_name(unchecked_annotations, name, shapes, overlap, jitted):
    run = functools.partial(pool_windows, layout=WindowLayout.of(Documents.unpacked(B, S), M), overlap=overlap)
    with pytest.raises(ValueError, match=f"^{name}: .*got"):
        (jax.jit(run) if jitted else run)(*map(jnp.zeros, shapes))
