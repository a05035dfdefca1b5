"""Empty, partial and full blocks of a static mask, found by arithmetic.

Tokamax evaluates the whole mask to find them, which takes the host minutes for long rows. Here only the distinct
partial blocks are evaluated: a few hundred, however long the row.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from foveal.backends.splash.mask import HCAStaticMask
from foveal.backends.splash.tokamax_splash import MaskInfo
from foveal.geometry import complete_windows, window_first

_PARTIAL, _FULL = 1, 2


class _MaskBlocks(NamedTuple):
    """Non-empty blocks, in order of rows, then columns: int arrays of one length."""

    row: np.ndarray
    column: np.ndarray
    state: np.ndarray


@functools.lru_cache(maxsize=12)  # as many as Tokamax keeps: layers of a model share a mask
def static_mask_info(mask: HCAStaticMask, block_q: int, block_kv: int, *, is_dkv: bool = False) -> MaskInfo:
    """Tile list of a static mask, as Tokamax's own `_process_mask` makes it, in NumPy arrays.

    Args:
        mask: the mask; `block_q` divides its padded rows, `block_kv` its columns and the first entry's column.
        block_q: queries per block.
        block_kv: keys per block.
        is_dkv: for the backward kernel: transposed blocks in order of columns, with an empty one for each column of
            blocks that no row sees, since its gradient must be written too.

    Raises:
        ValueError: block sizes that do not divide the mask.
    """
    at = mask.layout
    for name, size, values in (
        ("block_q", block_q, (at.padded_rows,)),
        ("block_kv", block_kv, (at.entry_start, at.columns)),
    ):
        if size < 2 or any(value % size for value in values):
            raise ValueError(f"{name}: expected a divisor above 1 of {values}, got {size}")
    blocks = _classify(mask, block_q, block_kv)
    row_blocks, column_blocks = at.padded_rows // block_q, at.columns // block_kv

    partial = blocks.state == _PARTIAL
    ids = np.full(len(blocks.state), -1, np.int32)
    ids[partial], contents = _distinct(mask, blocks, partial, block_q, block_kv)
    outer, inner, width = blocks.row, blocks.column, column_blocks
    state = blocks.state
    if is_dkv:
        contents = contents.transpose(0, 2, 1)
        outer, inner, width = blocks.column, blocks.row, row_blocks
        unseen = np.setdiff1d(np.arange(column_blocks), blocks.column)
        outer, inner = np.append(outer, unseen), np.append(inner, np.zeros_like(unseen))
        state, ids = np.append(state, 0 * unseen), np.append(ids, np.full_like(unseen, -1))
        order = np.argsort(outer * width + inner, kind="stable")
        outer, inner, state, ids = outer[order], inner[order], state[order], ids[order]
    return MaskInfo(
        mask_next=_smallest(_next_partial(ids)) if len(contents) else None,
        active_rows=_smallest(outer),
        active_cols=_smallest(inner),
        block_mask=_smallest(state),
        num_active_blocks=np.array([len(state)], np.int32),
        partial_mask_blocks=contents.astype(np.int8) if len(contents) else None,
        q_sequence=None,
    )


def _classify(mask: HCAStaticMask, block_q: int, block_kv: int) -> _MaskBlocks:
    """Find the non-empty blocks: a block's rows together see one range of raw keys, and a prefix of the entries."""
    at = mask.layout
    first_row = np.arange(0, at.padded_rows, block_q)
    last_row = first_row + block_q - 1
    last_real = np.minimum(last_row, at.rows - 1)
    padded = last_row >= at.rows  # their own columns follow those of the last real row
    first_seen = np.where(first_row < at.rows, np.maximum(window_first(first_row, mask.sliding_window), 0), first_row)
    window = _expand(first_seen // block_kv, last_row // block_kv + 1)

    start = window.column * block_kv
    everyone = (start >= window_first(last_row, mask.sliding_window)[window.row]) & (
        start + block_kv - 1 <= first_row[window.row]
    )
    window = window._replace(state=np.where(everyone & ~padded[window.row], _FULL, _PARTIAL))
    if not mask.compress_ratio:
        return window

    seen_by_last = np.where(first_row < at.rows, complete_windows(last_real, mask.compress_ratio), 0)
    offset = at.entry_start // block_kv
    entries = _expand(np.full_like(seen_by_last, offset), offset + -(-seen_by_last // block_kv))
    slots_before_end = (entries.column - offset + 1) * block_kv
    everyone = complete_windows(first_row, mask.compress_ratio)[entries.row] >= slots_before_end
    entries = entries._replace(state=np.where(everyone & ~padded[entries.row], _FULL, _PARTIAL))
    both = _MaskBlocks(*(np.concatenate(parts) for parts in zip(window, entries, strict=True)))
    order = np.argsort(both.row, kind="stable")  # entries are to the right of the window
    return _MaskBlocks(*(part[order] for part in both))


def _expand(first: np.ndarray, end: np.ndarray) -> _MaskBlocks:
    """Blocks in columns [first, end) of each row of blocks, with states to be filled in."""
    counts = end - first
    row = np.repeat(np.arange(len(first)), counts)
    column = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    return _MaskBlocks(row, column, np.zeros_like(row))


def _distinct(
    mask: HCAStaticMask, blocks: _MaskBlocks, partial: np.ndarray, block_q: int, block_kv: int
) -> tuple[np.ndarray, np.ndarray]:
    """Number of each partial block's content, in order of first appearance, and the distinct contents."""
    row, column = blocks.row[partial] * block_q, blocks.column[partial] * block_kv
    _, example, kind = np.unique(_kinds(mask, row, column, block_q), axis=0, return_index=True, return_inverse=True)
    by_content: dict[bytes, int] = {}
    evaluated = [mask[row[i] : row[i] + block_q, column[i] : column[i] + block_kv] for i in example]
    content = np.array([by_content.setdefault(block.tobytes(), len(by_content)) for block in evaluated], int)
    numbers = content[kind.reshape(-1)]
    _, first_seen, number = np.unique(numbers, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first_seen))
    contents = np.zeros((len(first_seen), block_q, block_kv), bool)
    contents[rank[content]] = np.reshape(evaluated, (-1, block_q, block_kv))
    return rank[number.reshape(-1)].astype(np.int32), contents


def _kinds(mask: HCAStaticMask, row: np.ndarray, column: np.ndarray, block_q: int) -> np.ndarray:
    """Numbers, int [N, 4], that determine a block's content.

    They are mainly the distance between rows and columns and, for entries, how far into a window the first row is.
    """
    at, ratio = mask.layout, max(mask.compress_ratio, 1)
    is_entry = column >= at.entry_start
    phase = np.where(is_entry, row % ratio, 0)
    distance = np.where(is_entry, row // ratio - (column - at.entry_start), row - column)
    return np.stack([is_entry, phase, distance, np.clip(at.rows - row, 0, block_q)], axis=1)


def _next_partial(ids: np.ndarray) -> np.ndarray:
    """For each block, the number of the partial one that is loaded next: its own, a later one's, or the first one's."""
    where = np.flatnonzero(ids >= 0)
    following = np.searchsorted(where, np.arange(len(ids)))
    return ids[where[np.where(following == len(where), 0, following)]]


def _smallest(array: np.ndarray) -> np.ndarray:
    """Cast to the smallest of int8, int16 and int32 that holds the values, as Tokamax does: scalar memory is scarce."""
    highest = array.max(initial=0)
    return array.astype(next(t for t in (np.int8, np.int16, np.int32) if highest <= np.iinfo(t).max))
