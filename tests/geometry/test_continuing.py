"""Rows that continue a document see what the same rows of the whole document see."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foveal.geometry import Documents, EntryRange, Visibility, WindowLayout, window_halo
from foveal.testing.generators import random_segment_ids
from foveal.testing.reference import reference_visibility

SIZE = 9  # new rows
WHOLE = 40


def row(length, count):
    return jnp.array([length], jnp.int32), jnp.array([count], jnp.int32)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def sight_of(length, count, window, ratio, capacity):
    """All that a visibility of continuing rows says, and its tile of rows 3 to 6."""
    documents = Documents.continuing(length, count, SIZE)
    visibility = Visibility.continuing(documents, window, EntryRange.of_rows(ratio, capacity))
    assert (visibility.raw_keys, visibility.slots) == (SIZE + window - 1, capacity)
    tile, ranges = visibility.tile(3, 4), (*visibility.window_range, *visibility.entry_range)
    masks = visibility.window_mask(), visibility.entry_mask(), visibility.dense()
    return jax.tree.map(lambda a: a[0], ((documents.positions, documents.is_padding), masks, ranges, tile)), tile.slots


@given(
    length=st.integers(0, WHOLE - SIZE),
    count=st.integers(0, SIZE),
    sizes=st.sampled_from([(1, 3, 5), (2, 12, 0), (5, 1, 5), (5, 7, 0), (12, 2, 5), (12, 12, 5)]),  # each is compiled
)
def test_they_see_what_they_would_in_the_whole_row(length, count, sizes):
    window, ratio, spare = sizes
    capacity, rows = WHOLE // ratio + spare, slice(length, length + count)
    told = jax.tree.map(np.asarray, sight_of(*row(length, count), window, ratio, capacity))
    ((positions, is_padding), (window_mask, entry_mask, dense), ranges, tile), (first, end) = told
    np.testing.assert_array_equal(positions[:count], np.arange(length, length + count))
    np.testing.assert_array_equal(is_padding, np.arange(SIZE) >= count)
    keys, entries = (mask[0, rows] for mask in reference_visibility(np.ones((1, WHOLE), int), window, ratio))
    # Column i is row length - (window - 1) + i of the whole.
    before = np.pad(keys, ((0, 0), (window - 1, SIZE)))[:, length : length + window - 1 + SIZE]
    np.testing.assert_array_equal(window_mask[:count], before)
    np.testing.assert_array_equal(entry_mask[:count], np.pad(entries, ((0, 0), (0, spare))))
    np.testing.assert_array_equal(dense[:count], np.concatenate([window_mask, entry_mask], axis=-1)[:count])
    assert not dense[count:].any()
    for part, full in zip(tile, ranges, strict=True):
        np.testing.assert_array_equal(part, full[3:7])
    seen = np.flatnonzero(entry_mask[3:7].any(axis=0))
    if seen.size:
        assert first <= seen[0]
        assert end == seen[-1] + 1


@functools.partial(jax.jit, static_argnums=(2, 3))
def layout_of(length, count, ratio, history):
    """Properties of a layout, and its windows of rows that are numbered as in the whole document."""
    layout = WindowLayout.continuing(length, count, SIZE, ratio, history=history)
    assert layout.rows == history + SIZE
    numbers = (length[:, None] - history + jnp.arange(history + SIZE, dtype=jnp.int32)[None])[..., None]
    windows = [layout.gather(numbers, shift=shift)[..., 0] for shift in (0, -1)]
    said = layout.valid, layout.positions, layout.has_previous, layout.entry_slots(WHOLE), *windows
    return jax.tree.map(lambda a: a[0], said)


@given(
    length=st.integers(0, WHOLE - SIZE),
    count=st.integers(0, SIZE),
    ratio=st.sampled_from([1, 2, 3, 7, 12]),
    overlap=st.booleans(),
)
def test_they_complete_the_windows_that_the_whole_row_has(length, count, ratio, overlap):
    history = window_halo(ratio, overlap=overlap)
    assert history == (2 * ratio if overlap else ratio) - 1
    told = layout_of(*row(length, count), ratio, history)
    valid, positions, has_previous, slots, windows, previous = map(np.asarray, told)
    done = np.array([w for w in range(WHOLE // ratio) if length < (w + 1) * ratio <= length + count], int)
    np.testing.assert_array_equal(positions[valid], done * ratio)
    np.testing.assert_array_equal(slots[valid], done)
    assert (slots[~valid] >= WHOLE).all()
    assert len(set(slots.tolist())) == slots.size
    expected = np.arange(ratio)[None] + done[:, None] * ratio
    np.testing.assert_array_equal(windows[valid], expected)
    if overlap:
        np.testing.assert_array_equal(previous[has_previous], expected[done > 0] - ratio)


def test_lengths_and_counts_are_data():
    traces = 0

    @jax.jit
    def counted(length, count):
        nonlocal traces
        traces += 1
        documents = Documents.continuing(length, count, SIZE)
        return Visibility.continuing(documents, 4, EntryRange.of_rows(2, 20)).entry_counts

    for length, count in ((0, 0), (5, 2), (30, 9)):
        got = counted(*row(length, count))
        np.testing.assert_array_equal(got[0, :count], [(p + 1) // 2 for p in range(length, length + count)])
    assert traces == 1


def test_what_stands_before_them_must_be_told():
    documents = Documents.continuing(*row(5, 3), SIZE)
    with pytest.raises(ValueError, match=r"^history: expected the sliding_window - 1 = 3 raw keys .*, got 0"):
        Visibility(documents, 4)
    with pytest.raises(ValueError, match=r"^entries: expected a number of slots for .* that continue, got slots=None"):
        Visibility(documents, 4, 2, history=3)
    with pytest.raises(
        ValueError, match=r"^documents: expected documents without first_row, got a slice of a longer row"
    ):
        WindowLayout.of(documents, 2)
    assert Visibility(documents, 1).continues  # without a history it needs none, and is no row of its own all the same


@pytest.mark.parametrize(
    ("field", "value"), [("history", -1), ("history", None), ("slots", -1), ("slots", 2.0), ("slots", True)]
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_numbers_that_cannot_be(field, value):
    make = {
        "history": lambda n: Visibility(Documents.unpacked(1, 4), 4, 2, history=n),
        "slots": lambda n: EntryRange.of_rows(2, n),
    }
    with pytest.raises(ValueError, match=rf"^{field}: expected an int >= 0, got {value}"):
        make[field](value)
    with pytest.raises(ValueError, match=r"^compress_ratio: expected an int >= 1, got 0"):
        EntryRange.of_rows(0)
    with pytest.raises(ValueError, match=r"^slots: expected an int >= 0, got None"):
        EntryRange.all(None)  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("unchecked_annotations")
def test_entries_are_said_once():
    documents = Documents.unpacked(1, 4)
    for wrong, ratio in ((EntryRange.of_rows(2), 2), (2, 0), ((2, None), 0)):
        with pytest.raises(ValueError, match=r"^entries: expected an EntryRange, in the place of compress_ratio, got"):
            Visibility(documents, 4, ratio, entries=wrong)  # pyright: ignore[reportArgumentType]
    for ratio, slots in ((-4, None), (0, None), (4, 2.5), (True, None)):
        with pytest.raises(ValueError, match=r"^(compress_ratio|slots): expected an int"):
            Visibility(documents, 4, entries=EntryRange(ratio, slots))  # pyright: ignore[reportArgumentType]
    assert Visibility(documents, 4, 2) == Visibility(documents, 4, entries=EntryRange.of_rows(2))
    assert Visibility(documents, 4).entries is None


@functools.partial(jax.jit, static_argnums=(3, 4))
def part_of(starts, first, ids, ratio, slots):
    """Positions, padding and masks of rows from `first` on, and of the whole row that they are of."""
    part = Documents(document_start=starts, first_row=first)
    sight = Visibility.continuing(part, 5, EntryRange.of_rows(ratio, slots))
    whole = Documents.from_segment_ids(ids)
    return (part.positions, part.is_padding, sight.entry_mask(), sight.window_mask()), (
        whole.positions,
        whole.is_padding,
    )


@given(seed=st.integers(0, 2**32 - 1), parts=st.sampled_from([1, 2, 4]), ratio=st.sampled_from([1, 2, 3]))
def test_parts_of_a_packed_row_see_what_the_whole_row_sees(seed, parts, ratio):
    """Of which each keeps the numbers of the whole."""
    length, window = 24, 5
    size, ids = length // parts, random_segment_ids(seed, 2, length, max_document=11)
    starts = np.asarray(Documents.from_segment_ids(ids).document_start)
    keys, entries = reference_visibility(ids, window, ratio)
    before = np.pad(keys, ((0, 0), (0, 0), (window - 1, 0)))
    for first in range(0, length, size):
        rows = slice(first, first + size)
        got, (positions, is_padding) = part_of(starts[:, rows], np.int32(first), ids, ratio, length // ratio)
        wanted = (positions[:, rows], is_padding[:, rows], entries[:, rows],
                  before[:, rows, first : first + size + window - 1])  # fmt: skip
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(one, other)
