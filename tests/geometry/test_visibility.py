"""Who sees what: against brute force, and each property of the law that something else relies on."""

import functools
import re

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foveal.geometry import Documents, Visibility, WindowLayout
from foveal.testing.generators import random_segment_ids
from foveal.testing.reference import reference_visibility
from tests.support.documents import documents_in, each_alone, segment_ids
from tests.support.programs import largest_array

WINDOWS = (1, 3, 8)


def told_of(documents: Documents, window: int, ratio: int) -> dict:
    """All that a visibility tells of whole rows."""
    sight = Visibility(documents, window, ratio)
    masks = {"window_mask": sight.window_mask(), "entry_mask": sight.entry_mask(), "dense": sight.dense()}
    return masks | {n: getattr(sight, n) for n in ("window_range", "entry_range", "window_counts", "entry_counts")}


told_by = jax.jit(told_of, static_argnums=(1, 2))


@functools.partial(jax.jit, static_argnums=1)
def everything_of(ids, ratio):
    documents = Documents.from_segment_ids(ids)
    return {window: told_of(documents, window, ratio) for window in WINDOWS}


# 24 is a multiple of every ratio, 26 of neither 4 nor 8, and 7 is shorter than a window of 8.
@pytest.mark.parametrize(
    ("length", "ratio"), [*((length, ratio) for length in (7, 24) for ratio in (0, 1, 2, 3, 4, 8)), (26, 4), (26, 8)]
)
@given(data=st.data())
def test_everything_equals_brute_force_and_what_each_document_sees_alone(length, ratio, data):
    """And ranges let a kernel bound a block of queries by its first and last row that sees any."""
    ids = data.draw(segment_ids(length))
    for window, told in jax.tree.map(np.asarray, everything_of(ids, ratio)).items():
        keys, entries = reference_visibility(ids, window, ratio)
        for mask, expected in zip(each_alone(ids, window, ratio), (keys, entries), strict=True):
            np.testing.assert_array_equal(mask, expected)
        np.testing.assert_array_equal(told["dense"], np.concatenate([keys, entries], axis=-1))
        for kind, expected in (("window", keys), ("entry", entries)):
            mask, counts, (first, end) = (told[f"{kind}_{what}"] for what in ("mask", "counts", "range"))
            np.testing.assert_array_equal(mask, expected)
            np.testing.assert_array_equal(counts, expected.sum(-1))
            column = np.arange(expected.shape[-1])
            np.testing.assert_array_equal((column >= first[..., None]) & (column < end[..., None]), expected)
            assert mask.dtype == told["dense"].dtype == bool
            assert first.dtype == end.dtype == counts.dtype == np.int32
            assert ((first >= 0) & (first <= end) & (end <= expected.shape[-1])).all()
            for row, *bounds in zip(ids, first, end, strict=True):
                assert all((np.diff(bound[row > 0]) >= 0).all() for bound in bounds)
        assert not np.stack(told["entry_range"])[:, ids == 0].any()  # padding has slots [0, 0)


@pytest.mark.parametrize(
    ("length", "window", "ratio"),
    [
        *((window + 3, window, 0) for window in (1, 3, 8, 128)),  # row W must not see row 0; row W - 1 does
        *((26, window, 0) for window in (26, 1000, 2**31 - 1)),
        *((26, 3, ratio) for ratio in (1, 4, 8, 26, 27, 2**30)),
    ],
)
def test_an_unpacked_row_sees_a_window_of_keys_and_its_complete_entries(length, window, ratio):
    documents = Documents.unpacked(1, length)
    told, masks = told_by(documents, window, ratio), each_alone(np.ones((1, length), int), window, ratio)
    np.testing.assert_array_equal(told["dense"], np.concatenate(masks, axis=-1))
    for kind, mask in zip(("window", "entry"), masks, strict=True):
        np.testing.assert_array_equal(told[f"{kind}_counts"], mask.sum(axis=-1))
    assert Visibility(documents, window, ratio).slots == masks[1].shape[-1]


@pytest.mark.parametrize("ratio", [4, 128])
def test_visibility_at_lengths_of_use(ratio):
    ids = random_segment_ids(11, 1, 600, max_document=400)
    keys, entries = each_alone(ids, 128, ratio)
    assert entries.any()
    dense = told_by(documents_in(ids), 128, ratio)["dense"]
    np.testing.assert_array_equal(dense, np.concatenate([keys, entries], axis=-1))


def seen_by_hand(ids: np.ndarray, slots: np.ndarray, ratio: int) -> np.ndarray:
    """bool [B, S, K]: whether each query sees each of its own slots; False for -1 and slots that do not exist."""
    entries = reference_visibility(ids, 3, ratio)[1]
    count = entries.shape[-1]
    exists = (slots >= 0) & (slots < count)
    some = np.pad(entries, ((0, 0), (0, 0), (0, 1)))  # one more column, for what does not exist
    return np.take_along_axis(some, np.where(exists, slots, count).astype(int), axis=2)


@functools.partial(jax.jit, static_argnums=(2, 3))
def of_slots(ids, slots, ratio, method):
    return getattr(Visibility(Documents.from_segment_ids(ids), 3, ratio), method)(slots)


@pytest.mark.parametrize("ratio", [0, 1, 4])
@given(ids=segment_ids(24), seed=st.integers(0, 2**32 - 1))
def test_sees_slots(ratio, ids, seed):
    """In any order, slots twice, -1 and slots that do not exist, each for its own query."""
    count = 24 // ratio if ratio else 0
    slots = np.random.default_rng(seed).integers(-2, count + 3, size=(2, 24, 5), dtype=np.int32)
    np.testing.assert_array_equal(of_slots(ids, slots, ratio, "sees_slots"), seen_by_hand(ids, slots, ratio))


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("ratio", [1, 4])
def test_seen_slots_are_those_that_a_query_sees_once_each(ratio, dtype, unchecked_annotations):
    """-1, slots out of range and what is not seen come out as -1, and so does what was there before."""
    ids, count = random_segment_ids(2, 2, 24, max_document=12), 24 // ratio
    rng, limits = np.random.default_rng(ratio), np.iinfo(dtype)
    slots = rng.integers(max(-2, limits.min), count + 3, size=(2, 24, 7)).astype(dtype)
    slots[:, :, 3], slots[:, :, 5] = limits.max, min(limits.max, 1 << 32)
    of_each = seen_by_hand(ids, slots, ratio)
    assert of_each.any()
    for given_slots in (np.sort(slots, axis=-1), slots):  # all ascending, and in any order
        with jax.enable_x64(True):
            seen = np.asarray(of_slots(ids, given_slots, ratio, "seen_slots"))
        assert seen.dtype == np.int32
        for b, t in np.ndindex(2, 24):
            assert sorted(seen[b, t][seen[b, t] != -1].tolist()) == np.unique(slots[b, t][of_each[b, t]]).tolist()


@pytest.mark.parametrize(("batch", "length"), [(0, 4), (2, 0), (2, 3), (1, 1)])
@pytest.mark.parametrize("ratio", [0, 1, 4])
def test_empty_batches_and_rows_shorter_than_a_window(batch, length, ratio):
    slots = length // ratio if ratio else 0
    told = told_by(documents_in(np.ones((batch, length), np.int32)), 3, ratio)
    assert told["window_mask"].shape == (batch, length, length)
    assert told["entry_mask"].shape == (batch, length, slots)
    assert told["dense"].shape == (batch, length, length + slots)
    assert told["window_counts"].shape == told["entry_counts"].shape == (batch, length)
    some = np.zeros((batch, length, 2), np.int32)
    assert of_slots(np.ones((batch, length), np.int32), some, ratio, "sees_slots").shape == (batch, length, 2)


def test_nothing_but_the_masks_is_quadratic():
    """Ranges, counts and layouts of 1,000 rows never hold more than 1,000 integers in an array."""

    def linear(documents):
        sight = Visibility(documents, 128, 4)
        ranges = (sight.window_range, sight.entry_range, sight.window_counts, sight.entry_counts)
        return ranges, WindowLayout.of(documents, 4)

    ids, cu_seqlens = np.ones((1, 1000), np.int32), np.array([0, 10, 20], np.int32)
    assert largest_array(lambda ids: linear(Documents.from_segment_ids(ids)), ids) == 1000
    assert largest_array(lambda ends: linear(Documents.from_cu_seqlens(ends, 1000)), cu_seqlens) == 1000
    assert largest_array(lambda ids: Visibility(Documents.from_segment_ids(ids), 128, 4).window_mask(), ids) == 1000**2


def test_documents_are_data_and_never_retrace():
    traces = []

    @jax.jit
    def traced(sight):
        traces.append(sight)
        return sight, sight.dense()

    for seed in range(4):
        ids = random_segment_ids(seed, 2, 24, max_document=12)
        sight, dense = traced(Visibility(documents_in(ids), 3, 4))
        assert (sight.sliding_window, sight.compress_ratio, sight.slots) == (3, 4, 6)
        np.testing.assert_array_equal(dense, np.concatenate(reference_visibility(ids, 3, 4), axis=-1))
    assert len(traces) == 1
    # The window, the ratio and what is known of the documents are not data.
    ids = random_segment_ids(4, 2, 24, max_document=12)
    padded = np.array([[1] * 24, [1] * 3 + [0] * 21])
    for documents, rows, *sizes in (
        (documents_in(ids), ids, 4, 4),
        (documents_in(ids), ids, 3, 8),
        (Documents.from_lengths(np.array([24, 3]), 24), padded, 3, 4),
    ):
        _, dense = traced(Visibility(documents, *sizes))
        np.testing.assert_array_equal(dense, np.concatenate(reference_visibility(rows, *sizes), axis=-1))
    assert len(traces) == 4


def test_visibilities_pass_through_tree_transformations(unchecked_annotations):
    ids = np.stack([random_segment_ids(seed, 2, 24, max_document=12) for seed in range(3)])
    sights = jax.jit(jax.vmap(lambda ids: Visibility(Documents.from_segment_ids(ids), 3, 4)))(ids)
    dense = jax.jit(jax.vmap(lambda sight: sight.dense()))(sights)
    for i in range(3):
        np.testing.assert_array_equal(dense[i], np.concatenate(reference_visibility(ids[i], 3, 4), axis=-1))
    assert len(jax.tree.leaves(sights)) == 1
    assert jax.tree.map(lambda _: None, sights).sliding_window == 3


@pytest.mark.parametrize(
    ("name", "least", "value"),
    [
        *(("sliding_window", 1, value) for value in (0, -3, True, 1.5)),
        *(("compress_ratio", 0, value) for value in (-1, False, 4.0)),
    ],
)
def test_mistakes_are_named(name, least, value, unchecked_annotations):
    with pytest.raises(ValueError, match=f"^{name}: expected an int >= {least}, got {re.escape(str(value))}"):
        Visibility(Documents.unpacked(1, 8), **{"sliding_window": 3, name: value})


@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_tile_sees_what_its_queries_see(size):
    """Slot by slot, and in blocks of slots: no block before the first or after the last has anything to see."""
    ids = random_segment_ids(4, 2, 60, max_document=25)
    visibility = Visibility(documents_in(ids), 4, 3)
    seen = reference_visibility(ids, 4, 3)[1]
    slots = visibility.slots

    @jax.jit
    def of_tile(row):
        tile = visibility.tile(row, size)
        return tile.sees(0, slots), tile.sees(5, 7), tile.slot_blocks(4)

    for row in range(60 - size + 1):
        expected = seen[:, row : row + size]
        everything, some, bounds = of_tile(row)
        np.testing.assert_array_equal(everything, expected)
        np.testing.assert_array_equal(some, expected[:, :, 5:12])
        first, end = map(int, bounds)
        assert not expected[:, :, : 4 * first].any()
        assert not expected[:, :, 4 * end :].any()
        assert first <= end <= -(-slots // 4)
    (first, end), unpacked = Visibility(Documents.unpacked(2, 60), 4, 3).tile(20, 2).slot_blocks(4), 22 // 3
    assert (int(first), int(end)) == (0, -(-unpacked // 4))


def test_the_document_that_a_slot_is_of():
    ids = np.array([[1] * 5 + [0] * 3 + [2] * 4 + [3] * 8, [0] * 4 + [7] * 16])
    aligned = Visibility(Documents.from_segment_ids(ids, alignment=4), 4, 4)
    np.testing.assert_array_equal(aligned.slot_document_start, [[0, 0, 8, 12, 12], [-1, 4, 4, 4, 4]])
    layout = WindowLayout.of(aligned.documents, 4)
    valid = np.asarray(layout.valid)
    own = np.take_along_axis(np.asarray(aligned.documents.document_start), np.asarray(layout.start), axis=1)
    np.testing.assert_array_equal(np.asarray(aligned.slot_document_start)[valid], own[valid])
    with pytest.raises(ValueError, match="documents: expected an alignment of 4, got 1"):
        _ = Visibility(Documents.from_segment_ids(ids), 4, 4).slot_document_start
    assert Visibility(aligned.documents, 4).slot_document_start.shape == (2, 0)
