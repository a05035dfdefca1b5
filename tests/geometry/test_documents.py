"""Where documents begin: by brute force, from every kind of input, traced or not, and what is refused."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foveal.geometry import Documents
from tests.support.documents import segment_ids

LENGTHS = (1, 7, 24)
EVERYTHING = range(1, 20)


def expected_start(row: np.ndarray) -> list[int]:
    """Row at which each token's document begins: walk back while the id stays the same."""
    starts = []
    for t, value in enumerate(row):
        start = t
        while start > 0 and row[start - 1] == value:
            start -= 1
        starts.append(start if value else t + 1)
    return starts


@jax.jit
def facts_of(ids):
    documents = Documents.from_segment_ids(ids)
    return documents.document_start, documents.positions, documents.is_padding


@functools.partial(jax.jit, static_argnums=3)
def starts_of(ids, cu_seqlens, lengths, length):
    """By each way to tell documents; one row of cumulative lengths last."""
    one_row = Documents.from_cu_seqlens(cu_seqlens[1], length)
    told = Documents.from_cu_seqlens(cu_seqlens, length), Documents.from_lengths(lengths, length), one_row
    return [documents.document_start for documents in (Documents.from_segment_ids(ids), *told)]


@pytest.mark.parametrize("length", LENGTHS)
@given(data=st.data())
def test_document_start_positions_and_padding_by_brute_force(length, data):
    ids = data.draw(segment_ids(length))
    start = np.array([expected_start(row) for row in ids], np.int32)
    expected = start, np.where(ids, np.arange(length) - start, -1).astype(np.int32), ids == 0
    documents = Documents.from_segment_ids(ids)
    concrete = documents.document_start, documents.positions, documents.is_padding
    for told in (facts_of(ids), concrete):
        for fact, wanted in zip(told, expected, strict=True):
            assert fact.dtype == wanted.dtype
            np.testing.assert_array_equal(fact, wanted)


def test_every_row_of_four_tokens_by_brute_force():
    """Padding on either side or alone, ids that fall or come back, documents of one token."""
    ids = np.array(list(itertools.product((0, 4, 2, 9), repeat=4)))
    assert Documents.from_segment_ids(ids).document_start.tolist() == [expected_start(row) for row in ids]


@pytest.mark.parametrize("length", LENGTHS)
@given(data=st.data())
def test_segment_ids_cu_seqlens_and_lengths_say_the_same(length, data):
    """The same documents told in three ways, some of them empty, with whatever is left of the row as padding."""
    count = 5
    wanted = data.draw(
        st.lists(st.lists(st.integers(0, length), min_size=count, max_size=count), min_size=2, max_size=2)
    )
    ends = np.minimum(np.cumsum(np.array(wanted, np.int32), axis=1), length)
    cu_seqlens = np.pad(ends, ((0, 0), (1, 0))).astype(np.int32)
    lengths = np.diff(cu_seqlens, axis=1)
    ids = np.zeros((2, length), np.int32)
    for b in range(2):
        for i in range(count):
            ids[b, cu_seqlens[b, i] : cu_seqlens[b, i + 1]] = count - i  # distinct, falling
    expected = [expected_start(row) for row in ids]
    for one in (Documents.from_segment_ids(ids), Documents.from_cu_seqlens(cu_seqlens, length),
                Documents.from_lengths(lengths, length)):  # fmt: skip
        assert one.document_start.tolist() == expected
        assert one.document_start.dtype == jnp.int32
        assert (one.alignment, one.padded, one.shape) == (1, True, (2, length))
    *traced, one_row = starts_of(ids, cu_seqlens, lengths, length)
    assert [starts.tolist() for starts in traced] == [expected] * 3
    assert one_row.tolist() == expected[1:]


def test_cu_seqlens_of_fixed_size_repeats_its_last_value():
    """As a data loader pads it, so that shapes stay: rows 5 to 7 are padding, nothing starts there."""
    for ends, starts in (
        ([0, 3, 5, 5, 5, 5], [0, 0, 0, 3, 3, 6, 7, 8]),
        ([0, 0, 0, 2, 2, 4], [0, 0, 2, 2]),
        ([0], [1, 2, 3]),
        ([0, 0], [1, 2, 3]),
    ):
        run = jax.jit(functools.partial(Documents.from_cu_seqlens, np.array(ends), len(starts)))
        assert run().document_start.tolist() == [starts]


def test_one_length_per_row_is_right_padding():
    documents = Documents.from_lengths(np.array([5, 0, 8, 1]), 8)
    for b, used in enumerate((5, 0, 8, 1)):
        assert documents.document_start[b].tolist() == [0 if t < used else t + 1 for t in range(8)]
    assert (documents.alignment, documents.padded) == (0, True)
    assert Documents.from_lengths(np.array([5]), 8, alignment=4).alignment == 4


def test_unpacked_is_one_document_per_row():
    documents = Documents.unpacked(2, 7)
    ones = Documents.from_segment_ids(np.ones((2, 7), np.int32))
    np.testing.assert_array_equal(documents.document_start, ones.document_start)
    assert documents.positions.tolist() == [list(range(7))] * 2
    assert not documents.is_padding.any()


@pytest.mark.parametrize(
    ("documents", "is_unpacked", "aligned"),
    [
        (Documents.unpacked(2, 8), True, set(EVERYTHING)),
        (Documents.from_lengths(np.array([8, 8]), 8), False, set(EVERYTHING)),
        (Documents.from_segment_ids(np.ones((1, 8), int)), False, {1}),
        (Documents.from_segment_ids(np.ones((1, 8), int), alignment=0), False, set(EVERYTHING)),
        (Documents.from_segment_ids(np.ones((1, 8), int), alignment=6), False, {1, 2, 3, 6}),
        (Documents.from_cu_seqlens(np.array([0, 8]), 8), False, {1}),
        (Documents.from_cu_seqlens(np.array([0, 4, 8]), 8, alignment=4), False, {1, 2, 4}),
        (Documents.from_lengths(np.array([[8]]), 8), False, {1}),
        (Documents.from_lengths(np.array([[4, 4]]), 8, alignment=2), False, {1, 2}),
    ],
)
def test_what_is_statically_known(documents, is_unpacked, aligned):
    """Never read off the values: they could be traced, and the answer would then change."""
    assert documents.is_unpacked is is_unpacked
    assert {m for m in EVERYTHING if documents.is_aligned(m)} == aligned


@pytest.mark.parametrize("alignment", [0, 2, 3, 4])
@given(ids=segment_ids(24))
def test_a_promise_is_accepted_exactly_where_it_holds(alignment, ids):
    """Padding may begin anywhere; documents may not."""
    starts = {s for row in ids for t, s in enumerate(expected_start(row)) if row[t]}
    if all(s % alignment == 0 if alignment else s == 0 for s in starts):
        assert Documents.from_segment_ids(ids, alignment=alignment).alignment == alignment
    else:
        with pytest.raises(ValueError, match=r"^alignment: expected every document to start at"):
            Documents.from_segment_ids(ids, alignment=alignment)


@pytest.mark.parametrize("make", [Documents.from_cu_seqlens, Documents.from_lengths])
def test_a_promise_about_lengths_is_checked_too(make):
    values = np.array([[0, 4, 6]])  # starts 0 and 4 as ends; 0, 0 and 4 as lengths
    assert make(values, 10, alignment=2).alignment == 2
    assert make(values, 10, alignment=4).alignment == 4
    for broken in (3, 8, 0):
        with pytest.raises(ValueError, match=r"^alignment: .* row 4"):
            make(values, 10, alignment=broken)


def test_an_empty_document_cannot_break_a_promise():
    """A repeated last value says nothing about where documents begin, though 5 is no multiple of 4."""
    assert Documents.from_cu_seqlens(np.array([0, 5, 5, 5]), 8, alignment=4).alignment == 4
    assert Documents.from_cu_seqlens(np.array([[0, 5, 5], [0, 0, 8]]), 8, alignment=0).alignment == 0
    assert Documents.from_lengths(np.array([[5, 0, 0]]), 8, alignment=4).alignment == 4


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda v: Documents.from_segment_ids(v), [[1, 1, 2, 0], [0, 3, 3, 3], [0, 0, 0, 0], [1, 2, 1, 2]]),
        (lambda v: Documents.from_cu_seqlens(v, 4), [[0, 1, 2, 4], [0, 0, 0, 0], [0, 3, 3, 3], [0, 0, 4, 4]]),
        (lambda v: Documents.from_lengths(v, 4), [[1, 1, 2, 0], [0, 0, 0, 0], [3, 0, 0, 1], [0, 4, 0, 0]]),
    ],
)
def test_documents_are_data_and_never_retrace(make, values):
    traces = []

    @jax.jit
    def traced(values):
        traces.append(values)
        documents = make(values)
        return documents, documents.positions, documents.is_padding

    for value in values:
        concrete = make(np.array([value], np.int32))
        documents, positions, is_padding = traced(np.array([value], np.int32))
        np.testing.assert_array_equal(documents.document_start, concrete.document_start)
        np.testing.assert_array_equal(positions, concrete.positions)
        np.testing.assert_array_equal(is_padding, concrete.is_padding)
        assert (documents.alignment, documents.padded) == (concrete.alignment, concrete.padded)
    assert len(traces) == 1


def test_a_promise_about_traced_ids_is_taken_as_given():
    documents = jax.jit(lambda ids: Documents.from_segment_ids(ids, alignment=4))(np.array([[1, 1, 2, 2]]))
    assert documents.is_aligned(4)
    assert documents.document_start.tolist() == [[0, 0, 2, 2]]


def test_static_facts_travel_with_the_tree_and_distinguish_it():
    documents = Documents.from_segment_ids(np.array([[1, 1, 2, 2]]), alignment=2)
    leaves, tree = jax.tree.flatten(documents)
    assert len(leaves) == 1
    assert leaves[0] is documents.document_start
    again = jax.tree.unflatten(tree, leaves)
    assert (again.alignment, again.padded) == (2, True)
    assert tree != jax.tree.structure(Documents.from_segment_ids(np.array([[1, 1, 2, 2]])))
    assert jax.tree.structure(Documents.unpacked(1, 4)) != jax.tree.structure(Documents.from_lengths(np.array([4]), 4))

    aligned = jax.jit(lambda documents: jnp.array(documents.is_aligned(2)))
    assert aligned(documents)
    assert not aligned(Documents.from_segment_ids(np.array([[1, 1, 2, 2]])))


def test_documents_pass_through_tree_transformations(unchecked_annotations):
    """A transformation may put anything in place of the data: more axes, fewer, a shape, nothing."""
    ids = np.array([[[1, 1, 0, 2]], [[0, 3, 3, 3]], [[1, 2, 3, 4]]])
    each = [Documents.from_segment_ids(row) for row in ids]
    stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *each)
    expected = np.stack([one.positions for one in each])
    np.testing.assert_array_equal(jax.vmap(lambda documents: documents.positions)(stacked), expected)
    made = jax.vmap(Documents.from_segment_ids)(jnp.asarray(ids))
    np.testing.assert_array_equal(made.document_start, stacked.document_start)
    _, scanned = jax.lax.scan(lambda carry, documents: (carry, documents.positions), 0, stacked)
    np.testing.assert_array_equal(scanned, expected)
    assert jax.eval_shape(lambda: Documents.unpacked(2, 5)).document_start.shape == (2, 5)
    assert jax.tree.map(lambda _: None, each[0]).document_start is None


@pytest.mark.parametrize(("batch", "length"), [(0, 4), (2, 0), (0, 0)])
def test_empty_batches_and_rows(batch, length):
    @jax.jit
    def shapes():
        ids = np.zeros((batch, length), np.int32)
        everything = (
            Documents.unpacked(batch, length),
            Documents.from_segment_ids(ids),
            Documents.from_segment_ids(ids, alignment=0),
            Documents.from_cu_seqlens(np.zeros((batch, 3), np.int32), length, alignment=4),
            *(Documents.from_lengths(np.zeros(each, np.int32), length) for each in ((batch,), (batch, 2), (batch, 0))),
        )
        return [(one, one.positions, one.is_padding) for one in everything]

    for documents, positions, is_padding in shapes():
        assert documents.shape == positions.shape == is_padding.shape == (batch, length)


@pytest.mark.parametrize(
    ("dtype", "x64"),
    [*((dtype, False) for dtype in (np.int8, np.uint8, np.int16, np.uint32, np.int64, np.uint64)), (np.int64, True)],
)
def test_any_integer_dtype_gives_int32(dtype, x64, unchecked_annotations):
    expected = [[0, 0, 3, 3]], [[0, 0, 2, 4]], [[0, 0, 2, 2, 4, 6, 7, 8]]
    for array in (np.asarray, jnp.asarray):
        with jax.enable_x64(x64):
            ids, cu_seqlens = array(np.array([[2, 2, 0, 1]], dtype)), array(np.array([0, 2, 3, 3], dtype))

            @jax.jit
            def made(ids=ids, cu_seqlens=cu_seqlens):
                told = Documents.from_segment_ids(ids), Documents.from_cu_seqlens(cu_seqlens, 4)
                return [(one.document_start, one.positions) for one in (*told, Documents.from_lengths(ids, 8))]

            for (starts, positions), wanted in zip(made(), expected, strict=True):
                assert starts.dtype == positions.dtype == jnp.int32
                assert starts.tolist() == wanted


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_traced_values_beyond_int32_do_not_wrap(dtype, unchecked_annotations):
    """2^32 is not padding, ids that are equal modulo 2^32 are two, and an end beyond the row is its end."""
    many = [1 << 31] * 3
    for make, values, expected in (
        (Documents.from_segment_ids, [[1 << 32, 1 << 32, 1, (1 << 32) + 1, 0, 1 << 31]], [[0, 0, 2, 3, 5, 5]]),
        (lambda a: Documents.from_cu_seqlens(a, 4), [0, 1, (1 << 32) + 2], [[0, 1, 1, 1]]),
        (lambda a: Documents.from_lengths(a, 4), [[1, (1 << 32) + 1]], [[0, 1, 1, 1]]),
        (lambda a: Documents.from_lengths(a, 4), [[1, *many]], [[0, 1, 1, 1]]),  # whose sum wraps to less than 0, too
    ):
        with jax.enable_x64(True):
            assert jax.jit(make)(np.array(values, dtype)).document_start.tolist() == expected


IDS = np.ones((1, 4), np.int32)
NEGATIVE = jnp.asarray(-IDS)


def zeros(**facts) -> Documents:
    return Documents(document_start=jnp.zeros((1, 4), jnp.int32), **facts)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Documents.from_segment_ids(np.ones(4, int)), r"segment_ids: expected rank 2, got shape \(4,\)"),
        (lambda: Documents.from_segment_ids(jnp.ones((1, 4, 1), int)), "segment_ids: expected rank 2, got shape"),
        (lambda: Documents.from_segment_ids(np.ones((1, 4))), "segment_ids: expected integers, got float64"),
        (lambda: Documents.from_segment_ids(jnp.ones((1, 4))), "segment_ids: expected integers, got float32"),
        (lambda: Documents.from_segment_ids(IDS == 1), "segment_ids: expected integers, got bool"),
        (lambda: Documents.from_segment_ids(-IDS), "segment_ids: expected no negative id .*-1"),
        (lambda: Documents.from_segment_ids(NEGATIVE), "segment_ids: expected no negative id .*-1"),
        (lambda: Documents.from_cu_seqlens(np.array(0), 4), "cu_seqlens: expected rank 1 or 2"),
        (lambda: Documents.from_cu_seqlens(np.zeros((1, 1, 2), int), 4), "cu_seqlens: expected rank 1 or 2"),
        (lambda: Documents.from_cu_seqlens(np.array([0.0, 4.0]), 4), "cu_seqlens: expected integers"),
        (lambda: Documents.from_cu_seqlens(np.zeros((1, 0), int), 4), "cu_seqlens: expected at least the leading 0"),
        (lambda: Documents.from_cu_seqlens(np.array([1, 4]), 4), "cu_seqlens: expected 0 as the first value"),
        (lambda: Documents.from_cu_seqlens(np.array([[0, 4], [2, 4]]), 4), "cu_seqlens: expected 0 as the first"),
        (lambda: Documents.from_cu_seqlens(np.array([0, 3, 2]), 4), "cu_seqlens: expected values that never decrease"),
        (lambda: Documents.from_cu_seqlens(np.array([0, 3, 5]), 4), "cu_seqlens: expected an end within the 4 rows"),
        (lambda: Documents.from_lengths(np.array(3), 4), "lengths: expected rank 1 or 2"),
        (lambda: Documents.from_lengths(np.array([True]), 4), "lengths: expected integers, got bool"),
        (lambda: Documents.from_lengths(np.array([3, -1]), 4), "lengths: expected no negative length"),
        (lambda: Documents.from_lengths(np.array([5]), 4), "lengths: expected at most 4 rows in all"),
        (lambda: Documents.from_lengths(np.array([[3, 2]]), 4), "lengths: expected at most 4 rows in all"),
        # Wraps to 3 where the sum is kept in 32 bits.
        (lambda: Documents.from_lengths(np.array([[2**30] * 4 + [3]], np.int32), 4), "lengths: expected at most 4"),
        (lambda: Documents.from_segment_ids([[1, 2, 2, 2]], alignment=2), "alignment: expected every document"),
        (lambda: Documents.from_cu_seqlens([0, 1, 4], 4, alignment=2), "alignment: expected every document"),
        (lambda: Documents.from_lengths([[1, 3]], 4, alignment=2), "alignment: expected every document"),
        (lambda: zeros(alignment=1.5), "alignment: expected an int >= 0, got 1.5"),
        (lambda: zeros(alignment=True), "alignment: expected an int >= 0, got True"),
        (lambda: Documents.from_segment_ids(IDS, alignment=-1), "alignment: expected an int >= 0, got -1"),
        (lambda: Documents.from_cu_seqlens(np.array([0, 4]), 4, alignment=True), "alignment: expected an int >= 0"),
        (lambda: Documents.from_lengths(np.array([4]), 4, alignment=-4), "alignment: expected an int >= 0, got -4"),
    ],
)
@pytest.mark.parametrize("within_a_trace", [False, True])
def test_mistakes_are_named(call, message, within_a_trace, unchecked_annotations):
    """Within a trace too: a constant of a jitted function is as concrete there as outside."""
    with pytest.raises(ValueError, match=f"^{message}"):
        jax.jit(call)() if within_a_trace else call()


@pytest.mark.parametrize("value", [2**31, 2**32 + 1, -(2**31) - 1, -(2**32) + 1])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda v: Documents.from_segment_ids(np.array([[1, v]])), "segment_ids"),
        (lambda v: Documents.from_cu_seqlens(np.array([0, v]), 4), "cu_seqlens"),
        (lambda v: Documents.from_lengths(np.array([v]), 4), "lengths"),
    ],
)
def test_values_beyond_int32_are_refused_on_either_side(make, name, value):
    """Some of these wrap around to 1, which would look like a good value."""
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        make(value)
