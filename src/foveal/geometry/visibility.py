"""Who sees what: two contiguous ranges per query, one of raw keys and one of entry slots."""

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
    """Half-open ranges that a tile of queries sees: int32 [B, T] each, or [1, T] if equal in every batch row."""

    window_first: Int32[Array, "B T"]
    window_end: Int32[Array, "B T"]
    entry_first: Int32[Array, "B T"]
    entry_end: Int32[Array, "B T"]

    @property
    def slots(self) -> tuple[Int32[Array, ""], Int32[Array, ""]]:
        """First slot and one past the last that any query of the tile sees; equal if there is none."""
        return union(self.entry_first, self.entry_end)

    def slot_blocks(self, size: int) -> tuple[Int32[Array, ""], Int32[Array, ""]]:
        """The first block of `size` slots, and one past the last, that any query of the tile sees."""
        first, end = self.slots
        return first // size, -(-end // size)

    def sees_keys(self, first_key: int | Int32[Array, ""], count: int) -> Bool[Array, "B T count"]:
        """bool [B, T, count] or [1, T, count]: whether each query sees raw keys [first_key, first_key + count)."""
        return _in_range(self[:2], count, first_key)

    def sees(self, first_slot: int | Int32[Array, ""], count: int) -> Bool[Array, "B T count"]:
        """bool [B, T, count] or [1, T, count]: whether each query sees slots [first_slot, first_slot + count)."""
        return _in_range(self[2:], count, first_slot)


def union(first: Array, end: Array, axis: int | None = None) -> tuple[Array, Array]:
    """The smallest range that contains ranges [first, end), over one axis or all; empty ones count for nothing."""
    some = first < end
    last = jnp.where(some, end, 0).max(axis=axis, keepdims=True)
    return jnp.where(some, first, last).min(axis=axis), last.squeeze(axis)


T = TypeVar("T", int, np.ndarray, jax.Array)


def window_first(row: T, sliding_window: int) -> T:
    """First row of the sliding window of the query at `row`, negative near row 0. The last is `row` itself."""
    return row - (sliding_window - 1)


def max_history(sliding_window: int) -> int:
    """Largest number of raw keys before its own row that a query may see."""
    return -window_first(0, sliding_window)


def complete_windows(position: T, compress_ratio: int) -> T:
    """Number of entries of its own document that a token at `position` sees: one per window that ends by then."""
    return (position + 1) // compress_ratio


class EntryRange(NamedTuple):
    """The slots that queries see, and the number of slots. Static; build it with `of_rows` or `all`.

    Attributes:
        compress_ratio: m: a query sees the entries of its own document's complete windows; 0: it sees all slots.
        slots: C; None for S // m, the slots that S rows can fill.
    """

    compress_ratio: int
    slots: int | None

    @classmethod
    def of_rows(cls, compress_ratio: int, slots: int | None = None) -> EntryRange:
        """Entries of those windows of the query's document that end at or before the query.

        Args:
            compress_ratio: m.
            slots: C, if the entries are those of a longer row that these rows continue.

        Raises:
            ValueError: `compress_ratio` below 1 or `slots` below 0.
        """
        ratio = as_int("compress_ratio", compress_ratio, 1)
        return cls(ratio, None if slots is None else as_int("slots", slots, 0))

    @classmethod
    def all(cls, slots: int) -> EntryRange:
        """All `slots` entries, for every query; indices say which ones it uses.

        Raises:
            ValueError: `slots` below 0.
        """
        return cls(0, as_int("slots", slots, 0))

    def bounds(self, start: Array, row: Array) -> tuple[Array, Array]:
        """First slot and one past the last that the query at `row` sees, in a document that begins at `start`.

        Padding, whose `start` is beyond `row`, sees [0, 0).
        """
        if not self.compress_ratio:
            return jnp.zeros_like(start), jnp.where(start > row, 0, self.slots or 0)
        first = jnp.where(start > row, 0, start // self.compress_ratio)
        return first, first + complete_windows(row - start, self.compress_ratio)


@checked_pytree
@dataclasses.dataclass(frozen=True, init=False)
class Visibility:
    """The keys that each query sees: a range of raw rows and a range of entry slots.

    With d = document_start[t] and p = t - d, the query at row t sees

    * rows [max(d, t - W + 1), t], the sliding window: at most W keys, the query's own included;
    * slots [d // m, d // m + (p + 1) // m), the entries of its document's windows that end at or before t.

    A padding row has d = t + 1, so both ranges are empty. (DeepSeek-V4 technical report, arXiv 2606.19348, sections on
    causality and packed sequences; the entry that a window's last token completes is visible to that token.)

    If these rows are part of a longer row (`Documents.first_row`), the same holds in the longer row's numbering: the
    raw keys begin `history` rows before the first query's own, and the entries are those of the longer row.

    Args:
        documents: where the documents begin.
        sliding_window: W >= 1.
        compress_ratio: m >= 1, or 0 where the layer has no entries: short for `EntryRange.of_rows(m)`.
        entries: an `EntryRange`, instead of `compress_ratio`.
        history: raw keys before the first query's own.

    Attributes:
        documents: where the documents begin.
        sliding_window: W.
        entries: the slots that queries see; None without entries.
        history: raw keys before the first query's own.

    Raises:
        ValueError: `documents` that are not `Documents`; `sliding_window` below 1, `compress_ratio` or `history` below
            0; a slice of a longer row without the history and the number of slots that it needs.
        NotImplementedError: a symbolic S.
    """

    __no_type_check__ = True  # __init__ also takes other integers, and its errors say more

    documents: Documents
    sliding_window: int = dataclasses.field(metadata={"static": True})
    entries: EntryRange | None = dataclasses.field(
        default=None, metadata={"static": True, "read": lambda fields: fields and EntryRange(*fields)}
    )
    history: int = dataclasses.field(default=0, metadata={"static": True})

    def __init__(
        self,
        documents: Documents,
        sliding_window: int,
        compress_ratio: int = 0,
        *,
        entries: EntryRange | None = None,
        history: int = 0,
    ) -> None:
        require_static_length("documents", as_documents("documents", documents).document_start)
        window, ratio = as_int("sliding_window", sliding_window, 1), as_int("compress_ratio", compress_ratio, 0)
        if entries is not None and (ratio or not isinstance(entries, EntryRange)):
            got = f"{described(entries)} and compress_ratio {ratio}" if ratio else described(entries)
            raise ValueError(f"entries: expected an EntryRange, in the place of compress_ratio, got {got}")
        if ratio:
            entries = EntryRange.of_rows(ratio)
        elif entries is not None:
            own, slots = entries
            entries = EntryRange.of_rows(own, slots) if own else EntryRange.all(slots)  # pyright: ignore[reportArgumentType]
        history = as_int("history", history, 0)
        if documents.continues:
            reach = max_history(window)
            if history < reach:
                raise ValueError(
                    f"history: expected the sliding_window - 1 = {reach} raw keys before documents that continue, "
                    f"got {history}"
                )
            if entries is not None and entries.slots is None:
                raise ValueError("entries: expected a number of slots for documents that continue, got slots=None")
        self.__dict__.update(documents=documents, sliding_window=window, entries=entries, history=history)

    @classmethod
    def made(cls, documents: Documents, sliding_window: int, entries: EntryRange | None, history: int) -> Visibility:
        """Build from checked parts, without checks."""
        made = object.__new__(cls)
        made.__dict__.update(documents=documents, sliding_window=sliding_window, entries=entries, history=history)
        return made

    @classmethod
    def continuing(cls, documents: Documents, sliding_window: int, entries: EntryRange | None = None) -> Visibility:
        """Visibility for rows from `Documents.continuing`, with as much history as a sliding window reaches back.

        Raises:
            ValueError: as the constructor.
        """
        return cls(documents, sliding_window, entries=entries, history=max_history(sliding_window))

    @property
    def compress_ratio(self) -> int:
        """m; 0 if the layer has no entries, or every query sees all of them."""
        return 0 if self.entries is None else self.entries.compress_ratio

    @property
    def slots(self) -> int:
        """C, the number of entry slots; 0 without entries."""
        if self.entries is None:
            return 0
        return self.documents.shape[1] // self.compress_ratio if self.entries.slots is None else self.entries.slots

    @property
    def raw_keys(self) -> int:
        """N, the number of raw keys: one per row, after those of the history."""
        return self.history + self.documents.shape[1]

    @property
    def continues(self) -> bool:
        """Whether some keys, raw or entries, may come from other rows than these; static."""
        own_entries = self.entries is None or self.entries.slots is None
        return self.documents.continues or self.history > 0 or not own_entries

    def with_entries(self, entries: EntryRange) -> Visibility:
        """Return the same rows and raw keys with other entries."""
        return Visibility.made(self.documents, self.sliding_window, entries, self.history)

    @property
    def ranges(self) -> TileRanges:
        """`window_range` and `entry_range` together."""
        return self._ranges(self.documents.document_start, 0)

    @property
    def window_range(self) -> tuple[Int32[Array, "B S"], Int32[Array, "B S"]]:
        """First raw key seen and one past the last, of `raw_keys`: int32 [B, S] each."""
        return self.ranges[:2]

    @property
    def entry_range(self) -> tuple[Int32[Array, "B S"], Int32[Array, "B S"]]:
        """First slot seen and one past the last: int32 [B, S] each."""
        return self.ranges[2:]

    def tile(self, row: int | Int32[Array, ""], size: int) -> TileRanges:
        """The ranges of the queries at rows [row, row + size), for kernels that go tile by tile.

        Args:
            row: first row, an int or a traced scalar; row + size <= S.
            size: queries, static.

        Returns:
            int32 [B, size] each, or [1, size] if every row is known to be one document: they then follow from the row
            numbers, and no data is read.
        """
        if self.documents.is_unpacked:
            start = jnp.zeros((1, size), jnp.int32)
        else:
            start = jax.lax.dynamic_slice_in_dim(self.documents.document_start, row, size, axis=1)
        return self._ranges(start, row)

    def _ranges(self, start: Array, row: int | Array) -> TileRanges:
        """Ranges of the queries [row, row + T); `start` [B or 1, T] is their `document_start`."""
        own = row + jax.lax.broadcasted_iota(jnp.int32, start.shape, 1)
        before = self.documents.first_row
        rows, first_key = (own, -self.history) if before is None else (before + own, before - self.history)
        first = jnp.maximum(start, window_first(rows, self.sliding_window)) - first_key
        none = jnp.zeros_like(start)
        slots = (none, none) if self.entries is None else self.entries.bounds(start, rows)
        return TileRanges(first, own + 1 + self.history, *slots)

    @property
    def window_counts(self) -> Int32[Array, "B S"]:
        """int32 [B, S]: number of raw keys that each query sees."""
        first, end = self.window_range
        return end - first

    @property
    def entry_counts(self) -> Int32[Array, "B S"]:
        """int32 [B, S]: number of entries that each query sees, before any selection."""
        first, end = self.entry_range
        return end - first

    @property
    def slot_document_start(self) -> Int32[Array, "B C"]:
        """int32 [B, C]: `document_start` of the document whose windows own the slot; -1 for padding.

        Raises:
            ValueError: documents that have a `first_row`, or are not known to start at multiples of m. In the latter
                case a slot's window may begin anywhere in its m rows; `WindowLayout` says where.
        """
        start = jnp.where(self.documents.is_padding, -1, self.documents.document_start)
        if not self.compress_ratio:
            return start[:, :0]
        if self.documents.continues:
            raise ValueError("documents: expected documents without first_row, got a slice of a longer row")
        if not self.documents.is_aligned(self.compress_ratio):
            raise ValueError(
                f"documents: expected an alignment of {self.compress_ratio}, got {self.documents.alignment}"
            )
        return start[:, : self.slots * self.compress_ratio : self.compress_ratio]

    def window_mask(self) -> Bool[Array, "B S N"]:
        """bool [B, S, N], True where query (row) sees raw key (column). Quadratic: for tests, pictures, `dense`."""
        return _in_range(self.window_range, self.raw_keys)

    def entry_mask(self, indices: Int32[Array, "B S K"] | None = None) -> Bool[Array, "B S C"]:
        """bool [B, S, C], True where query (row) sees entry (column) and, if indices are given, has selected it.

        Quadratic: for tests, pictures, `dense`.
        """
        mask = _in_range(self.entry_range, self.slots)
        return mask if indices is None else mask & membership(indices, self.slots)

    def dense(self) -> Bool[Array, "B S M"]:
        """bool [B, S, M], M = N + C: `window_mask` and `entry_mask` side by side."""
        return jnp.concatenate([self.window_mask(), self.entry_mask()], axis=-1)

    def sees_slots(self, slots: Int32[Array, "B S K"]) -> Bool[Array, "B S K"]:
        """bool [B, S, K]: whether each query sees each of its own K slots; False for -1 and out of range."""
        first, end = self.entry_range
        return (slots >= first[:, :, None]) & (slots < end[:, :, None])

    def seen_slots(self, slots: Int[Array, "B S K"]) -> Int32[Array, "B S K"]:
        """int32 [B, S, K]: the distinct slots that each query sees, in unspecified order, and -1 elsewhere.

        This is the rule of every op that takes indices: -1, slots out of range and slots that the query does not see
        are ignored, and a duplicate counts once.
        """
        none = self.slots
        slots = narrowed(slots, -1, none)
        slots = jnp.where(self.sees_slots(slots), slots, none)
        ascending = (slots[..., 1:] >= slots[..., :-1]).all()  # as the indexer emits them: no sort needed
        slots = jax.lax.cond(ascending, _as_they_are, _in_order, slots)
        repeated = jnp.pad(slots[..., 1:] == slots[..., :-1], ((0, 0), (0, 0), (1, 0)))
        return jnp.where(repeated | (slots == none), -1, slots)


# Not lambdas: eager calls would compile a program each.
def _as_they_are(slots: Array) -> Array:
    return slots


def _in_order(slots: Array) -> Array:
    return jnp.sort(slots, axis=-1)


def membership(indices: Int32[Array, "B T K"], slots: int) -> Bool[Array, "B T C"]:
    """bool [B, T, slots]: whether each slot is among the indices [B, T, K]; indices out of range are ignored.

    This maps over batch and queries instead of indexing by them, which leaves a sharded batch in place.
    """
    target = jnp.where((indices < 0) | (indices >= slots), slots, indices)  # an extra column collects invalid ones
    return jax.vmap(jax.vmap(lambda t: jnp.zeros(slots + 1, bool).at[t].set(True)))(target)[..., :slots]


def as_visibility(value: object) -> Visibility:
    """Return `value` as a `Visibility`, its documents checked as far as they are concrete, or raise ValueError."""
    if not isinstance(value, Visibility):
        raise ValueError(f"visibility: expected a Visibility, got {described(value)}; masks are not supported")
    as_documents("visibility.documents", value.documents)
    return value


def _in_range(bounds: tuple[Array, Array], size: int, start: int | Array = 0) -> Array:
    """bool [B, T, size]: whether each of [start, start + size) lies in each query's half-open range."""
    first, end = bounds
    index = start + jnp.arange(size, dtype=jnp.int32)[None, None]
    return (index >= first[..., None]) & (index < end[..., None])
