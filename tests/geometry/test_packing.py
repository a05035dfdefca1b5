"""Packing documents into rows: each whole, where first fit puts it, and found again by its placement."""

import re

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foveal.geometry import WindowLayout, left_aligned, pack_documents, unpack
from tests.support.documents import documents_in

# Lengths of documents for rows of 10: some fill a row, and 10 is no multiple of the alignments 3 and 4.
ROW = 10
lengths_of_some = st.lists(st.integers(1, ROW), min_size=1, max_size=8)
alignments = pytest.mark.parametrize("align", [1, 2, 3, 4, 10, 16])


def numbered(lengths: list[int], dtype=np.int32) -> list[np.ndarray]:
    """Documents in which no token occurs twice, nor 0."""
    ends = np.cumsum(lengths)
    return [np.arange(end - length + 1, end + 1).astype(dtype) for length, end in zip(lengths, ends, strict=True)]


def first_fit(lengths: list[int], align: int) -> list[tuple[int, int]]:
    """(row, start) of each document by trying every aligned place of every row in turn."""
    rows: list[list[bool]] = []
    places = []
    for length in lengths:
        fits = (
            (r, start)
            for r, used in enumerate([*rows, [False] * ROW])
            for start in range(0, ROW - length + 1, align)
            if not any(used[start : start + length])
        )
        row, start = next(fits)
        if row == len(rows):
            rows.append([False] * ROW)
        rows[row][start : start + length] = [True] * length
        places.append((row, start))
    return places


@alignments
@given(lengths=lengths_of_some)
def test_first_fit_puts_every_document_whole_where_its_placement_says(align, lengths):
    documents = numbered(lengths)
    packed = pack_documents(documents, ROW, align=align, pad_value=-7.0)
    assert [(p.row, p.start) for p in packed.placements] == first_fit(lengths, align)
    assert packed.values.shape == packed.segment_ids.shape == packed.documents.shape
    assert packed.values.shape == (1 + max(p.row for p in packed.placements), ROW)
    positions, free = np.asarray(packed.documents.positions), np.ones(packed.values.shape, bool)
    for document, (row, start, length) in zip(documents, packed.placements, strict=True):
        here = (row, slice(start, start + length))
        assert start % align == 0
        np.testing.assert_array_equal(packed.values[here], document)
        assert len(set(packed.segment_ids[here].tolist())) == 1
        assert positions[here].tolist() == list(range(length))
        assert free[here].all()
        free[here] = False
    assert (packed.values[free] == -7).all()
    np.testing.assert_array_equal(packed.segment_ids == 0, free)
    np.testing.assert_array_equal(packed.documents.is_padding, free)
    # Segment ids and documents say the same; the ids are 1, 2, ... from left to right.
    assert packed.segment_ids.dtype == np.int32
    np.testing.assert_array_equal(packed.documents.document_start, documents_in(packed.segment_ids).document_start)
    assert (packed.documents.alignment, packed.documents.padded) == (align, True)
    for row in packed.segment_ids:
        ids = [i for t, i in enumerate(row.tolist()) if i and (t == 0 or row[t - 1] != i)]
        assert ids == list(range(1, len(ids) + 1))


def test_first_fit_goes_back_to_earlier_rows():
    packed = pack_documents(numbered([6, 7, 3, 3, 1]), ROW)
    assert packed.placements == ((0, 0, 6), (1, 0, 7), (0, 6, 3), (1, 7, 3), (0, 9, 1))
    assert packed.segment_ids.tolist() == [[1] * 6 + [2] * 3 + [3], [1] * 7 + [2] * 3]


def test_alignment_leaves_gaps_of_padding():
    packed = pack_documents(numbered([3, 2, 4]), 12, align=4)
    assert packed.values.tolist() == [[1, 2, 3, 0, 4, 5, 0, 0, 6, 7, 8, 9]]
    assert packed.segment_ids.tolist() == [[1, 1, 1, 0, 2, 2, 0, 0, 3, 3, 3, 3]]
    assert {m for m in range(1, 9) if packed.documents.is_aligned(m)} == {1, 2, 4}
    assert WindowLayout.of(packed.documents, 4).contiguous
    assert WindowLayout.of(packed.documents, 4).valid.tolist() == [[False, False, True]]


def test_a_last_document_need_not_reach_the_next_multiple():
    """Row 8 is the last: 2 tokens fit there though a whole multiple of 4 would not."""
    assert pack_documents(numbered([5, 2]), 10, align=4).placements == ((0, 0, 5), (0, 8, 2))


@alignments
@given(lengths=lengths_of_some, data=st.data())
def test_an_empty_document_takes_no_room(align, lengths, data):
    """Neither rows nor a batch row, wherever it stands among the others; it still has its placement."""
    everything = list(lengths)
    for at in data.draw(st.lists(st.integers(0, len(lengths)), min_size=1, max_size=3)):
        everything.insert(at, 0)
    with_empty, without = (pack_documents(numbered(each), ROW, align=align) for each in (everything, lengths))
    np.testing.assert_array_equal(with_empty.values, without.values)
    np.testing.assert_array_equal(with_empty.segment_ids, without.segment_ids)
    assert tuple(p for p in with_empty.placements if p.length) == without.placements
    assert [p.length for p in with_empty.placements] == everything


def test_documents_that_are_all_empty():
    packed = pack_documents([np.zeros((0, 3)), np.zeros((0, 3))], ROW)
    assert [p.length for p in packed.placements] == [0, 0]
    assert not packed.segment_ids.any()
    assert packed.values.shape == (1, ROW, 3)  # a row for the placements to point at


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.uint8, bool])
def test_vectors_per_token_and_dtypes_are_kept(dtype):
    documents = [np.random.default_rng(i).integers(0, 2, (n, 2, 3)).astype(dtype) for i, n in enumerate((4, 6, 5))]
    packed = pack_documents(documents, ROW)
    assert packed.values.dtype == dtype
    assert packed.values.shape == (2, ROW, 2, 3)
    for document, (row, start, length) in zip(documents, packed.placements, strict=True):
        np.testing.assert_array_equal(packed.values[row, start : start + length], document)
    assert not packed.values[1, 5:].any()
    packed.values[:] = 0  # a copy: the caller's documents stay
    assert documents[0].any()


def test_pad_value():
    assert pack_documents(numbered([2]), 4, pad_value=-100).values.tolist() == [[1, 2, -100, -100]]
    assert pack_documents([np.ones(2, np.float32)], 4, pad_value=-0.5).values.tolist() == [[1, 1, -0.5, -0.5]]
    assert np.isnan(pack_documents([np.ones(2, np.float32)], 4, pad_value=float("nan")).values[0, 2:]).all()


@pytest.mark.parametrize("integer", [np.int64, np.int32])
def test_numpy_integers_are_integers(integer, unchecked_annotations):
    packed = pack_documents(numbered([3, 2]), integer(8), align=integer(4))
    assert packed.placements == ((0, 0, 3), (0, 4, 2))
    assert packed.documents.is_aligned(4)


@pytest.mark.parametrize(
    ("documents", "arguments", "message"),
    [
        ([], {}, "documents: expected at least one, got none"),
        (numbered([3, 11]), {}, "documents: expected at most row_length=10 tokens each, got 11 at index 1"),
        ([np.ones(3), np.ones(3, np.float32)], {}, "documents: expected arrays .* got float32[3] at index 1"),
        ([np.ones((3, 2)), np.ones((3, 4))], {}, "documents: expected arrays .* got float64[3, 4] at index 1"),
        ([np.ones((3, 2)), np.ones(3)], {}, "documents: expected arrays .* got float64[3] at index 1"),
        ([np.array(3)], {}, "documents: expected arrays .* at index 0"),
        *(
            (numbered([3]), {name: value}, f"{name}: expected an int >= 1, got {value}")
            for name in ("align", "row_length")
            for value in (0, -4, True, 2.0, 8.5)
        ),
    ],
)
def test_mistakes_are_named(documents, arguments, message, unchecked_annotations):
    pattern = re.escape(message).replace(re.escape(".*"), ".*")
    with pytest.raises(ValueError, match=f"^{pattern}"):
        pack_documents(documents, **{"row_length": ROW, **arguments})


def test_unpack_is_the_inverse_of_laying_end_to_end(rng):
    lengths = [3, 0, 5, 1]
    x = rng.normal(size=(11, 2, 2)).astype(np.float32)
    ends = np.cumsum([0, *lengths])
    for rows in (unpack(x, ends), jax.jit(lambda x, e: unpack(x, e, max_length=5))(x, ends)):
        assert rows.values.shape == (4, 5, 2, 2)
        np.testing.assert_array_equal(rows.lengths, lengths)
        for row, (first, n) in enumerate(zip(ends, lengths, strict=False)):
            np.testing.assert_array_equal(rows.values[row, :n], x[first : first + n])
            np.testing.assert_array_equal(rows.values[row, n:], 0)
    assert unpack(x, ends, max_length=8).values.shape == (4, 8, 2, 2)
    assert unpack(np.zeros((0, 3)), np.array([0, 0])).values.shape == (1, 0, 3)
    assert unpack(np.zeros((0, 3)), np.array([0, 0]), max_length=2).values.shape == (1, 2, 3)
    assert unpack(x, np.array([0])).values.shape == (0, 0, 2, 2)


def test_left_padding_goes_to_the_right(rng):
    lengths, x = np.array([0, 2, 5]), rng.normal(size=(3, 5, 2)).astype(np.float32)
    for rows in (left_aligned(x, lengths), jax.jit(left_aligned)(x, lengths)):
        np.testing.assert_array_equal(rows.lengths, lengths)
        for row, n in enumerate(lengths):
            np.testing.assert_array_equal(rows.values[row, :n], x[row, 5 - n :])
            np.testing.assert_array_equal(rows.values[row, n:], 0)


def test_traced_lengths_beyond_what_there_is_reach_into_no_other_row():
    x = np.arange(8.0, dtype=np.float32).reshape(2, 4)
    rows = jax.jit(left_aligned)(x, np.array([-1, 6]))
    np.testing.assert_array_equal(rows.lengths, [0, 4])
    np.testing.assert_array_equal(rows.values, [[0, 0, 0, 0], [4, 5, 6, 7]])
    rows = jax.jit(lambda x, ends: unpack(x, ends, max_length=2))(x[0], np.array([0, 1, 4, 9]))
    np.testing.assert_array_equal(rows.lengths, [1, 2, 0])
    np.testing.assert_array_equal(rows.values, [[0, 0], [1, 2], [0, 0]])
    with jax.enable_x64(True):  # what is beyond int32 does not come round to something smaller
        rows = jax.jit(left_aligned)(x, np.array([1, (1 << 32) + 1]))
        np.testing.assert_array_equal(rows.lengths, [1, 4])
        rows = jax.jit(lambda x, ends: unpack(x, ends, max_length=3))(x[0], np.array([0, 1, (1 << 32) + 2]))
        np.testing.assert_array_equal(rows.lengths, [1, 3])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: unpack(x, np.array([1, 3])), r"^cu_seqlens: expected 0 as the first value, got 1 at 0$"),
        (lambda x: unpack(x, np.array([0, 3, 2])), r"^cu_seqlens: expected values that never decrease, got 2 at 2$"),
        (lambda x: unpack(x, np.array([0, 7])), r"^cu_seqlens: expected an end within the 6 rows, got 7 at 1$"),
        (lambda x: unpack(x, np.array([[0, 7]])), r"^cu_seqlens: expected rank 1"),
        (lambda x: unpack(x, np.zeros(0, int)), r"^cu_seqlens: expected at least the leading 0"),
        (lambda x: unpack(x, np.array([0, 3, 5]), max_length=2), r"^max_length: expected at least 3"),
        (lambda x: unpack(np.zeros(()), np.array([0])), r"^x: expected \[S, ...\]"),
        (
            lambda x: jax.jit(lambda e: unpack(x, e))(np.array([0, 2])),
            r"^max_length: expected an int >= 0 where cu_seq",
        ),
        (
            lambda x: left_aligned(x, np.array([0] * 5)),
            r"^lengths: expected integers \[B\] = \(6,\), got int64 of shape \(5,\)",
        ),
        (lambda x: left_aligned(x, np.array([0] * 5 + [3])), r"^lengths: expected 0 to 2"),
        (lambda x: left_aligned(x, np.zeros(6)), r"^lengths: expected integers"),
        (lambda x: left_aligned(x[:, 0], np.zeros(6, int)), r"^x: expected \[B, S, ...\]"),
    ],
)
def test_rows_that_cannot_be(call, message, unchecked_annotations):
    with pytest.raises(ValueError, match=message):
        call(np.zeros((6, 2), np.float32))
