"""Which rows form which entry: by brute force over documents and windows, gathered, reshaped and sharded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foveal.geometry import Documents, WindowLayout
from foveal.testing.generators import distinct_values, random_segment_ids
from tests.support.documents import documents_in, documents_of, segment_ids


def windows_of(row: np.ndarray, ratio: int) -> dict[int, tuple[int, int]]:
    """slot -> (first row, position in its document) of every complete window; no two want the same slot."""
    windows: dict[int, tuple[int, int]] = {}
    for begin, end in documents_of(row):
        for position in range(0, end - begin - ratio + 1, ratio):
            slot = (begin + position) // ratio
            assert slot not in windows, "two windows in one slot"
            assert slot < len(row) // ratio, "more slots than S // m"
            windows[slot] = (begin + position, position)
    return windows


@functools.partial(jax.jit, static_argnums=(2, 3))
def _layout_and_gathers(ids, rows, ratio, alignment):
    layout = WindowLayout.of(Documents.from_segment_ids(ids, alignment=alignment), ratio)
    told = {name: getattr(layout, name) for name in ("start", "valid", "positions", "has_previous")}
    gathered = {
        "own": layout.gather(rows),
        "at_start": layout.at_start(rows),
        "previous": layout.gather(rows, shift=-1),
    }
    return told | gathered


@functools.partial(jax.jit, static_argnums=1)
def layout_in(documents, ratio):
    """A layout and which of its windows have one before them, by one compiled program."""
    layout = WindowLayout.of(documents, ratio)
    return layout, layout.has_previous


def check_windows(ids: np.ndarray, ratio: int, alignment: int) -> None:
    """Hold what a layout says, and its windows of rows in which no value occurs twice, against `windows_of`."""
    rows = distinct_values((*ids.shape, 2), seed=1)
    told = jax.tree.map(np.asarray, _layout_and_gathers(ids, rows, ratio, alignment))
    batch, length = ids.shape
    slots = length // ratio
    valid, positions, first = np.zeros((batch, slots), bool), *np.zeros((2, batch, slots), np.int32)
    for b, row in enumerate(ids):
        for c, window in windows_of(row, ratio).items():
            valid[b, c] = True
            first[b, c], positions[b, c] = window
    for name, expected in (("valid", valid), ("positions", positions), ("has_previous", positions > 0)):
        assert told[name].dtype == expected.dtype
        np.testing.assert_array_equal(told[name], expected, err_msg=name)
    assert (told["start"].shape, told["start"].dtype) == ((batch, slots), np.int32)
    assert told["own"].shape == told["previous"].shape == (batch, slots, ratio, 2)
    np.testing.assert_array_equal(told["start"][valid], first[valid])
    b, of_window = np.nonzero(valid)[0][:, None], first[valid][:, None] + np.arange(ratio)
    np.testing.assert_array_equal(told["own"][valid], rows[b, of_window])
    np.testing.assert_array_equal(told["at_start"][valid], rows[b, of_window][:, 0])
    later = positions[valid] > 0
    np.testing.assert_array_equal(told["previous"][positions > 0], rows[b, of_window - ratio][later])
    # Elsewhere arbitrary, but never out of range and never made up (NaN from a gather beyond the end, say).
    assert ((told["start"] >= 0) & (told["start"] < length)).all()
    for name in ("own", "previous", "at_start"):
        assert np.isin(told[name], rows).all(), name


# 24 is a multiple of every ratio, 26 of neither 4 nor 8, and 7 is shorter than a window of 8.
SHAPES = [*((length, ratio) for length in (7, 24) for ratio in (1, 2, 3, 4, 8)), (26, 4), (26, 8)]


@pytest.mark.parametrize(
    ("length", "ratio", "alignment"), [(*shape, alignment) for shape in SHAPES for alignment in sorted({1, shape[1]})]
)
@given(data=st.data())
def test_windows_by_brute_force(length, ratio, alignment, data):
    """A promised alignment makes them a reshape: it changes how windows are read, never which they are."""
    check_windows(data.draw(segment_ids(length, multiple=alignment)), ratio, alignment)


@pytest.mark.parametrize("ratio", [4, 128])
def test_windows_at_lengths_of_use(ratio):
    ids = random_segment_ids(3, 2, 2100, max_document=700)
    assert sum(len(windows_of(row, ratio)) for row in ids) > 2
    check_windows(ids, ratio, alignment=1)


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 8])
def test_unpacked_rows_are_complete(ratio):
    layout, has_previous = layout_in(Documents.unpacked(2, 26), ratio)
    assert layout.contiguous
    assert layout.complete
    assert layout.valid.all()
    expected = [[c * ratio for c in range(26 // ratio)]] * 2
    assert layout.start.tolist() == layout.positions.tolist() == expected
    assert has_previous.tolist() == [[c > 0 for c in range(26 // ratio)]] * 2


@pytest.mark.parametrize(
    ("documents", "contiguous", "complete"),
    [
        (Documents.unpacked(1, 12), True, True),
        (Documents.from_lengths(np.array([12]), 12), True, False),
        (Documents.from_cu_seqlens(np.array([0, 12]), 12), False, False),
        (Documents.from_segment_ids(np.ones((1, 12), int)), False, False),
        (Documents.from_segment_ids(np.ones((1, 12), int), alignment=3), True, False),
        (Documents.from_segment_ids(np.ones((1, 12), int), alignment=6), True, False),
        (Documents.from_segment_ids(np.ones((1, 12), int), alignment=4), False, False),
        (Documents.from_segment_ids(np.ones((1, 12), int), alignment=2), False, False),
    ],
)
def test_what_is_statically_known(documents, contiguous, complete):
    layout, _ = layout_in(documents, 3)
    assert (layout.contiguous, layout.complete, layout.ratio) == (contiguous, complete, 3)
    assert layout.valid.tolist() == [[True] * 4]


@pytest.mark.parametrize("alignment", [0, 1])
@pytest.mark.parametrize(("batch", "length", "ratio"), [(0, 8, 4), (2, 0, 4), (0, 0, 1), (2, 3, 4), (1, 1, 128)])
def test_empty_batches_and_rows_shorter_than_a_window(batch, length, ratio, alignment):
    ids, rows = np.ones((batch, length), np.int32), np.ones((batch, length, 5), np.float32)
    told = _layout_and_gathers(ids, rows, ratio, alignment)
    shape = (batch, length // ratio)
    assert {told[name].shape for name in ("start", "valid", "positions", "has_previous")} == {shape}
    assert told["own"].shape == told["previous"].shape == (*shape, ratio, 5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.int32, bool])
@pytest.mark.parametrize("alignment", [0, 1])
def test_gather_keeps_the_dtype(dtype, alignment):
    layout, _ = layout_in(documents_in(np.ones((1, 8), int), alignment=alignment), 4)
    assert jax.eval_shape(lambda rows: layout.gather(rows, shift=-1), jnp.ones((1, 8, 3), dtype)).dtype == dtype


@pytest.mark.parametrize("alignment", [1, 4])
def test_gather_sends_gradients_back_to_the_rows_it_took(alignment):
    """Each row is in at most one window, so its gradient is that window's and nothing else's."""
    ids = np.array([[3, 3, 3, 3, 3, 0, 0, 0, 6, 6, 6, 6, 0]], np.int32)
    layout, _ = layout_in(documents_in(ids, alignment=alignment), 4)
    weights = distinct_values((1, 3, 4, 2), seed=2)

    def loss(rows):
        return jnp.where(layout.valid[:, :, None, None], layout.gather(rows) * weights, 0.0).sum()

    expected = np.zeros((1, 13, 2), np.float32)
    expected[0, 0:4], expected[0, 8:12] = weights[0, 0], weights[0, 2]
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(jnp.ones((1, 13, 2))), expected)


def test_documents_are_data_and_never_retrace():
    traces = []

    @jax.jit
    def traced(ids):
        traces.append(ids)
        return WindowLayout.of(Documents.from_segment_ids(ids), 4)

    for seed in range(4):
        ids = random_segment_ids(seed, 2, 24, max_document=12)
        got, (concrete, _) = traced(ids), layout_in(documents_in(ids), 4)
        assert jax.tree.structure(got) == jax.tree.structure(concrete)
        for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(concrete), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert len(traces) == 1


def test_layouts_pass_through_tree_transformations(unchecked_annotations):
    ids = np.stack([random_segment_ids(seed, 2, 24, max_document=12) for seed in range(3)])
    rows = distinct_values((3, 2, 24, 2), seed=4)
    layouts = jax.jit(jax.vmap(lambda ids: WindowLayout.of(Documents.from_segment_ids(ids), 4)))(ids)
    gathered = jax.jit(jax.vmap(lambda layout, rows: layout.gather(rows)))(layouts, rows)
    assert (layouts.ratio, layouts.contiguous, layouts.complete) == (4, False, False)
    for i in range(3):
        alone, _ = layout_in(documents_in(ids[i]), 4)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x, i=i: x[i], layouts), alone)
        np.testing.assert_array_equal(gathered[i], _layout_and_gathers(ids[i], rows[i], 4, 1)["own"])
    assert len(jax.tree.leaves(layouts)) == 3
    assert jax.tree.structure(layouts) != jax.tree.structure(WindowLayout.of(Documents.unpacked(2, 24), 4))


@pytest.mark.parametrize("ratio", [0, -4, True, 1.5, "4"])
def test_a_bad_ratio_is_named(ratio, unchecked_annotations):
    with pytest.raises(ValueError, match=f"^ratio: expected an int >= 1, got {ratio!r}"):
        WindowLayout.of(Documents.unpacked(1, 8), ratio)
