"""What `Documents` and `Visibility` take from users, and that JAX may take them apart and rebuild them as it likes."""

# pyright: reportArgumentType=false, reportCallIssue=false
# What a checker of types would refuse is the point.

import copy
import dataclasses
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from foveal import Documents, Visibility, WindowLayout, core_attention, explain, pack_documents, select_entries
from foveal.geometry import EntryRange, as_documents, as_visibility, documents

pytestmark = pytest.mark.usefixtures("unchecked_annotations")

S = 4
IDS = np.array([[1, 1, 2, 2, 2, 0, 3, 3], [5, 5, 5, 5, 5, 5, 5, 5]])


@pytest.fixture
def fetches(monkeypatch) -> list[object]:
    """The arrays whose values were fetched to be looked at."""
    fetched = []
    monkeypatch.setattr(documents, "on_host", lambda array: (fetched.append(array), np.asarray(array))[1])
    return fetched


def accepted(starts, **facts) -> bool:
    try:
        Documents(document_start=starts, **facts)
    except ValueError as error:
        return "document_start: expected " not in str(error)
    return True


def test_starts_are_taken_if_and_only_if_some_segment_ids_have_them():
    ids = np.array(list(itertools.product(range(S + 1), repeat=S)))
    lawful = {tuple(row) for row in np.asarray(Documents.from_segment_ids(ids).document_start).tolist()}
    for row in itertools.product(range(-1, S + 2), repeat=S):
        assert accepted(np.array([row])) == (row in lawful), row


@pytest.mark.parametrize("shape", [(), (1, 1)])
def test_starts_of_a_longer_rows_rows_are_taken_if_and_only_if_some_segment_ids_have_them(shape):
    first, size = 2, 3
    ids = np.array(list(itertools.product(range(4), repeat=first + size)))
    whole = np.asarray(Documents.from_segment_ids(ids).document_start)[:, first:]
    lawful = {tuple(row) for row in whole.tolist()}
    assert tuple(Documents.continuing([first], [2], size).document_start[0].tolist()) in lawful
    for row in itertools.product(range(-1, first + size + 2), repeat=size):
        assert accepted(np.array([row]), first_row=np.full(shape, first)) == (row in lawful), row


def test_a_first_row_in_any_form():
    for starts, first in ([[0, 0]], [[3]]), (np.zeros((1, 2), int), 3), (jnp.zeros((1, 2), int), jnp.int32(3)):
        assert np.asarray(Documents(document_start=starts, first_row=first).positions).tolist() == [[3, 4]]
    struct = jax.ShapeDtypeStruct
    made = Documents(document_start=struct((1, 2), jnp.int32), first_row=struct((1, 1), jnp.int32))
    assert jax.eval_shape(lambda made: made.positions, made).shape == (1, 2)
    rebuilt = jax.tree.unflatten(jax.tree.structure(made), [jnp.zeros((1, 2), jnp.int32), jnp.zeros(2, jnp.int32)])
    with pytest.raises(ValueError, match=r"^documents: expected a first_row of int32, a scalar or \[B, 1\], got"):
        Visibility(rebuilt, 3)


@pytest.mark.parametrize("first", [[1, 2], np.zeros((2, 1, 1), int), np.zeros((3, 1), int), 0.5, np.zeros((2, 8), int)])
def test_a_first_row_that_is_none(first):
    with pytest.raises(ValueError, match=r"^first_row: expected"):
        Documents(document_start=np.zeros((2, 8), int), first_row=first)


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_no_rows_break_no_law(batch):
    assert accepted(np.zeros((batch, 0), np.int32))
    assert accepted(np.zeros((batch, 0), np.int32), first_row=3)


def test_one_unlawful_row_is_found_among_many():
    starts = np.zeros((100, 300), np.int64)
    starts[70, 200] = 3
    with pytest.raises(
        ValueError, match=r"^document_start: expected t where .*, got 3 at \(70, 200\); segment ids go to"
    ):
        Documents(document_start=starts)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"padded": False}, "padded: expected True where there are padding rows, got 6 at"),
        (
            {"alignment": 4},
            "alignment: expected every document to start at a multiple of 4, got one that starts at row",
        ),
        (
            {"alignment": 0},
            "alignment: expected every document to start at a multiple of 0, got one that starts at row",
        ),
    ],
)
def test_promises_are_held_against_the_starts(facts, message):
    starts = Documents.from_segment_ids(IDS).document_start
    with pytest.raises(ValueError, match=f"^{message}"):
        Documents(document_start=starts, **facts)
    assert Documents(document_start=starts, alignment=np.int64(2)).alignment == 2


@pytest.mark.parametrize("traced", [False, True])
def test_segment_ids_are_no_document_starts(traced):
    """Some would pass for them, and traced ones cannot be looked at: so the field goes by its name."""
    lookalike = np.array([[1, 1, 2, 2]])
    assert accepted(lookalike)

    def make(ids):
        return Documents(ids).document_start

    with pytest.raises(ValueError, match=r"^document_start: expected a keyword arg.*Documents\.from_segment_ids"):
        (jax.jit(make) if traced else make)(lookalike)


@pytest.mark.parametrize("starts", [np.zeros((1, 4), np.int8), np.zeros((1, 4), np.int64), [[0, 0, 0, 0]]])
def test_starts_of_any_integers_become_int32(starts):
    made = Documents(document_start=starts)
    assert isinstance(made.document_start, jax.Array)
    assert made.document_start.dtype == jnp.int32
    assert made.positions.tolist() == [[0, 1, 2, 3]]


MAKERS = [
    lambda: Documents.from_segment_ids(IDS),
    lambda: Documents.unpacked(2, 8),
    lambda: Documents.continuing([3, 9], [2, 8], 8),
    lambda: Visibility(Documents.from_segment_ids(IDS), 3, 2),
    lambda: Visibility.continuing(Documents.continuing([3, 9], [2, 8], 8), 3, EntryRange.of_rows(2, 20)),
]


@pytest.mark.parametrize("make", MAKERS)
def test_jax_rebuilds_what_it_likes(make):
    made = make()
    leaves, tree = jax.tree.flatten(made)
    for placeholder in (None, object(), "x", 3.0, np.zeros((7, 2, 8)), jax.ShapeDtypeStruct((1,), bool)):
        jax.tree.unflatten(tree, [placeholder] * len(leaves))
    assert jax.tree.leaves(jax.tree.map(lambda _: 1, made)) == [1] * len(leaves)
    assert str(jax.tree_util.tree_leaves_with_path(made)[0][0]).count("document_start") == 1
    stacked = jax.vmap(lambda one: jax.tree.map(lambda a: a + 0, one))(jax.tree.map(lambda a: jnp.stack([a, a]), made))
    shaped = jax.eval_shape(lambda: made)
    for other in (jax.jit(lambda x: x)(made), jax.device_put(made), jax.tree.map(lambda a: a[0], stacked), shaped):
        assert type(other) is type(made)
        assert jax.tree.structure(other) == tree
        assert jax.tree.leaves(other)[0].shape == leaves[0].shape
    assert jax.tree.leaves(stacked)[0].shape == (2, *leaves[0].shape)


@pytest.mark.parametrize("make", MAKERS)
def test_copies_are_whole(make):
    made = make()
    for other in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made)), dataclasses.replace(made)):
        assert jax.tree.structure(other) == jax.tree.structure(made)
        np.testing.assert_array_equal(jax.tree.leaves(other)[0], jax.tree.leaves(made)[0])


def test_rebuilt_documents_trace_nothing_anew():
    traces = []
    count = jax.jit(lambda d: (traces.append(0), d.positions)[1])
    made = Documents.from_segment_ids(IDS)
    for other in (made, jax.device_put(made), Documents(document_start=made.document_start)):
        count(other)
    assert len(traces) == 1


def unlawful() -> Documents:
    return jax.tree.map(lambda a: a.at[1, 3].set(2), Documents.from_segment_ids(IDS))


def test_unlawful_documents_are_refused_by_every_op():
    sight = jax.tree.unflatten(
        jax.tree.structure(Visibility(Documents.unpacked(2, 8), 3, 2)), [unlawful().document_start]
    )
    q, kv, entries = jnp.zeros((2, 8, 1, 4)), jnp.zeros((2, 8, 4)), jnp.zeros((2, 4, 4))
    calls = [
        lambda: core_attention(q, kv, entries, visibility=sight),
        lambda: explain(q, kv, entries, visibility=sight),
        lambda: select_entries(q, q[..., 0], entries, visibility=sight, top_k=1),
        lambda: Visibility(unlawful(), 3),
        lambda: WindowLayout.of(unlawful(), 2),
        lambda: jax.eval_shape(lambda q: core_attention(q, kv, entries, visibility=sight), q),  # only q is traced
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"^document_start: expected t where .*, got 2 at \(1, 3\)"):
            call()


def test_documents_of_other_axes_are_refused_by_every_op():
    stacked = jax.vmap(Documents.from_segment_ids)(jnp.asarray(IDS[None]))
    with pytest.raises(
        ValueError, match=r"^documents: expected a document_start of int32 \[B, S\], got .* \(1, 2, 8\)"
    ):
        Visibility(stacked, 3)


def test_values_are_looked_at_once_and_not_where_the_library_made_them(fetches):
    made = [Documents.unpacked(2, 8), Documents.from_lengths([4, 8], 8), Documents.continuing([3, 1], [1, 2], 8)]
    made += [Documents.from_segment_ids(IDS), Documents.from_cu_seqlens([0, 4], 8), Documents(document_start=[[0, 0]])]
    made += [pack_documents([np.zeros(3), np.zeros(2)], 8).documents]
    for one in made:
        as_documents("documents", one)
    assert not fetches
    moved = jax.device_put(made[0])
    for _ in range(3):
        as_visibility(Visibility(moved, 3))
    assert len(fetches) == 1


@pytest.mark.parametrize("value", [IDS, IDS > 0, 3, None, "packed", WindowLayout.of(Documents.unpacked(1, 4), 2)])
def test_what_is_no_visibility_is_refused_at_once(value):
    with pytest.raises(ValueError, match=r"^documents: expected Documents, got .*from_segment_ids$"):
        Visibility(value, 3, 2)
    with pytest.raises(ValueError, match=r"^documents: expected Documents, got 3; "):
        Visibility(3, Documents.unpacked(1, 4))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"^visibility: expected a Visibility, got "):
        as_visibility(value)


def test_numbers_become_plain_ints():
    entries = EntryRange.of_rows(np.int8(2), np.uint8(7))
    sight = Visibility(Documents.unpacked(1, 4), np.int64(3), entries=entries, history=np.int32(1))
    facts = (sight.sliding_window, sight.compress_ratio, sight.history, sight.slots)
    assert facts == (3, 2, 1, 7)
    assert {type(fact) for fact in facts} == {int}


@pytest.mark.parametrize("listed", [list, tuple, np.asarray, jnp.asarray])
def test_lists_do_where_integers_are_few(listed):
    expected = [[0, 0, 2, 2, 5, 6, 7, 8]]
    for made in (
        Documents.from_lengths([listed([2, 2])] if listed in (list, tuple) else listed([[2, 2]]), 8),
        Documents.from_cu_seqlens(listed([0, 2, 4]), 8),
        Documents.from_segment_ids(listed([[1, 1, 2, 2, 0, 0, 0, 0]])),
    ):
        assert made.document_start.tolist() == expected
    assert Documents.from_lengths(listed([3, 8]), 8).alignment == 0
    continuing = Documents.continuing(listed([3, 0]), listed([2, 1]), 2)
    assert continuing.document_start.tolist() == [[0, 0], [0, 2]]
    np.testing.assert_array_equal(np.asarray(continuing.first_row), [[3], [0]])
