"""Rows that continue a document see what the same rows of the whole document see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foveal.geometry import Documents, EntryRange, Visibility, WindowLayout, window_halo
from foveal.testing.generators import random_segment_ids

SIZE = 9  # new rows


WHOLE = 40


def row(length, count):
    return jnp.array([length], jnp.int32), jnp.array([count], jnp.int32)


@given(
    length=st.integers(0, WHOLE - SIZE),
    count=st.integers(0, SIZE),
    window=st.sampled_from([1, 2, 5, 12]),  # shapes are compiled, one by one
    ratio=st.sampled_from([1, 2, 3, 7, 12]),
    spare=st.sampled_from([0, 5]),
)
def test_they_see_what_they_would_in_the_whole_row(length, count, window, ratio, spare):
    documents = Documents.continuing(*row(length, count), SIZE)
    capacity = WHOLE // ratio + spare
    visibility = Visibility.continuing(documents, window, EntryRange.of_rows(ratio, capacity))
    assert (visibility.raw_keys, visibility.slots) == (SIZE + window - 1, capacity)
    whole = Visibility(Documents.unpacked(1, WHOLE), window, ratio)
    rows = slice(length, length + count)
    np.testing.assert_array_equal(documents.positions[0, :count], np.arange(length, length + count))
    np.testing.assert_array_equal(documents.is_padding[0], np.arange(SIZE) >= count)
    # Column i is row length - (window - 1) + i of the whole.
    before = np.pad(np.asarray(whole.window_mask())[0, rows], ((0, 0), (window - 1, 0)))
    np.testing.assert_array_equal(
        visibility.window_mask()[0, :count, : window - 1 + count], before[:, length : length + window - 1 + count]
    )
    np.testing.assert_array_equal(visibility.window_mask()[0, :count, window - 1 + count :], False)
    entries = np.pad(np.asarray(whole.entry_mask())[0, rows], ((0, 0), (0, capacity - whole.slots)))
    np.testing.assert_array_equal(visibility.entry_mask()[0, :count], entries)
    np.testing.assert_array_equal(visibility.dense()[0, count:], False)

    tile = visibility.tile(3, 4)
    for part, full in zip(tile, (*visibility.window_range, *visibility.entry_range), strict=True):
        np.testing.assert_array_equal(part, full[:, 3:7])
    seen = np.flatnonzero(np.asarray(visibility.entry_mask())[0, 3:7].any(axis=0))
    if seen.size:
        first, end = tile.slots
        assert first <= seen[0]
        assert end == seen[-1] + 1


@given(
    length=st.integers(0, WHOLE - SIZE),
    count=st.integers(0, SIZE),
    ratio=st.sampled_from([1, 2, 3, 7, 12]),
    overlap=st.booleans(),
)
def test_they_complete_the_windows_that_the_whole_row_has(length, count, ratio, overlap):
    history = window_halo(ratio, overlap=overlap)
    assert history == (2 * ratio if overlap else ratio) - 1
    layout = WindowLayout.continuing(*row(length, count), SIZE, ratio, history=history)
    done = [w for w in range(WHOLE // ratio) if length < (w + 1) * ratio <= length + count]
    np.testing.assert_array_equal(np.asarray(layout.positions)[layout.valid], np.array(done, int) * ratio)
    slots = np.asarray(layout.entry_slots(WHOLE))[0]
    np.testing.assert_array_equal(slots[np.asarray(layout.valid)[0]], np.array(done, int))
    assert (slots[~np.asarray(layout.valid)[0]] >= WHOLE).all()
    assert len(set(slots.tolist())) == slots.size
    # Rows of the call numbered as in the whole document.
    numbers = jnp.arange(length - history, length + SIZE, dtype=jnp.int32)[None, :, None]
    assert layout.rows == numbers.shape[1]
    windows = np.asarray(layout.gather(numbers))[np.asarray(layout.valid), :, 0]
    np.testing.assert_array_equal(windows, np.arange(ratio)[None] + np.array(done, int).reshape(-1, 1) * ratio)
    if overlap:
        previous = np.asarray(layout.gather(numbers, shift=-1))[np.asarray(layout.has_previous), :, 0]
        np.testing.assert_array_equal(previous, windows[np.array(done, int) > 0] - ratio)


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


@given(
    seed=st.integers(0, 2**32 - 1),
    parts=st.sampled_from([1, 2, 4]),
    ratio=st.sampled_from([1, 2, 3]),
)
def test_parts_of_a_packed_row_see_what_the_whole_row_sees(seed, parts, ratio):
    """Of which each keeps the numbers of the whole."""
    length, window = 24, 5
    size = length // parts
    whole = Documents.from_segment_ids(random_segment_ids(seed, 2, length, max_document=11))
    wanted = Visibility(whole, window, ratio)
    before = np.pad(np.asarray(wanted.window_mask()), ((0, 0), (0, 0), (window - 1, 0)))
    for first in range(0, length, size):
        rows = slice(first, first + size)
        part = Documents(document_start=whole.document_start[:, rows], first_row=jnp.int32(first))
        np.testing.assert_array_equal(part.positions, whole.positions[:, rows])
        np.testing.assert_array_equal(part.is_padding, whole.is_padding[:, rows])
        sight = Visibility.continuing(part, window, EntryRange.of_rows(ratio, wanted.slots))
        np.testing.assert_array_equal(sight.entry_mask(), wanted.entry_mask()[:, rows])
        np.testing.assert_array_equal(sight.window_mask(), before[:, rows, first : first + size + window - 1])
