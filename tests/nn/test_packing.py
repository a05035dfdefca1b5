"""Packed rows: every document comes out as if it were alone, and nobody sees what is not theirs, to the last bit.

Whether a document alone comes out right is checked in test_attention.py.
"""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foveal import Documents, LayerType, pack_documents
from foveal.testing.generators import random_segment_ids
from foveal.testing.numerics import assert_close, assert_gradients_close
from tests.nn.layers import CONFIG, compiled_reference, document_runs, every_layer_type, problem, pure_layer

# Padding on the left, on the right and in between; an id that comes back; documents shorter than every window, of a
# whole number of windows and not, starting in every phase.
LAYOUT = np.array(
    [
        [0] * 3 + [4] * 19 + [2] * 2 + [0] + [2] * 17 + [7] * 8 + [1] * 1 + [3] * 7 + [0] * 9,
        [5] * 1 + [1] * 33 + [5] * 3 + [0] * 6 + [5] * 24,
    ]
)


def alone(layer, params, x, cotangent, runs):
    """Every document at the front of an empty row, two at a time: outputs and gradients, as of the packed rows."""
    output, x_gradient = np.zeros(x.shape), np.zeros(x.shape)
    total = {name: np.zeros(np.shape(value)) for name, value in params.items()}
    for pair in (runs[i : i + 2] for i in range(0, len(runs), 2)):
        rows, ids = np.zeros((2, *x.shape), np.float32), np.zeros(x.shape[:2], np.int32)
        for row, (b, start, stop) in enumerate(pair):
            rows[:, row, : stop - start] = x[b, start:stop], cotangent[b, start:stop]
            ids[row, : stop - start] = 1
        out, gradients = layer.vjp(params, rows[0], ids, rows[1])
        for row, (b, start, stop) in enumerate(pair):
            output[b, start:stop] = out[row, : stop - start]
            x_gradient[b, start:stop] = gradients["x"][row, : stop - start]
        total = {name: total[name] + gradients[name] for name in params}
    return output, {**total, "x": x_gradient}


@every_layer_type
@settings(max_examples=6)
@given(layout=st.none() | st.integers(0, 2**20), padding=st.booleans(), seed=st.integers(0, 2**20))
def test_packed_is_every_document_alone(layer_type, layout, padding, seed):
    ids = LAYOUT if layout is None else random_segment_ids(layout, *LAYOUT.shape, max_document=40, padding=padding)
    layer, (params, x, cotangent) = pure_layer(layer_type), problem(layer_type, seed)
    cotangent = np.where(ids[:, :, None] == 0, 0, cotangent)
    want, want_gradients = alone(layer, params, x, cotangent, document_runs(x, ids))
    output, gradients = layer.vjp(params, x, ids, cotangent)
    assert_close(output, want, np.float32)
    assert_gradients_close(gradients, want_gradients, np.float32)
    np.testing.assert_array_equal(output[ids == 0], 0.0)


def first_of_a_row(layer, params, x):
    """Outputs [T, E] of x [1, T, E] at the front of a row without segment ids; what follows is not seen."""
    rows = np.full((2, 67, CONFIG.hidden_size), 2.0, np.float32)
    rows[0, : x.shape[1]] = x[0]
    return layer.vjp(params, rows, None, np.zeros_like(rows))[0][0, : x.shape[1]]


@every_layer_type
@pytest.mark.parametrize(("filler", "filler_id"), [(3.0, 9), (np.nan, 0)], ids=["documents", "padding"])
def test_a_document_in_a_row_is_the_unpacked_row(layer_type, filler, filler_id):
    """The two code paths, with segment ids and without, in every phase of the windows.

    Padding, whole windows of it or not, shifts neither windows nor positions, whatever it holds.
    """
    params, x, cotangent = problem(layer_type, 1)
    layer, length = pure_layer(layer_type), 21
    want = layer.vjp(params, x, None, cotangent)[0][0, :length]  # what follows is not seen
    for starts in ((0, 1), (2, 3), (4, 5), (6, 7), (8, 13), (46, 0)):
        rows, ids = np.full(x.shape, filler, np.float32), np.full(x.shape[:2], filler_id, np.int32)
        for row, start in enumerate(starts):
            rows[row, start : start + length], ids[row, start : start + length] = x[0, :length], 6
        got, _ = layer.vjp(params, rows, ids, cotangent)
        for row, start in enumerate(starts):
            assert_close(got[row, start : start + length], want, np.float32)
        np.testing.assert_array_equal(got[ids == 0], 0.0)


@every_layer_type
def test_no_bit_of_another_document_moves(layer_type):
    """Whatever one document holds, NaN and infinity included. Finite changes leave the others' gradients alone too."""
    params, x, cotangent = problem(layer_type, 2)
    layer = pure_layer(layer_type)
    output, gradients = layer.vjp(params, x, LAYOUT, cotangent)
    for b, start, stop in document_runs(x, LAYOUT):
        others = np.ones(LAYOUT.shape, bool)
        others[b, start:stop] = False
        for value in (np.nan, np.inf, -np.inf, 1e4):
            changed = x.copy()
            changed[b, start:stop] = value * x[b, start:stop][::-1]
            moved, moved_gradients = layer.vjp(params, changed, LAYOUT, cotangent)
            np.testing.assert_array_equal(moved[others], output[others])
            assert not np.array_equal(moved[b, start:stop], output[b, start:stop])
            if value == 1e4:
                np.testing.assert_array_equal(moved_gradients["x"][others], gradients["x"][others])


@every_layer_type
def test_padding_may_hold_anything(layer_type):
    """Padding rows come out zero, get no gradient, and neither they nor their cotangents reach any other gradient."""
    params, x, cotangent = problem(layer_type, 3)
    layer, padding = pure_layer(layer_type), LAYOUT == 0
    output, gradients = layer.vjp(params, x, LAYOUT, cotangent)
    assert np.all(np.any(output != 0, axis=-1) == ~padding)
    np.testing.assert_array_equal(gradients["x"][padding], 0.0)
    for value in (0.0, 1e30, np.inf, np.nan):
        other_x, other_cotangent = x.copy(), cotangent.copy()
        other_x[padding], other_cotangent[padding] = value, 7.0
        got, got_gradients = layer.vjp(params, other_x, LAYOUT, other_cotangent)
        np.testing.assert_array_equal(got, output)
        for name, gradient in gradients.items():
            np.testing.assert_array_equal(got_gradients[name], gradient, err_msg=name)


@every_layer_type
def test_rows_of_nothing_but_padding(layer_type):
    params, x, cotangent = problem(layer_type, 4)
    output, gradients = pure_layer(layer_type).vjp(params, np.full_like(x, np.nan), np.zeros_like(LAYOUT), cotangent)
    np.testing.assert_array_equal(output, 0.0)
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, 0.0, err_msg=name)


@every_layer_type
def test_everything_restarts_with_the_document(layer_type):
    """After k tokens of another document as at row 0: position, bias slot, previous window, window phase."""
    params, x, cotangent = problem(layer_type, 5)
    layer, length = pure_layer(layer_type), 40
    document, document_cotangent = x[0, :length], cotangent[0, :length]

    def run(k, before):
        row, row_cotangent = np.stack([np.concatenate([before[:k], document, x[1, : 27 - k]])] * 2), np.zeros_like(x)
        row_cotangent[1, k : k + length] = document_cotangent
        ids = np.tile([1] * k + [2] * length + [3] * (27 - k), (2, 1))
        output, gradients = layer.vjp(params, row, ids, row_cotangent)
        x_gradient = gradients.pop("x")
        assert np.count_nonzero(np.any(x_gradient != 0, axis=-1)) == length
        return output[1, k : k + length], {**gradients, "x": x_gradient[1, k : k + length]}

    want, want_gradients = run(0, x[1])
    for k in (*range(1, 10), 27):
        got, got_gradients = run(k, x[1])
        assert_close(got, want, np.float32)
        assert_gradients_close(got_gradients, want_gradients, np.float32)


@every_layer_type
def test_batch_rows_do_not_know_each_other(layer_type):
    """Permuted rows come out permuted; a row with no history is the same beside a row with history and beside none."""
    params, x, cotangent = problem(layer_type, 6)
    layer = pure_layer(layer_type)
    output, gradients = layer.vjp(params, x, LAYOUT, cotangent)
    swapped, swapped_gradients = layer.vjp(params, x[::-1], LAYOUT[::-1], cotangent[::-1])
    assert_close(swapped[::-1], output, np.float32)
    assert_gradients_close({**swapped_gradients, "x": swapped_gradients["x"][::-1]}, gradients, np.float32)

    short = np.array([[1] * 3 + [0] * 64] * 2)
    beside_short, _ = layer.vjp(params, x, short, cotangent)
    for row in (np.ones(67, int), np.zeros(67, int), LAYOUT[1]):
        beside, _ = layer.vjp(params, x, np.stack([short[0], row]), cotangent)
        np.testing.assert_array_equal(beside[0], beside_short[0])


@functools.cache
def prepared_otherwise():
    """Documents not made of segment ids, of which they know more, beside those segment ids."""
    packed = pack_documents([np.ones(n) for n in (3, 17, 8, 20, 40, 11)], 67, align=8)
    assert packed.segment_ids.shape == LAYOUT.shape
    assert packed.documents.alignment == 8
    right = np.arange(67)[None] < np.array([[67], [30], [1], [0]])
    cumulative = np.repeat([[1, 2, 3, 4, 0]], np.diff((0, 6, 18, 21, 60, 67)), axis=1)
    return {
        "whole windows apart": (packed.documents, packed.segment_ids),
        "one a row, by length": (Documents.from_lengths(np.array([67, 30]), 67), right[:2].astype(np.int32)),
        "one a row, by no length": (Documents.from_lengths(np.array([1, 0]), 67), right[2:].astype(np.int32)),
        "one packed row": (Documents.from_cu_seqlens(np.array((0, 6, 18, 21, 60)), 67), cumulative),
    }


@every_layer_type
@pytest.mark.parametrize(
    "case", ["whole windows apart", "one a row, by length", "one a row, by no length", "one packed row"]
)
def test_what_documents_promise_changes_nothing(layer_type, case):
    """With a promise that allows other code (starts at multiples of 8, or at row 0) and without it."""
    documents, ids = prepared_otherwise()[case]
    params, x, cotangent = problem(layer_type, 7)
    layer, batch = pure_layer(layer_type), len(ids)
    want, want_gradients = layer.vjp(params, x, np.concatenate([ids, np.zeros_like(ids)])[:2], cotangent)
    assert documents.shape == ids.shape
    poisoned = np.where(ids[:, :, None] == 0, np.nan, x[:batch])
    got, got_gradients = layer.vjp(params, poisoned, documents, cotangent[:batch])
    want_gradients["x"] = want_gradients["x"][:batch]
    assert_close(got, want[:batch], np.float32)
    assert_gradients_close(got_gradients, want_gradients, np.float32)


# ---------------------------------------------------------------------------------------------------------- causality


def moved_by_edits(run, x):
    """bool [B, S, S]: whether output t of `run` moves when token s is edited, one token after the other."""
    output, moved = run(x), []
    for s in range(x.shape[1]):
        edited = x.copy()
        edited[:, s] = -2 * x[:, s]
        moved.append(np.any(run(edited) != output, axis=-1))
    return np.stack(moved, axis=-1)


@every_layer_type
@pytest.mark.parametrize("packed", [True, False])
def test_no_output_before_an_edit_moves(layer_type, packed):
    params, x, cotangent = problem(layer_type, 9)
    layer, ids = pure_layer(layer_type), LAYOUT if packed else None
    moved = moved_by_edits(lambda x: layer.vjp(params, x, ids, cotangent)[0], x)  # a program that is there
    assert not np.triu(moved, 1).any()
    np.testing.assert_array_equal(np.diagonal(moved, axis1=1, axis2=2), LAYOUT != 0 if packed else True)


def dependence(ids, runs, layer_type, window):
    """bool [B, S, S] by brute force: output t depends on token s, raw or inside an entry, every entry being in use."""
    depends = np.zeros((*ids.shape, ids.shape[1]), bool)
    ratio = CONFIG.compress_ratio(layer_type)
    for b, start, stop in runs:
        for t in range(start, stop):
            depends[b, t, max(start, t - window + 1) : t + 1] = True
            for first in range(start, t + 2 - ratio, ratio) if ratio else ():
                oldest = max(start, first - ratio) if layer_type == LayerType.CSA else first
                depends[b, t, oldest : first + ratio] = True
    return depends


@every_layer_type
@pytest.mark.parametrize("packed", [True, False])
def test_outputs_depend_on_what_they_see_and_on_nothing_else(layer_type, packed):
    """Edits one token after the other. The window is short, so that most of an entry is seen through it alone: from the
    window's last token on, and not one token sooner or later.
    """
    params, x, _ = problem(layer_type, 10)
    layer, ids = pure_layer(layer_type, select="all", sliding_window=2), LAYOUT if packed else None
    expected = dependence(LAYOUT, document_runs(x, ids), layer_type, window=2)
    np.testing.assert_array_equal(moved_by_edits(lambda x: layer.forward(params, x, ids), x), expected)


@every_layer_type
@pytest.mark.parametrize("size", [1e15, 1e20])
def test_huge_hidden_states_come_out_right_or_as_nan(layer_type, size):
    """Of 1e15 a norm's squares fit float32; of 1e20 they do not, and zeros would look like an answer.

    The other document does not notice, to the last bit.
    """
    layer, (params, x, cotangent) = pure_layer(layer_type), problem(layer_type, 3)
    ids = np.repeat([[1, 2]] * len(x), [20, x.shape[1] - 20], axis=1)
    huge = x.copy()
    huge[:, :20] *= np.float32(size)
    out, beside = (layer.vjp(params, rows, ids, cotangent)[0] for rows in (huge, x))
    np.testing.assert_array_equal(out[:, 20:], beside[:, 20:])
    if size > 1e19:
        assert np.isnan(out[:, :20]).all()
    else:
        expected = compiled_reference(layer_type).vjp(params, huge, ids, cotangent)[0]
        assert_close(out, expected, np.float32)
