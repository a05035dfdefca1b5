"""Packing of documents of any length into rows of one length, and unpacking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from foveal.checks import as_array, as_int, as_integers, as_lengths, require
from foveal.geometry.documents import Documents, check_cu_seqlens
from foveal.meshes import any_mesh
from foveal.typing import Array, Int, Int32, Shaped


class Placement(NamedTuple):
    """The place of a document: rows [start, start + length) of batch row `row`."""

    row: int
    start: int
    length: int


class PackedDocuments(NamedTuple):
    """The result of `pack_documents`.

    Attributes:
        values: [B, S, ...] in the documents' dtype, padded with `pad_value`.
        segment_ids: int32 [B, S]: 1, 2, ... within each row, 0 on padding.
        documents: the same as `Documents`, which also knows the alignment.
        placements: one per document, in the order given.
    """

    values: np.ndarray
    segment_ids: np.ndarray
    documents: Documents
    placements: tuple[Placement, ...]


def pack_documents(
    documents: Sequence[np.ndarray], row_length: int, *, align: int = 1, pad_value: float | int = 0
) -> PackedDocuments:
    """Pack documents into rows by first fit, in the order given; no document is split.

    Args:
        documents: arrays [length, ...] of one dtype and equal trailing shape: tokens, or vectors per token. An empty
            document takes no room and is placed at (0, 0, 0).
        row_length: S.
        align: every document starts at a multiple of it; the gaps are padding. A multiple of the compress ratio
            makes every window start at a multiple of it too, which some backends need.
        pad_value: value of the padding rows in `values`.

    Raises:
        ValueError: no documents, differing dtypes or trailing shapes, `row_length` or `align` below 1, a document
            longer than `row_length` (split it first).
    """
    row_length, align = as_int("row_length", row_length, 1), as_int("align", align, 1)
    arrays = [np.asarray(document) for document in documents]
    _check(arrays, row_length)
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


class PaddedRows(NamedTuple):
    """One document per row, right-padded with zeros.

    Attributes:
        values: [N, T, ...].
        lengths: int32 [N].
    """

    values: Shaped[Array, "documents T *F"]
    lengths: Int32[Array, " documents"]


@any_mesh()
def unpack(
    x: Shaped[Array, "S *F"] | np.ndarray,
    cu_seqlens: Int[Array, " ends"] | np.ndarray | Sequence[int],
    *,
    max_length: int | None = None,
) -> PaddedRows:
    """Unpack documents that lie end to end into one row each, as prompts for `CompressedAttention.prefill`.

    Args:
        x: [S, ...], a value or vector per token.
        cu_seqlens: integers [N + 1], cumulative lengths: 0 first, then the end of each document. Equal values are
            empty documents. May be traced.
        max_length: T, the static length of the rows; by default that of the longest document, if `cu_seqlens` is
            concrete. If it is traced, documents are cut off at the end of x and after `max_length` tokens.

    Raises:
        ValueError: wrong rank or dtype; `max_length` missing where `cu_seqlens` is traced, or below 0; if
            `cu_seqlens` is concrete, a first value that is not 0, a decreasing one, an end beyond x, a document
            longer than `max_length`.
    """
    rows = as_array("x", x, "S *", kind="values")
    max_length = None if max_length is None else as_int("max_length", max_length, 0)
    ends, concrete = as_integers("cu_seqlens", cu_seqlens, ndims=(1,))
    if ends.shape[0] < 1:
        raise ValueError(f"cu_seqlens: expected at least the leading 0, got shape {ends.shape}")
    if concrete is not None:
        check_cu_seqlens(concrete, rows.shape[0])
        lengths = np.diff(concrete)
        longest = int(lengths.max(initial=0))
        if max_length is not None and longest > max_length:
            raise ValueError(f"max_length: expected at least {longest}, the longest document, got {max_length}")
        max_length = longest if max_length is None else max_length
    elif max_length is None:
        raise ValueError("max_length: expected an int >= 0 where cu_seqlens is traced, got None")
    ends = jnp.clip(ends, 0, rows.shape[0])
    return _rows_from(rows, ends[:-1], jnp.clip(ends[1:] - ends[:-1], 0, max_length), max_length)


@any_mesh(like="x")
def left_aligned(
    x: Shaped[Array, "B S *F"] | np.ndarray, lengths: Int[Array, " B"] | np.ndarray | Sequence[int]
) -> PaddedRows:
    """Move the padding of left-padded rows to the right, where `CompressedAttention.prefill` expects it.

    Args:
        x: [B, S, ...]; the last `lengths[b]` positions of row b are its document.
        lengths: integers [B]. May be traced; they are then clipped to [0, S].

    Raises:
        ValueError: wrong rank, shape or dtype; if lengths are concrete, one below 0 or above S.
    """
    padded = as_array("x", x, "B S *", kind="values")
    batch, size = padded.shape[:2]
    counts, concrete = as_lengths("lengths", lengths, batch)
    require("lengths", concrete, lambda a: (a >= 0) & (a <= size), f"0 to {size}")
    counts = jnp.clip(counts, 0, size)
    flat = padded.reshape(batch * size, *padded.shape[2:])
    return _rows_from(flat, jnp.arange(1, batch + 1, dtype=jnp.int32) * size - counts, counts, size)


def _rows_from(flat: Array, first: Array, lengths: Array, size: int) -> PaddedRows:
    """Rows [first, first + length) of each document, followed by zeros up to `size` rows."""
    place = jnp.arange(size, dtype=jnp.int32)[None]
    present = place < lengths[:, None]
    if not flat.shape[0]:
        return PaddedRows(jnp.zeros((*present.shape, *flat.shape[1:]), flat.dtype), lengths)
    rows = jnp.take(flat, first[:, None] + place, axis=0, mode="clip")
    keep = present.reshape(*present.shape, *(1,) * (flat.ndim - 1))
    return PaddedRows(jnp.where(keep, rows, jnp.zeros((), flat.dtype)), lengths)


def _check(arrays: list[np.ndarray], row_length: int) -> None:
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
