"""Packed rows: every document comes out as if it were alone, and nobody sees what is not theirs, to the last bit.

Whether a document alone comes out right is checked in test_attention.py.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foveal import AttentionConfig, Documents, LayerType, pack_documents
from foveal.testing.generators import random_segment_ids
from foveal.testing.numerics import assert_close, assert_gradients_close

CONFIG = AttentionConfig.tiny()
LAYER_TYPES = tuple(LayerType)
# Padding on the left, on the right and in between; an id that comes back; documents shorter than every window, of a
# whole number of windows and not, starting in every phase.
LAYOUT = np.array(
    [
        [0] * 3 + [4] * 19 + [2] * 2 + [0] + [2] * 17 + [7] * 8 + [1] * 1 + [3] * 7 + [0] * 9,
        [5] * 1 + [1] * 33 + [5] * 3 + [0] * 6 + [5] * 24,
    ]
)


def every_layer_type(test):
    return pytest.mark.parametrize("layer_type", LAYER_TYPES)(test)


def layouts(max_document=40):
    return st.builds(
        lambda seed, padding: random_segment_ids(seed, *LAYOUT.shape, max_document=max_document, padding=padding),
        st.integers(0, 2**20),
        st.booleans(),
    )


def alone(layer, params, x, cotangent, runs):
    """Every document at the front of an empty row, two at a time: outputs, x gradients, summed parameter gradients."""
    outputs, x_gradients, total = [], [], {name: np.zeros(np.shape(value)) for name, value in params.items()}
    for pair in (runs[i : i + 2] for i in range(0, len(runs), 2)):
        rows, ids = np.zeros((2, *x.shape), np.float32), np.zeros(x.shape[:2], np.int32)
        for row, (b, start, stop) in enumerate(pair):
            rows[0, row, : stop - start], rows[1, row, : stop - start] = x[b, start:stop], cotangent[b, start:stop]
            ids[row, : stop - start] = 1
        output, gradients = layer.vjp(params, rows[0], ids, rows[1])
        for row, (_, start, stop) in enumerate(pair):
            outputs.append(output[row, : stop - start])
            x_gradients.append(gradients["x"][row, : stop - start])
        total = {name: total[name] + gradients[name] for name in params}
    return outputs, x_gradients, total


@every_layer_type
@settings(max_examples=6)
@given(ids=layouts() | st.just(LAYOUT), seed=st.integers(0, 2**20))
def test_packed_is_every_document_alone(layer_type, pure_layer, problem, runs_of, ids, seed):
    layer, (params, x, cotangent) = pure_layer(layer_type), problem(layer_type, seed)
    cotangent = np.where(ids[:, :, None] == 0, 0, cotangent)
    runs = runs_of(x, ids)
    outputs, x_gradients, total = alone(layer, params, x, cotangent, runs)
    output, gradients = layer.vjp(params, x, ids, cotangent)
    for (b, start, stop), want in zip(runs, outputs, strict=True):
        assert_close(output[b, start:stop], want, np.float32)
    expected_x = np.zeros(x.shape)
    for (b, start, stop), want in zip(runs, x_gradients, strict=True):
        expected_x[b, start:stop] = want
    assert_gradients_close(gradients, {**total, "x": expected_x}, np.float32)
    np.testing.assert_array_equal(output[ids == 0], 0.0)


def first_of_a_row(layer, params, x):
    """Outputs [T, E] of x [1, T, E] at the front of a row without segment ids; what follows is not seen."""
    rows = np.full((2, 67, CONFIG.hidden_size), 2.0, np.float32)
    rows[0, : x.shape[1]] = x[0]
    return layer.vjp(params, rows, None, np.zeros_like(rows))[0][0, : x.shape[1]]


@every_layer_type
def test_a_document_in_a_row_is_the_unpacked_row(layer_type, pure_layer, problem):
    """The two code paths, with segment ids and without, in every phase of the windows."""
    params, x, _ = problem(layer_type, 1, batch=1, length=21)
    layer = pure_layer(layer_type)
    want = first_of_a_row(layer, params, x)
    for start in range(9):
        rows, ids = np.full((2, 67, CONFIG.hidden_size), 3.0, np.float32), np.full((2, 67), 9, np.int32)
        rows[1, start : start + 21], ids[1, start : start + 21] = x[0], 4
        got, _ = layer.vjp(params, rows, ids, np.zeros_like(rows))
        assert_close(got[1, start : start + 21], want, np.float32)


@every_layer_type
def test_padding_on_the_left_is_as_if_it_were_not_there(layer_type, pure_layer, problem):
    """Whole windows of it or not, in each row another number: it shifts neither windows nor positions."""
    params, x, _ = problem(layer_type, 11, batch=1, length=21)
    layer = pure_layer(layer_type)
    want = first_of_a_row(layer, params, x)
    for left in ((2, 4), (8, 13), (46, 0)):
        rows, ids = np.full((2, 67, CONFIG.hidden_size), np.nan, np.float32), np.zeros((2, 67), np.int32)
        for row, n in enumerate(left):
            rows[row, n : n + 21], ids[row, n : n + 21] = x[0], 6
        got, _ = layer.vjp(params, rows, ids, np.zeros_like(rows))
        for row, n in enumerate(left):
            assert_close(got[row, n : n + 21], want, np.float32)
        np.testing.assert_array_equal(got[ids == 0], 0.0)


@every_layer_type
def test_one_packed_row_told_by_cumulative_lengths(layer_type, pure_layer, problem):
    """A batch of one, as variable-length kernels take it: each document as if alone, the rest of the row padding."""
    params, x, cotangent = problem(layer_type, 12)
    ends = (0, 6, 18, 21, 60)
    documents = Documents.from_cu_seqlens(np.array(ends), 67)
    assert documents.shape == (1, 67)
    runs = [(0, start, stop) for start, stop in itertools.pairwise(ends)]
    outputs, _, _ = alone(pure_layer(layer_type), params, x, cotangent, runs)
    got = pure_layer(layer_type, optimized=False).forward(params, x[:1], documents)
    for (_, start, stop), want in zip(runs, outputs, strict=True):
        assert_close(got[0, start:stop], want, np.float32)
    np.testing.assert_array_equal(got[0, 60:], 0.0)


@every_layer_type
def test_no_bit_of_another_document_moves(layer_type, pure_layer, problem, runs_of):
    """Whatever one document holds, NaN and infinity included. Finite changes leave the others' gradients alone too."""
    params, x, cotangent = problem(layer_type, 2)
    layer = pure_layer(layer_type)
    output, gradients = layer.vjp(params, x, LAYOUT, cotangent)
    for b, start, stop in runs_of(x, LAYOUT):
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
def test_padding_may_hold_anything(layer_type, pure_layer, problem):
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
def test_rows_of_nothing_but_padding(layer_type, pure_layer, problem):
    params, x, cotangent = problem(layer_type, 4)
    output, gradients = pure_layer(layer_type).vjp(params, np.full_like(x, np.nan), np.zeros_like(LAYOUT), cotangent)
    np.testing.assert_array_equal(output, 0.0)
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, 0.0, err_msg=name)


@every_layer_type
def test_everything_restarts_with_the_document(layer_type, pure_layer, problem):
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
def test_batch_rows_do_not_know_each_other(layer_type, pure_layer, problem):
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


@every_layer_type
def test_promised_alignment_changes_nothing(layer_type, pure_layer, problem):
    """Documents that start at multiples of 8 with that promise, which allows other code, and without it."""
    params, x, cotangent = problem(layer_type, 7)
    lengths = (3, 17, 8, 20, 40, 11)
    packed = pack_documents([np.ones(n) for n in lengths], 67, align=8)
    assert packed.segment_ids.shape == LAYOUT.shape
    assert packed.documents.alignment == 8
    layer = pure_layer(layer_type)
    want, want_gradients = layer.vjp(params, x, packed.segment_ids, cotangent)
    poisoned = np.where(packed.segment_ids[:, :, None] == 0, np.nan, x)
    got, got_gradients = layer.vjp(params, poisoned, packed.documents, cotangent)
    assert_close(got, want, np.float32)
    assert_gradients_close(got_gradients, want_gradients, np.float32)


@every_layer_type
def test_right_padded_rows(layer_type, pure_layer, problem):
    """One document a row, by its length: every start is known to be row 0, and yet not every window is whole."""
    params, x, _ = problem(layer_type, 8)
    for lengths in ([67, 30], [1, 0]):
        ids = (np.arange(67)[None] < np.array(lengths)[:, None]).astype(np.int32)
        want, _ = pure_layer(layer_type).vjp(params, x, ids, np.zeros_like(x))
        poisoned = np.where(ids[:, :, None] == 0, np.nan, x)
        got = pure_layer(layer_type).forward(params, poisoned, Documents.from_lengths(np.array(lengths), 67))
        assert_close(got, want, np.float32)


# ---------------------------------------------------------------------------------------------------------- causality


@every_layer_type
@pytest.mark.parametrize("packed", [True, False])
def test_no_output_before_an_edit_moves(layer_type, packed, pure_layer, problem):
    params, x, cotangent = problem(layer_type, 9)
    layer, ids = pure_layer(layer_type), LAYOUT if packed else None
    output, _ = layer.vjp(params, x, ids, cotangent)
    for t in range(67):
        edited = x.copy()
        edited[:, t] = -2 * x[:, t]
        moved, _ = layer.vjp(params, edited, ids, cotangent)
        np.testing.assert_array_equal(moved[:, :t], output[:, :t])
        visible = np.ones(2, bool) if ids is None else ids[:, t] != 0
        np.testing.assert_array_equal(np.any(moved[:, t] != output[:, t], axis=-1), visible)


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
def test_outputs_depend_on_what_they_see_and_on_nothing_else(layer_type, packed, pure_layer, problem, runs_of):
    """Edits one token after the other. The window is short, so that most of an entry is seen through it alone: from the
    window's last token on, and not one token sooner or later.
    """
    params, x, _ = problem(layer_type, 10)
    layer, ids = pure_layer(layer_type, select="all", sliding_window=2), LAYOUT if packed else None
    output = layer.forward(params, x, ids)
    expected = dependence(LAYOUT, runs_of(x, ids), layer_type, window=2)
    for s in range(67):
        edited = x.copy()
        edited[:, s] = -2 * x[:, s]
        moved = np.any(layer.forward(params, edited, ids) != output, axis=-1)
        np.testing.assert_array_equal(moved, expected[:, :, s], err_msg=f"token {s}")


@every_layer_type
@pytest.mark.parametrize("size", [1e15, 1e20])
def test_huge_hidden_states_come_out_right_or_as_nan(layer_type, pure_layer, problem, compiled_reference, size):
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
