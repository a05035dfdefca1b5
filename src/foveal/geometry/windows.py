"""The windows of rows that form the entries."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from foveal.checks import as_array, as_int, as_lengths, described, require_static_length
from foveal.geometry.documents import Documents, as_documents
from foveal.meshes import any_mesh
from foveal.typing import Array, Bool, Int, Int32, Shaped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowLayout:
    """The windows of m tokens that a compressor turns into entries, by slot. Build it with `of`.

    A document's windows start at its first token, and only complete ones count (DeepSeek-V4 technical report, arXiv
    2606.19348: every packed sequence is compressed independently). The window that starts at row s owns slot s // m.
    If rows continue a document (`continuing`), the slots are instead the windows that they complete, in order.

    Attributes:
        start: int32 [B, C], first row of the slot's window; any row where not `valid`.
        valid: bool [B, C], whether the slot holds a complete window of one document.
        positions: int32 [B, C], position of the window's first token in its document, a multiple of m; 0 where not
            `valid`. It is the entry's position for RoPE.
        rows: S, the number of rows. Static.
        ratio: m, tokens per window. Static.
        contiguous: whether slot c's window is known to be rows [c m, c m + m): gathering is then a reshape. Static.
        complete: whether every slot is known to be `valid`. Static.
    """

    __no_type_check__ = True  # JAX also builds pytrees of placeholders, to which annotations do not apply

    start: Int32[Array, "B C"]
    valid: Bool[Array, "B C"]
    positions: Int32[Array, "B C"]
    rows: int = dataclasses.field(metadata={"static": True})
    ratio: int = dataclasses.field(metadata={"static": True})
    contiguous: bool = dataclasses.field(metadata={"static": True})
    complete: bool = dataclasses.field(metadata={"static": True})

    @classmethod
    @any_mesh(like="documents", dims=1)
    def of(cls, documents: Documents, ratio: int) -> WindowLayout:
        """Windows of `ratio` tokens in `documents`: C = S // ratio slots, none for rows shorter than a window.

        Raises:
            ValueError: `ratio` below 1, `documents` that are not `Documents`, or that have a `first_row`.
            NotImplementedError: a symbolic S.
        """
        ratio = as_int("ratio", ratio, 1)
        documents = as_documents("documents", documents)
        require_static_length("documents", documents.document_start)
        if documents.continues:
            raise ValueError("documents: expected documents without first_row, got a slice of a longer row")
        return cls.made(documents, ratio)

    @classmethod
    def made(cls, documents: Documents, ratio: int) -> WindowLayout:
        """`of` for checked documents.

        The window of slot c starts in [c m, c m + m - 1], so it always contains row c m + m - 1. The document of that
        row determines the slot's window, without any search or scatter. Two complete windows never share a slot,
        since their starts are at least m rows apart.
        """
        begins, length = documents.document_start, documents.shape[1]
        slots = length // ratio
        probe = jnp.arange(slots, dtype=jnp.int32)[None] * ratio + (ratio - 1)
        begin = begins[:, : slots * ratio].reshape(begins.shape[0], slots, ratio)[:, :, -1]
        offset = (probe - begin) // ratio * ratio
        last = begin + offset + (ratio - 1)
        same_document = jnp.take_along_axis(begins, jnp.clip(last, 0, max(length - 1, 0)), axis=1) == begin
        valid = (begin <= probe) & (last < length) & same_document
        return cls(
            start=begin + offset,
            valid=valid,
            positions=jnp.where(valid, offset, 0),
            rows=length,
            ratio=ratio,
            contiguous=documents.is_aligned(ratio),
            complete=documents.is_unpacked,
        )

    @classmethod
    @any_mesh(like="lengths", dims=1)
    def continuing(
        cls,
        lengths: Int[Array, " B"] | np.ndarray | Sequence[int],
        counts: Int[Array, " B"] | np.ndarray | Sequence[int],
        size: int,
        ratio: int,
        *,
        history: int,
    ) -> WindowLayout:
        """Windows completed by the next `size` tokens of one document per batch row.

        A window may begin before the new tokens, so the input starts with the last `history` earlier ones: index
        `history` is the first new token. Layout slot 0 is the open window, slot j the j-th window after it;
        `entry_slots` maps them to the slots of the whole document.

        Args:
            lengths: integers [B], number of earlier tokens. May be traced.
            counts: integers [B], number of new tokens, at most `size`. May be traced.
            size: new tokens per batch row, padding included; static.
            ratio: m.
            history: earlier tokens in the input, static: at least `window_halo`.

        Raises:
            ValueError: `ratio` below 1, `size` or `history` below 0; lengths or counts that are not integers [B].
        """
        ratio, size, history = as_int("ratio", ratio, 1), as_int("size", size, 0), as_int("history", history, 0)
        lengths, _ = as_lengths("lengths", lengths, None, fetch=False)
        counts, _ = as_lengths("counts", counts, lengths.shape[0], fetch=False)
        return cls.completed(lengths, counts, size, ratio, history)

    @classmethod
    def completed(cls, lengths: Array, counts: Array, size: int, ratio: int, history: int) -> WindowLayout:
        """`continuing` for checked arguments."""
        window = (lengths // ratio)[:, None] + jnp.arange(-(-size // ratio), dtype=jnp.int32)[None]
        position = window * ratio
        valid = position + ratio <= (lengths + counts)[:, None]
        return cls(
            start=position - lengths[:, None] + history,
            valid=valid,
            positions=jnp.where(valid, position, 0),
            rows=history + size,
            ratio=ratio,
            contiguous=False,
            complete=False,
        )

    def entry_slots(self, capacity: int) -> Int32[Array, "B C"]:
        """Slot, among the document's `capacity`, of each window's entry. For layouts made by `continuing`.

        Where not `valid`, slots are past the end and distinct.

        Raises:
            ValueError: `capacity` is not an int >= 0.
        """
        return self.slots_of(as_int("capacity", capacity, 0))

    def slots_of(self, capacity: int) -> Array:
        """`entry_slots` for a checked capacity."""
        nowhere = capacity + jnp.arange(self.slots, dtype=jnp.int32)[None]
        return jnp.where(self.valid, self.positions // self.ratio, nowhere)

    @property
    def slots(self) -> int:
        """C, the number of slots."""
        return self.start.shape[1]

    @property
    def has_previous(self) -> Bool[Array, "B C"]:
        """bool [B, C]: whether the window is valid and not its document's first, so that one comes before it."""
        return self.valid & (self.positions > 0)

    @any_mesh(like="rows", dims=1)
    def at_start(self, rows: Shaped[Array, "B S F"]) -> Shaped[Array, "B C F"]:
        """Gather the first row of each slot's window, [B, S, F] -> [B, C, F]; any row where a slot has no window.

        Raises:
            ValueError: `rows` is not an array [B, S, F] with the layout's B and S.
        """
        rows = self._as_rows(rows)
        if self.contiguous:
            return rows[:, : self.slots * self.ratio : self.ratio]
        index = jnp.clip(self.start, 0, max(rows.shape[1] - 1, 0))
        return jnp.take_along_axis(rows, index[:, :, None], axis=1)

    @any_mesh(like="rows", dims=1)
    def gather(self, rows: Shaped[Array, "B S F"], *, shift: int = 0) -> Shaped[Array, "B C m F"]:
        """Gather the rows of each slot's window, [B, S, F] -> [B, C, m, F].

        Args:
            rows: one vector per row.
            shift: 0 for each slot's own window, -1 for the window before it.

        Slots without such a window get arbitrary rows of the input: mask them by `valid` or `has_previous`.

        Raises:
            ValueError: `rows` is not an array [B, S, F] with the layout's B and S.
        """
        return self.gather_all(self._as_rows(rows), shift=shift)[0]

    def gather_all(self, *arrays: Array, shift: int = 0) -> list[Array]:
        """`gather` for several checked arrays."""
        if self.contiguous:
            windows = [self._windows(rows[:, : self.slots * self.ratio]) for rows in arrays]
            return [jnp.roll(rows, -shift, axis=1) for rows in windows] if shift else windows
        first = self.start + shift * self.ratio
        index = first[:, :, None] + jnp.arange(self.ratio, dtype=jnp.int32)[None, None]
        index = jnp.clip(index, 0, self.rows - 1).reshape(first.shape[0], self.slots * self.ratio, 1)
        return [self._windows(jnp.take_along_axis(rows, index, axis=1)) for rows in arrays]

    def _windows(self, rows: Array) -> Array:
        return rows.reshape(rows.shape[0], self.slots, self.ratio, rows.shape[2])

    def _as_rows(self, rows: Array) -> Array:
        return as_array("rows", rows, "B S F", (self.start.shape[0], self.rows), kind="values")


def as_layout(value: object) -> WindowLayout:
    """Return `value` as a `WindowLayout`, or raise ValueError."""
    if not isinstance(value, WindowLayout):
        raise ValueError(f"layout: expected a WindowLayout, got {described(value)}")
    return value


def window_halo(ratio: int, *, overlap: bool) -> int:
    """Number of earlier rows that an open window may need: its own and, if overlapped, those of the one before."""
    return (2 * ratio if overlap else ratio) - 1
