"""Who sees what: two contiguous ranges per query."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from foveal.checks import as_int, described, require_static_length
from foveal.geometry.documents import Documents, as_documents
from foveal.geometry.pytree import checked_pytree
from foveal.typing import Array, Bool, Int, Int32, narrowed


class TileRanges(NamedTuple):
    """What a tile of queries sees: half-open ranges, int32 [B, T] each, or [1, T] if the same in every batch row."""

    window_first: Int32[Array, "B T"]
    window_end: Int32[Array, "B T"]
    entry_first: Int32[Array, "B T"]
    entry_end: Int32[Array, "B T"]

    @property
    def slots(self) -> tuple[Int32[Array, ""], Int32[Array, ""]]:
        """First slot and one past the last that any query of the tile sees."""
        return self.entry_first.min(), self.entry_end.max()

    def slot_blocks(self, size: int) -> tuple[Int32[Array, ""], Int32[Array, ""]]:
        """The first block of `size` slots, and one past the last, that any query of the tile sees."""
        first, end = self.slots
        return first // size, -(-end // size)

    def sees(self, first_slot: int | Int32[Array, ""], count: int) -> Bool[Array, "B T N"]:
        """bool [B, T, count] or [1, T, count]: whether each query sees slots [first_slot, first_slot + count)."""
        slot = first_slot + jnp.arange(count, dtype=jnp.int32)[None, None]
        return (slot >= self.entry_first[..., None]) & (slot < self.entry_end[..., None])


T = TypeVar("T", int, np.ndarray, jax.Array)


def window_first(row: T, sliding_window: int) -> T:
    """First row that the window of the query at `row` reaches, below 0 at the start. The last is `row` itself."""
    return row - (sliding_window - 1)


def complete_windows(position: T, compress_ratio: int) -> T:
    """How many entries of its own document a token at `position` sees: one for each window that it or earlier ends."""
    return (position + 1) // compress_ratio


@checked_pytree
@dataclasses.dataclass(frozen=True)
class Visibility:
    """What each query may look at: a range of raw rows and a range of entry slots.

    With d = document_start[t] and p = t - d, the query at row t sees

    * rows [max(d, t - W + 1), t], the sliding window: W keys with itself;
    * slots [d // m, d // m + (p + 1) // m), the entries of its document's windows that end at or before t.

    A padding row has d = t + 1, so both ranges are empty. (DeepSeek-V4 technical report, arXiv 2606.19348, sections on
    causality and packed sequences; the entry that a window's last token completes is visible to that token.)

    Where rows continue documents that began before them (`Documents.continuing`), d is negative: the raw keys have
    `history` rows before the first query's own, and the entries are those of one document a row, from its first window
    on, in `capacity` slots of which the query sees the first (p + 1) // m.

    Attributes:
        documents: where the documents begin.
        sliding_window: W >= 1.
        compress_ratio: m >= 1, or 0 where the layer has no entries; with `capacity`, where every query sees every slot.
        history: raw keys before the first query's own.
        capacity: slots, where they are not those of these rows; None for S // m.

    Raises:
        ValueError: `documents` that are none; `sliding_window` below 1 or `compress_ratio`, `history` or `capacity`
            below 0; documents that continue without the history and the capacity they need.
    """

    __no_type_check__ = True  # __post_init__ takes other integers too, and its errors say more

    documents: Documents
    sliding_window: int = dataclasses.field(metadata={"static": True})
    compress_ratio: int = dataclasses.field(default=0, metadata={"static": True})
    history: int = dataclasses.field(default=0, metadata={"static": True})
    capacity: int | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def continuing(
        cls, documents: Documents, sliding_window: int, compress_ratio: int, capacity: int | None
    ) -> Visibility:
        """Of rows from `Documents.continuing`, with as much history as a sliding window reaches back."""
        return cls(documents, sliding_window, compress_ratio, -window_first(0, sliding_window), capacity)

    def __post_init__(self) -> None:
        """Checks the fields; makes the numbers plain `int`."""
        require_static_length("documents", as_documents("documents", self.documents).document_start)
        for name, least in (("sliding_window", 1), ("compress_ratio", 0), ("history", 0), ("capacity", 0)):
            value = getattr(self, name)
            if name != "capacity" or value is not None:
                object.__setattr__(self, name, as_int(name, value, least))
        if self.documents.continues:
            reach = -window_first(0, self.sliding_window)
            if self.history < reach:
                raise ValueError(
                    f"history: expected the sliding_window - 1 = {reach} raw keys before documents that continue, "
                    f"got {self.history}"
                )
            if self.compress_ratio and self.capacity is None:
                raise ValueError("capacity: expected the slots of documents that continue, got None")

    @property
    def slots(self) -> int:
        """C, the number of entry slots; 0 without entries."""
        if self.capacity is not None:
            return self.capacity
        return self.documents.shape[1] // self.compress_ratio if self.compress_ratio else 0

    @property
    def raw_keys(self) -> int:
        """N, the number of raw keys: one a row, after those of the history."""
        return self.history + self.documents.shape[1]

    @property
    def continues(self) -> bool:
        """Statically known: keys are not all of these rows."""
        return self.documents.continues or self.history > 0 or self.capacity is not None

    @property
    def window_range(self) -> tuple[Int32[Array, "B S"], Int32[Array, "B S"]]:
        """int32 [B, S] twice: first raw key seen and one past the last, of `raw_keys`."""
        return self._window_range(self.documents.document_start, 0)

    @property
    def entry_range(self) -> tuple[Int32[Array, "B S"], Int32[Array, "B S"]]:
        """int32 [B, S] twice: first slot seen and one past the last."""
        return self._entry_range(self.documents.document_start, 0)

    def tile(self, row: int | Int32[Array, ""], size: int) -> TileRanges:
        """The ranges of the queries at rows [row, row + size), for kernels that go tile by tile.

        Args:
            row: first row, an int or a traced scalar; row + size <= S.
            size: queries, static.

        Returns:
            int32 [B, size] each, or [1, size] where every row is known to be one document: then they follow from the
            row numbers, and no data is read.
        """
        if self.documents.is_unpacked:
            start = jnp.zeros((1, size), jnp.int32)
        else:
            start = jax.lax.dynamic_slice_in_dim(self.documents.document_start, row, size, axis=1)
        return TileRanges(*self._window_range(start, row), *self._entry_range(start, row))

    def _window_range(self, start: Array, row: int | Array) -> tuple[Array, Array]:
        rows = row + jax.lax.broadcasted_iota(jnp.int32, start.shape, 1)
        first = window_first(rows, self.sliding_window)
        return jnp.maximum(start, first) + self.history, rows + 1 + self.history

    def _entry_range(self, start: Array, row: int | Array) -> tuple[Array, Array]:
        if not self.compress_ratio:
            return jnp.zeros_like(start), jnp.full_like(start, self.slots)
        rows = row + jax.lax.broadcasted_iota(jnp.int32, start.shape, 1)
        first = start // self.compress_ratio if self.capacity is None else jnp.zeros_like(start)
        return first, first + complete_windows(rows - start, self.compress_ratio)

    @property
    def window_counts(self) -> Int32[Array, "B S"]:
        """int32 [B, S]: raw keys each query sees."""
        first, end = self.window_range
        return end - first

    @property
    def entry_counts(self) -> Int32[Array, "B S"]:
        """int32 [B, S]: entries each query sees, before any selection."""
        first, end = self.entry_range
        return end - first

    @property
    def slot_document_start(self) -> Int32[Array, "B C"]:
        """int32 [B, C]: `document_start` of the document whose windows own the slot; -1 for padding.

        Raises:
            ValueError: documents that are not known to start at multiples of m. There a slot's window may begin
                anywhere in its m rows; `WindowLayout` knows where.
        """
        start = jnp.where(self.documents.is_padding, -1, self.documents.document_start)
        if not self.compress_ratio:
            return start[:, :0]
        if not self.documents.is_aligned(self.compress_ratio):
            raise ValueError(
                f"documents: expected an alignment of {self.compress_ratio}, got {self.documents.alignment}"
            )
        return start[:, : self.slots * self.compress_ratio : self.compress_ratio]

    def window_mask(self) -> Bool[Array, "B S N"]:
        """bool [B, S, N], True where query (row) sees raw key (column). Quadratic: for tests, pictures, `dense`."""
        return _in_range(self.window_range, self.raw_keys)

    def entry_mask(self) -> Bool[Array, "B S C"]:
        """bool [B, S, C], True where query (row) sees entry (column). Quadratic: for tests, pictures, `dense`."""
        return _in_range(self.entry_range, self.slots)

    def dense(self) -> Bool[Array, "B S M"]:
        """bool [B, S, M], M = N + C: `window_mask` and `entry_mask` side by side."""
        return jnp.concatenate([self.window_mask(), self.entry_mask()], axis=-1)

    def sees_slots(self, slots: Int32[Array, "B S K"]) -> Bool[Array, "B S K"]:
        """bool [B, S, K]: whether each query sees each of its own K slots; False for -1 and out of range."""
        first, end = self.entry_range
        return (slots >= first[:, :, None]) & (slots < end[:, :, None])

    def seen_slots(self, slots: Int[Array, "B S K"]) -> Int32[Array, "B S K"]:
        """int32 [B, S, K]: each slot that the query sees once, -1 in all other places, in no certain order.

        The rule of every op that takes indices: -1, slots out of range and slots that the query does not see are
        ignored, and a duplicate counts once.
        """
        none = self.slots
        slots = narrowed(slots, -1, none)
        slots = jnp.where(self.sees_slots(slots), slots, none)
        ascending = (slots[..., 1:] >= slots[..., :-1]).all()  # as the indexer emits them: no sort needed
        slots = jax.lax.cond(ascending, lambda i: i, lambda i: jnp.sort(i, axis=-1), slots)
        repeated = jnp.pad(slots[..., 1:] == slots[..., :-1], ((0, 0), (0, 0), (1, 0)))
        return jnp.where(repeated | (slots == none), -1, slots)


def as_visibility(value: object) -> Visibility:
    """A visibility whose documents keep the law, as far as can be seen, or a ValueError."""
    if not isinstance(value, Visibility):
        raise ValueError(f"visibility: expected a Visibility, got {described(value)}; it is no mask")
    as_documents("visibility.documents", value.documents)
    return value


def _in_range(bounds: tuple[Array, Array], size: int) -> Array:
    first, end = bounds
    index = jnp.arange(size, dtype=jnp.int32)[None, None]
    return (index >= first[..., None]) & (index < end[..., None])
