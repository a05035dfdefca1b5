"""The static mask of Splash Attention, and the list of its tiles: against `Visibility` and by brute force."""

import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from foveal.backends.splash.layout import KeyLayout
from foveal.backends.splash.mask import HCAStaticMask
from foveal.backends.splash.mask_info import static_mask_info
from foveal.backends.splash.tokamax_splash import MaskInfo, splash_attention_mask_info
from foveal.geometry import Documents, Visibility

BLOCKS = st.sampled_from([2, 3, 4, 8, 12, 16])
WINDOWS = st.sampled_from([1, 2, 5, 8, 16, 40, 500])
RATIOS = st.sampled_from([0, 1, 2, 3, 4, 7, 8, 16, 200])


def mask_of(length: int, window: int, ratio: int, block_q: int, block_kv: int) -> HCAStaticMask:
    """In the layout that the backend uses."""
    slots = length // ratio if ratio else 0
    return HCAStaticMask(KeyLayout.for_shapes(length, slots, block_q, block_kv), window, ratio)


def padded(mask: HCAStaticMask, block_q: int, block_kv: int, rows: int, between: int, end: int) -> HCAStaticMask:
    """The same who-sees-what in a layout with the fewest blocks that hold it, and so many more."""
    at = mask.layout
    padded_rows = -(-at.rows // block_q) * block_q + rows * block_q
    entry_start = -(-padded_rows // block_kv) * block_kv + between * block_kv
    columns = -(-(entry_start + at.slots) // block_kv) * block_kv + end * block_kv
    layout = KeyLayout(at.rows, at.slots, padded_rows, entry_start, columns)
    return HCAStaticMask(layout, mask.sliding_window, mask.compress_ratio)


LONGEST = 110


@functools.cache
def dense(window: int, ratio: int) -> np.ndarray:
    """`Visibility.dense` of an unpacked row of the longest length: nobody in a shorter one sees more or less."""
    visibility = Visibility(Documents.unpacked(1, LONGEST), window, ratio)
    return np.asarray(jax.jit(Visibility.dense)(visibility))[0]


def by_visibility(mask: HCAStaticMask) -> np.ndarray:
    """What `Visibility` says of an unpacked row, where the layout puts it; padded rows see themselves."""
    at = mask.layout
    starts: Any = np.zeros((1, at.rows), np.int32)
    assert Visibility(Documents(document_start=starts), mask.sliding_window, mask.compress_ratio).slots == at.slots
    seen = dense(mask.sliding_window, mask.compress_ratio)[: at.rows]
    whole = np.eye(at.padded_rows, at.columns, dtype=bool)
    whole[: at.rows] = False
    whole[: at.rows, : at.rows] = seen[:, : at.rows]
    whole[: at.rows, at.entry_start : at.entry_start + at.slots] = seen[:, LONGEST : LONGEST + at.slots]
    assert seen.sum() == whole[: at.rows].sum()
    return whole


@st.composite
def cases(draw) -> tuple[HCAStaticMask, int, int]:
    """A mask and two block sizes that divide it, with the backend's padding, the least there can be, or more."""
    block_q, block_kv = draw(BLOCKS), draw(BLOCKS)
    mask = mask_of(draw(st.integers(1, LONGEST)), draw(WINDOWS), draw(RATIOS), block_q, block_kv)
    if draw(st.booleans()):
        more = st.integers(0, 2)
        mask = padded(mask, block_q, block_kv, draw(more), draw(more), draw(more))
    return mask, block_q, block_kv


# ---------------------------------------------------------------------------------------------------------------- mask


@given(case=cases(), data=st.data())
def test_any_slice_is_what_visibility_says(case, data):
    mask, _, _ = case
    expected = by_visibility(mask)
    assert mask.shape == expected.shape
    whole = mask[:, :]
    assert whole.dtype == bool
    np.testing.assert_array_equal(whole, expected)
    rows, columns = (data.draw(st.slices(size)) for size in mask.shape)
    np.testing.assert_array_equal(mask[rows, columns], expected[rows, columns])
    assert expected.any(axis=1).all(), "a row that sees nothing"
    padding = whole[mask.layout.rows :]
    np.testing.assert_array_equal(np.argwhere(padding)[:, 1], mask.layout.rows + np.arange(len(padding)))


def test_a_mask_by_hand():
    """Six rows of window 2 and an entry for two rows each; two padded rows, and padding columns that nobody sees."""
    mask = HCAStaticMask(KeyLayout(6, 3, 8, 10, 14), 2, 2)
    rows = ["".join(".x"[value] for value in row) for row in mask[:, :].astype(int)]
    assert rows == [
        "x.............",
        "xx........x...",
        ".xx.......x...",
        "..xx......xx..",
        "...xx.....xx..",
        "....xx....xxx.",
        "......x.......",
        ".......x......",
    ]


def test_masks_of_the_same_numbers_are_equal():
    """They are keys of a cache: layers of a model must share one, and no two different ones may."""
    first = 60, 8, 4, 4, 8
    numbers = [first, (60, 9, 4, 4, 8), (60, 8, 5, 4, 8), (61, 8, 4, 4, 8), (60, 8, 4, 4, 32), (60, 8, 0, 4, 8)]
    for one, other in itertools.product(numbers, numbers):
        a, b = mask_of(*one), mask_of(*other)
        assert (a == b) == (one == other)
        assert one != other or hash(a) == hash(b)
    assert len({mask_of(*n) for n in numbers + numbers}) == len(numbers)
    assert static_mask_info(mask_of(*first), 4, 8) is static_mask_info(mask_of(*first), 4, 8)


@pytest.mark.parametrize(
    ("layout", "ratio", "wanted"),
    [
        (KeyLayout(8, 3, 8, 8, 16), 4, "= 2 slots"),  # a slot for an incomplete window
        (KeyLayout(8, 2, 8, 8, 16), 0, "= 0 slots"),  # entries where the layer has none
        (KeyLayout(8, 0, 8, 8, 16), 4, "= 2 slots"),
        (KeyLayout(9, 2, 8, 12, 16), 4, "rows <= padded_rows"),
        (KeyLayout(7, 1, 8, 7, 16), 4, "padded_rows <= entry_start"),  # a padded row without a column of its own
        (KeyLayout(8, 2, 8, 8, 9), 4, "entry_start <= columns - slots"),  # the last entry is cut off
    ],
)
def test_numbers_that_do_not_fit_each_other_are_refused(layout, ratio, wanted):
    with pytest.raises(ValueError, match=r"^layout: expected") as error:
        HCAStaticMask(layout, 3, ratio)
    assert wanted in str(error.value)
    assert str(layout) in str(error.value)


# -------------------------------------------------------------------------------------------------------------- layout


def assert_least_padding(layout: KeyLayout, block_q: int, block_kv: int) -> None:
    assert layout.rows <= layout.padded_rows < layout.rows + block_q
    assert layout.padded_rows % block_q == 0
    assert layout.padded_rows <= layout.entry_start < layout.padded_rows + block_kv
    assert layout.entry_start % block_kv == 0
    assert layout.columns % block_kv == 0
    needed = layout.entry_start + layout.slots
    assert needed <= layout.columns
    # Three blocks at least: a backward kernel that reads sums before it wrote them is wrong with fewer.
    assert layout.columns == 3 * block_kv or 3 * block_kv < layout.columns < needed + block_kv


@pytest.mark.parametrize("blocks", [(128, 128), (256, 256), (512, 512), (128, 512), (512, 128), (384, 256)])
@pytest.mark.parametrize(("rows", "ratio"), [(1, 128), (489, 128), (16000, 128), (489, 4), (16000, 0)])
def test_every_padded_row_has_a_column(rows, ratio, blocks):
    slots = rows // ratio if ratio else 0
    layout = KeyLayout.for_shapes(rows, slots, *blocks)
    assert (layout.rows, layout.slots) == (rows, slots)
    assert_least_padding(layout, *blocks)
    HCAStaticMask(layout, 128, ratio)  # accepts it


@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(1, 700), st.integers(1, 700))
def test_padding_is_the_least_there_can_be(rows, slots, block_q, block_kv):
    assert_least_padding(KeyLayout.for_shapes(rows, slots, block_q, block_kv), block_q, block_kv)


# --------------------------------------------------------------------------------------------------------------- tiles


def assert_tiles_of_tokamax(mask: HCAStaticMask, block_q: int, block_kv: int) -> None:
    """It evaluates the mask everywhere. Every field, dtypes too, for the forward and the backward kernel."""
    for is_dkv in (False, True):
        want, _ = splash_attention_mask_info._process_mask(mask, (block_q, block_kv), is_dkv)
        got = static_mask_info(mask, block_q, block_kv, is_dkv=is_dkv)
        assert got._fields == want._fields
        for name, a, b in zip(want._fields, got, want, strict=True):
            assert (a is None) == (b is None), name
            if a is not None and b is not None:
                assert (type(a), a.dtype) == (type(b), b.dtype), name
                np.testing.assert_array_equal(a, b, err_msg=name, strict=True)


@given(case=cases())
@example(case=(mask_of(1, 1, 0, 2, 2), 2, 2))
@example(case=(mask_of(1, 5, 1, 16, 16), 16, 16))
@example(case=(mask_of(96, 500, 1, 8, 8), 8, 8))  # full blocks in both parts, no padding
@example(case=(mask_of(40, 8, 200, 4, 4), 4, 4))  # a layer with entries, and a row too short for one
def test_tiles_are_those_that_tokamax_finds(case):
    assert_tiles_of_tokamax(*case)


@pytest.mark.parametrize("length", [256, 258])
@pytest.mark.parametrize(("block_q", "block_kv"), [(2, 4), (4, 2)])
def test_numbers_of_blocks_around_the_largest_int8(length, block_q, block_kv):
    """128 blocks of rows or columns still have numbers of int8, 129 do not."""
    mask = mask_of(length, 3, 0, block_q, block_kv)
    assert_tiles_of_tokamax(mask, block_q, block_kv)
    info = static_mask_info(mask, block_q, block_kv)
    dtypes = {numbers.dtype for numbers in (info.active_rows, info.active_cols) if numbers is not None}
    assert (np.dtype(np.int16) in dtypes) == (length > 256)


def test_numbers_of_blocks_beyond_int16():
    info = static_mask_info(mask_of(1 << 17, 3, 0, 2, 2), 2, 2)
    assert info.active_rows is not None
    assert info.active_rows.max() == (1 << 16) - 1
    for array in info[:4]:
        assert array is not None
        assert array.dtype == splash_attention_mask_info._downcast_to_small_type(np.asarray(array, np.int32)).dtype


@pytest.mark.parametrize(
    ("block_q", "block_kv", "name"), [(3, 4, "block_q"), (4, 3, "block_kv"), (1, 4, "block_q"), (4, 1, "block_kv")]
)
def test_blocks_that_do_not_divide_the_mask_are_refused(block_q, block_kv, name):
    mask = mask_of(20, 4, 2, 4, 4)
    with pytest.raises(ValueError, match=rf"^{name}: expected a divisor above 1 of "):
        static_mask_info(mask, block_q, block_kv)


def test_entries_that_begin_within_a_block_are_refused():
    """Then one block holds raw keys and entries, which the arithmetic does not know."""
    mask = HCAStaticMask(KeyLayout(8, 2, 8, 10, 12), 4, 4)
    with pytest.raises(ValueError, match=r"^block_kv: expected a divisor above 1 of "):
        static_mask_info(mask, 4, 4)


# ----------------------------------------------------------------------------------------------------------- host cost


@pytest.fixture
def evaluated(monkeypatch):
    """Counts the elements of the mask that are evaluated."""
    counts: list[int] = []
    at = HCAStaticMask.at

    def counted(self: HCAStaticMask, row: np.ndarray, column: np.ndarray) -> np.ndarray:
        counts.append(int(np.prod(np.broadcast_shapes(row.shape, column.shape))))
        return at(self, row, column)

    monkeypatch.setattr(HCAStaticMask, "at", counted)
    static_mask_info.cache_clear()
    yield counts
    static_mask_info.cache_clear()


@pytest.mark.parametrize(("length", "most"), [(131072, 10**8), (1 << 20, 10**9)])
@pytest.mark.parametrize("block", [256, 512])
def test_few_tiles_of_a_long_row_are_evaluated(length, most, block, evaluated):
    """All elements would be 10^10 and 10^12. A thousand of the tiles, drawn at random, are what they should be."""
    mask = mask_of(length, 128, 128, block, block)
    assert mask.shape[0] * mask.shape[1] > 1.7e10
    info, backward = static_mask_info(mask, block, block), static_mask_info(mask, block, block, is_dkv=True)
    assert 0 < sum(evaluated) < most
    spent = len(evaluated)
    static_mask_info(mask_of(length, 128, 128, block, block), block, block)  # the next layer's
    assert len(evaluated) == spent

    rng = np.random.default_rng(0)
    rows, columns = mask.shape[0] // block, mask.shape[1] // block
    row, column = rng.integers(rows, size=900), rng.integers(columns, size=900)
    column[500:700] = rng.integers(mask.layout.entry_start // block, columns, size=200)
    column[700:] = np.maximum(row[700:] - rng.integers(0, 2, size=200), 0)  # on the diagonal or before it
    assert info.partial_mask_blocks is not None
    assert info.mask_next is not None
    forward = {(r, c): (s, i) for i, (r, c, s) in enumerate(zip(*as_ints(info), strict=True))}
    assert 0 not in {state for state, _ in forward.values()}, "an empty one"
    inside = np.arange(block)
    for tile in zip(row.tolist(), column.tolist(), strict=True):
        part = mask.at(*np.ix_(*(at * block + inside for at in tile)))
        state, where = forward.get(tile, (0, 0))
        assert state == (2 if part.all() else 1 if part.any() else 0)  # full, partial or not listed
        if state == 1:
            np.testing.assert_array_equal(info.partial_mask_blocks[info.mask_next[where]], part)

    # The backward kernel's tiles are the same, and one for each column that nobody sees.
    extra = dict.fromkeys(((0, c) for c in set(range(columns)) - {c for _, c in forward}), 0)
    wanted = {tile: state for tile, (state, _) in forward.items()} | extra
    assert {(r, c): s for c, r, s in zip(*as_ints(backward), strict=True)} == wanted


def as_ints(info: MaskInfo) -> list[list[int]]:
    arrays: list[Any] = [info.active_rows, info.active_cols, info.block_mask]
    return [array.tolist() for array in arrays]
