"""Who sees what: against brute force, and each property of the law that something else relies on."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foveal.geometry import Documents, Visibility, WindowLayout
from foveal.testing.generators import random_segment_ids
from foveal.testing.reference import reference_visibility
from tests.support.documents import documents_of, segment_ids
from tests.support.programs import largest_array

RATIOS = (0, 1, 2, 3, 4, 8)
WINDOWS = (1, 3, 8)
# 24 is a multiple of every ratio, 26 of neither 4 nor 8, and 7 is shorter than a window of 8.
SHAPES = [*((length, ratio) for length in (7, 24) for ratio in RATIOS), (26, 4), (26, 8)]
shapes = pytest.mark.parametrize(("length", "ratio"), SHAPES)


@functools.partial(jax.jit, static_argnums=1)
def everything_of(ids, ratio):
    """For each sliding window all that a visibility tells, and the windows' layout."""
    documents = Documents.from_segment_ids(ids)
    told = {}
    for window in WINDOWS:
        sight = Visibility(documents, window, ratio)
        told[window] = {
            "window_range": sight.window_range,
            "entry_range": sight.entry_range,
            "window_counts": sight.window_counts,
            "entry_counts": sight.entry_counts,
            "window_mask": sight.window_mask(),
            "entry_mask": sight.entry_mask(),
            "dense": sight.dense(),
        }
    layout = WindowLayout.of(documents, ratio) if ratio else None
    return told, layout


def all_of(ids: np.ndarray, ratio: int):
    return jax.tree.map(np.asarray, everything_of(ids, ratio)[0])


def covered(bounds: tuple[np.ndarray, np.ndarray], size: int) -> np.ndarray:
    """bool [B, S, size]: what a range per query covers, by python's own ranges."""
    first, end = bounds
    mask = np.zeros((*first.shape, size), bool)
    for b, t in np.ndindex(first.shape):
        mask[b, t, list(range(first[b, t], end[b, t]))] = True
    return mask


@shapes
@given(data=st.data())
def test_everything_equals_brute_force(length, ratio, data):
    ids = data.draw(segment_ids(length))
    slots = length // ratio if ratio else 0
    for window, told in all_of(ids, ratio).items():
        keys, entries = reference_visibility(ids, window, ratio)
        np.testing.assert_array_equal(told["window_mask"], keys)
        np.testing.assert_array_equal(told["entry_mask"], entries)
        np.testing.assert_array_equal(told["dense"], np.concatenate([keys, entries], axis=-1))
        np.testing.assert_array_equal(covered(told["window_range"], length), keys)
        np.testing.assert_array_equal(covered(told["entry_range"], slots), entries)
        np.testing.assert_array_equal(told["window_counts"], keys.sum(-1))
        np.testing.assert_array_equal(told["entry_counts"], entries.sum(-1))
        assert told["window_mask"].dtype == told["entry_mask"].dtype == told["dense"].dtype == bool
        integers = (*told["window_range"], *told["entry_range"], told["window_counts"], told["entry_counts"])
        assert {array.dtype for array in integers} == {np.dtype(np.int32)}


@shapes
@given(data=st.data())
def test_ranges_never_decrease_and_stay_within_bounds(length, ratio, data):
    """What lets a kernel bound a block of queries by its first and last row that sees any; padding has slots [0, 0)."""
    ids = data.draw(segment_ids(length))
    for told in all_of(ids, ratio).values():
        for (first, end), size in (
            (told["window_range"], length),
            (told["entry_range"], length // ratio if ratio else 0),
        ):
            for b in range(len(ids)):
                real = ids[b] > 0
                assert (np.diff(first[b][real]) >= 0).all()
                assert (np.diff(end[b][real]) >= 0).all()
            assert ((first >= 0) & (first <= end) & (end <= size)).all()
        first, end = told["entry_range"]
        assert not first[ids == 0].any()
        assert not end[ids == 0].any()


@shapes
@given(data=st.data())
def test_a_document_sees_what_it_would_see_alone(length, ratio, data):
    """And nothing but itself: no key and no slot of another document or of padding."""
    ids = data.draw(segment_ids(length))
    for window, told in all_of(ids, ratio).items():
        for b, row in enumerate(ids):
            rest_keys, rest_entries = told["window_mask"][b].copy(), told["entry_mask"][b].copy()
            for begin, end in documents_of(row):
                keys, entries = reference_visibility(np.ones((1, end - begin), int), window, ratio)
                np.testing.assert_array_equal(rest_keys[begin:end, begin:end], keys[0])
                rest_keys[begin:end, begin:end] = False
                if ratio:
                    mine = slice(begin // ratio, begin // ratio + entries.shape[-1])
                    np.testing.assert_array_equal(rest_entries[begin:end, mine], entries[0])
                    rest_entries[begin:end, mine] = False
            assert not rest_keys.any()
            assert not rest_entries.any()


@pytest.mark.parametrize(("length", "ratio"), [(length, ratio) for length, ratio in SHAPES if ratio])
@given(data=st.data())
def test_an_entry_is_visible_exactly_from_its_last_token_on(length, ratio, data):
    """To the rest of its document, the token that completes it included; a slot that holds no entry to nobody."""
    ids = data.draw(segment_ids(length))
    told, layout = everything_of(ids, ratio)
    mask, valid, start = (np.asarray(a) for a in (told[1]["entry_mask"], layout.valid, layout.start))
    for b, row in enumerate(ids):
        end_of = {t: end for begin, end in documents_of(row) for t in range(begin, end)}
        for c in range(length // ratio):
            last = start[b, c] + ratio - 1
            expected = range(last, end_of[last]) if valid[b, c] else ()
            assert np.flatnonzero(mask[b, :, c]).tolist() == list(expected)


@shapes
@given(data=st.data())
def test_padding_sees_nothing_and_is_seen_by_nothing(length, ratio, data):
    """Not even padding sees padding, though its ids are equal."""
    ids = data.draw(segment_ids(length))
    is_padding = ids == 0
    for told in all_of(ids, ratio).values():
        assert not told["dense"][is_padding].any()
        assert not told["window_mask"].transpose(0, 2, 1)[is_padding].any()
        # Whereas a token always sees itself.
        assert told["window_mask"][:, np.arange(length), np.arange(length)].tolist() == (~is_padding).tolist()


@pytest.mark.parametrize("window", [1, 3, 8, 128])
def test_a_sliding_window_is_that_many_keys_with_itself(window):
    """Row W must not see row 0; row W - 1 does."""
    length = window + 3
    sight = Visibility(Documents.unpacked(1, length), window)
    mask, counts = np.asarray(sight.window_mask()[0]), sight.window_counts[0]
    assert mask[window - 1, 0]
    assert not mask[window, 0]
    assert mask[window].sum() == window
    assert counts.tolist() == [min(t + 1, window) for t in range(length)]


@pytest.mark.parametrize("window", [26, 1000, 2**31 - 1])
def test_a_sliding_window_beyond_the_row_is_causal(window):
    mask = Visibility(Documents.unpacked(1, 26), window).window_mask()[0]
    np.testing.assert_array_equal(mask, np.tril(np.ones((26, 26), bool)))


@pytest.mark.parametrize(("ratio", "slots"), [(0, 0), (1, 26), (4, 6), (8, 3), (26, 1), (27, 0), (2**30, 0)])
def test_slots(ratio, slots):
    sight = Visibility(Documents.unpacked(1, 26), 3, ratio)
    assert sight.slots == slots == sight.entry_mask().shape[-1]
    assert sight.dense().shape == (1, 26, 26 + slots)
    assert sight.entry_counts[0].tolist() == [(t + 1) // ratio if ratio else 0 for t in range(26)]


def test_visibility_at_lengths_of_use():
    ids = random_segment_ids(11, 1, 600, max_document=400)
    for window, ratio in ((128, 4), (128, 128)):
        keys, entries = reference_visibility(ids, window, ratio)
        assert entries.any()
        np.testing.assert_array_equal(
            Visibility(Documents.from_segment_ids(ids), window, ratio).dense(), np.concatenate([keys, entries], -1)
        )


@functools.partial(jax.jit, static_argnums=2)
def sees_slots(ids, slots, ratio):
    return Visibility(Documents.from_segment_ids(ids), 3, ratio).sees_slots(slots)


@pytest.mark.parametrize("ratio", [0, 1, 4])
@given(ids=segment_ids(24), seed=st.integers(0, 2**32 - 1))
def test_sees_slots(ratio, ids, seed):
    """In any order, slots twice, -1 and slots that do not exist, each for its own query."""
    count = 24 // ratio if ratio else 0
    slots = np.random.default_rng(seed).integers(-2, count + 3, size=(2, 24, 5), dtype=np.int32)
    got, entries = np.asarray(sees_slots(ids, slots, ratio)), reference_visibility(ids, 3, ratio)[1]
    for b, t, k in np.ndindex(slots.shape):
        slot = slots[b, t, k]
        assert got[b, t, k] == (0 <= slot < count and entries[b, t, slot])


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("ratio", [1, 4])
def test_seen_slots_are_those_that_a_query_sees_once_each(ratio, dtype, unchecked_annotations):
    """-1, slots out of range and what is not seen come out as -1, and so does what was there before."""
    ids, count = random_segment_ids(2, 2, 24, max_document=12), 24 // ratio
    rng, limits = np.random.default_rng(ratio), np.iinfo(dtype)
    slots = rng.integers(max(-2, limits.min), count + 3, size=(2, 24, 7)).astype(dtype)
    slots[:, :, 3], slots[:, :, 5] = limits.max, min(limits.max, 1 << 32)
    slots[0].sort(axis=-1)
    entries = reference_visibility(ids, 3, ratio)[1]
    with jax.enable_x64(True):
        visibility = Visibility(Documents.from_segment_ids(ids), 3, ratio)
        for part in (slice(0, 1), slice(0, 2)):  # all ascending, and in any order
            sight = jax.tree.map(lambda start, part=part: start[part], visibility)
            seen = np.asarray(sight.seen_slots(jnp.asarray(slots[part])))
            assert seen.dtype == np.int32
            for b, t in np.ndindex(seen.shape[:2]):
                wanted = {int(slot) for slot in slots[b, t] if 0 <= slot < count and entries[b, t, slot]}
                assert sorted(seen[b, t][seen[b, t] != -1].tolist()) == sorted(wanted)
    assert (seen != -1).any()


@pytest.mark.parametrize(("batch", "length"), [(0, 4), (2, 0), (2, 3), (1, 1)])
@pytest.mark.parametrize("ratio", [0, 1, 4])
def test_empty_batches_and_rows_shorter_than_a_window(batch, length, ratio):
    sight = Visibility(Documents.from_segment_ids(np.ones((batch, length), np.int32)), 3, ratio)
    slots = length // ratio if ratio else 0
    assert sight.window_mask().shape == (batch, length, length)
    assert sight.entry_mask().shape == (batch, length, slots)
    assert sight.dense().shape == (batch, length, length + slots)
    assert sight.window_counts.shape == sight.entry_counts.shape == (batch, length)
    assert sight.sees_slots(jnp.zeros((batch, length, 2), jnp.int32)).shape == (batch, length, 2)


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
        sight, dense = traced(Visibility(Documents.from_segment_ids(ids), 3, 4))
        assert (sight.sliding_window, sight.compress_ratio, sight.slots) == (3, 4, 6)
        np.testing.assert_array_equal(dense, Visibility(Documents.from_segment_ids(ids), 3, 4).dense())
    assert len(traces) == 1
    # The window, the ratio and what is known of the documents are not data.
    ids = random_segment_ids(4, 2, 24, max_document=12)
    for other in (
        Visibility(Documents.from_segment_ids(ids), 4, 4),
        Visibility(Documents.from_segment_ids(ids), 3, 8),
        Visibility(Documents.from_lengths(np.array([24, 3]), 24), 3, 4),
    ):
        np.testing.assert_array_equal(traced(other)[1], other.dense())
    assert len(traces) == 4


def test_visibilities_pass_through_tree_transformations(unchecked_annotations):
    ids = np.stack([random_segment_ids(seed, 2, 24, max_document=12) for seed in range(3)])
    sights = jax.vmap(lambda ids: Visibility(Documents.from_segment_ids(ids), 3, 4))(ids)
    dense = jax.vmap(lambda sight: sight.dense())(sights)
    for i in range(3):
        np.testing.assert_array_equal(dense[i], np.concatenate(reference_visibility(ids[i], 3, 4), axis=-1))
    assert len(jax.tree.leaves(sights)) == 1
    assert jax.tree.map(lambda _: None, sights).sliding_window == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "sliding_window: expected an int >= 1, got 0"),
        ((-3,), "sliding_window: expected an int >= 1, got -3"),
        ((True,), "sliding_window: expected an int >= 1, got True"),
        ((1.5,), "sliding_window: expected an int >= 1, got 1.5"),
        ((3, -1), "compress_ratio: expected an int >= 0, got -1"),
        ((3, False), "compress_ratio: expected an int >= 0, got False"),
        ((3, 4.0), "compress_ratio: expected an int >= 0, got 4.0"),
    ],
)
def test_mistakes_are_named(arguments, message, unchecked_annotations):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Visibility(Documents.unpacked(1, 8), *arguments)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_tile_sees_what_its_queries_see(size):
    """Slot by slot, and in blocks of slots: no block before the first or after the last has anything to see."""
    ids = random_segment_ids(4, 2, 60, max_document=25)
    visibility = Visibility(Documents.from_segment_ids(ids), 4, 3)
    seen = reference_visibility(ids, 4, 3)[1]
    slots = visibility.slots
    for row in range(60 - size + 1):
        tile, expected = visibility.tile(row, size), seen[:, row : row + size]
        np.testing.assert_array_equal(tile.sees(0, slots), expected)
        np.testing.assert_array_equal(tile.sees(5, 7), expected[:, :, 5:12])
        first, end = (int(bound) for bound in tile.slot_blocks(4))
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
