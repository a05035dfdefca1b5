"""Packing documents of any length into rows of one length, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from foveal.geometry.documents import Documents


class Placement(NamedTuple):
    """Where a document went: rows [start, start + length) of batch row `row`."""

    row: int
    start: int
    length: int


class PackedDocuments(NamedTuple):
    """What `pack_documents` returns.

    Attributes:
        values: [B, S, ...] in the documents' dtype, padded with `pad_value`.
        segment_ids: int32 [B, S]: 1, 2, ... within each row, 0 on padding.
        documents: the same as `Documents`, which also knows the alignment.
        placements: one a document, in the order given.
    """

    values: np.ndarray
    segment_ids: np.ndarray
    documents: Documents
    placements: tuple[Placement, ...]


def pack_documents(
    documents: Sequence[np.ndarray], row_length: int, *, align: int = 1, pad_value: float | int = 0
) -> PackedDocuments:
    """Packs documents into as few rows as first fit finds, in order, each whole and in one row.

    Args:
        documents: arrays [length, ...] of one dtype and equal trailing shape: tokens, or vectors per token. An empty
            document takes no room and is placed at (0, 0, 0).
        row_length: S.
        align: every document starts at a multiple of it; the gaps are padding. A multiple of the compress ratio
            makes every window start at a multiple of it too, which some backends need.
        pad_value: what padding rows hold in `values`.

    Raises:
        ValueError: no documents, differing dtypes or trailing shapes, `row_length` or `align` below 1, a document
            longer than `row_length` (split it first).
    """
    arrays = [np.asarray(document) for document in documents]
    _check(arrays, row_length, align)
    row_length, align = int(row_length), int(align)
    placements: list[Placement] = []
    free: list[int] = []  # first free row of each packed row, a multiple of `align`
    for array in arrays:
        length = len(array)
        if not length:
            placements.append(Placement(0, 0, 0))
            continue
        row = next((r for r, begin in enumerate(free) if begin + length <= row_length), len(free))
        if row == len(free):
            free.append(0)
        placements.append(Placement(row, free[row], length))
        free[row] += -(-length // align) * align

    free = free or [0]  # nothing but empty documents: one row of padding
    values = np.full((len(free), row_length, *arrays[0].shape[1:]), pad_value, arrays[0].dtype)
    segment_ids = np.zeros((len(free), row_length), np.int32)
    last_id = [0] * len(free)
    for array, (row, start, length) in zip(arrays, placements, strict=True):
        values[row, start : start + length] = array
        last_id[row] += length > 0
        segment_ids[row, start : start + length] = last_id[row]
    return PackedDocuments(
        values, segment_ids, Documents.from_segment_ids(segment_ids, alignment=align), tuple(placements)
    )


def _check(arrays: list[np.ndarray], row_length: int, align: int) -> None:
    for name, value in (("row_length", row_length), ("align", align)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name}: expected an int >= 1, got {value!r}")
    if not arrays:
        raise ValueError("documents: expected at least one, got none")
    for i, array in enumerate(arrays):
        if array.ndim < 1 or array.shape[1:] != arrays[0].shape[1:] or array.dtype != arrays[0].dtype:
            raise ValueError(
                f"documents: expected arrays [length, ...] like the first, {arrays[0].dtype}{list(arrays[0].shape)}, "
                f"got {array.dtype}{list(array.shape)} at index {i}"
            )
        if len(array) > row_length:
            raise ValueError(
                f"documents: expected at most row_length={row_length} tokens each, got {len(array)} at index {i}; "
                "split it or use longer rows"
            )
