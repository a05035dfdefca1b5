"""The documents of a batch: where each token's document begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from foveal.checks import as_bool, as_int, as_integers, as_lengths, as_size, described, on_host, require
from foveal.geometry.pytree import checked_pytree
from foveal.meshes import any_mesh
from foveal.typing import Array, Bool, Int, Int32, Size


@checked_pytree
@dataclasses.dataclass(frozen=True, kw_only=True)
class Documents:
    """The documents of a batch of rows, a pytree: `document_start` and `first_row` are data, the rest is static.

    Build one with `unpacked`, `from_segment_ids`, `from_cu_seqlens`, `from_lengths`, `continuing` or `pack_documents`.
    The constructor takes keywords only: segment ids are not a `document_start`, though many would pass for one.

    Attributes:
        document_start: int32 [B, S]: for each token, the index in its batch row at which its document begins. Padding
            at index t has t + 1: it sees nothing, and no window starts there.
        first_row: int32, a scalar or [B, 1]; set if these are only tokens [first_row, first_row + S) of a longer row.
            `document_start` then counts from that row's start, so a document may have begun earlier. None otherwise.
        alignment: every document is known to start at a multiple of this: 1 if nothing is known, 0 if every document
            starts at row 0. Static, because a backend that needs aligned documents must know it while tracing.
        padded: whether there may be padding rows. Static.

    Raises:
        ValueError: a field of the wrong type, or a positional one. If `document_start` is concrete, also a row that
            neither starts a document, nor continues that of the row before, nor is padding; or starts that contradict
            the static fields. Traced starts are not checked.
    """

    __no_type_check__ = True  # __post_init__ also takes other integers and NumPy arrays; its errors say more

    document_start: Int32[Array, "B S"]
    first_row: Int32[Array, "..."] | None = None
    alignment: int = dataclasses.field(default=1, metadata={"static": True})
    padded: bool = dataclasses.field(default=True, metadata={"static": True})

    def __new__(cls, *unnamed: object, **_: object) -> Documents:
        """Refuse positional fields."""
        if unnamed:
            raise ValueError(
                f"document_start: expected a keyword argument, got {described(unnamed[0])} by position; "
                "segment ids go to Documents.from_segment_ids"
            )
        return object.__new__(cls)

    def __post_init__(self) -> None:
        """Check every field; make the arrays int32 and the static fields plain `int` and `bool`."""
        alignment, padded = as_int("alignment", self.alignment, 0), as_bool("padded", self.padded)
        starts, first = self.document_start, self.first_row
        concrete, concrete_first = None, np.zeros((), np.int32)
        if not isinstance(starts, jax.ShapeDtypeStruct):
            starts, concrete = as_integers("document_start", starts, ndims=(2,))
        if first is not None:
            if isinstance(first, jax.ShapeDtypeStruct):
                concrete_first = None
            else:
                first, concrete_first = as_integers("first_row", first, ndims=(0, 2))
            if first.shape not in ((), (starts.shape[0], 1)):
                raise ValueError(f"first_row: expected a scalar or [B, 1] = {(starts.shape[0], 1)}, got {first.shape}")
        _check_law(concrete, concrete_first, alignment, padded=padded)
        fields = {"document_start": starts, "first_row": first, "alignment": alignment, "padded": padded}
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_is_checked", True)

    @classmethod
    def _made(
        cls, starts: Array, first_row: Array | None = None, *, alignment: int = 1, padded: bool = True
    ) -> Documents:
        """Build from starts that are valid by construction, without checks."""
        made, checked = object.__new__(cls), {"_is_checked": True}
        made.__dict__.update(document_start=starts, first_row=first_row, alignment=alignment, padded=padded, **checked)
        return made

    def checked(self) -> Documents:
        """Return these documents, checked as far as they are concrete: a pytree that JAX rebuilt may hold anything.

        Raises:
            ValueError: as the constructor.
        """
        if not hasattr(self, "_is_checked"):
            starts = self.document_start
            if len(getattr(starts, "shape", ())) != 2 or starts.dtype != jnp.int32:
                raise ValueError(f"documents: expected a document_start of int32 [B, S], got {described(starts)}")
            first = self.first_row
            if first is not None and (first.dtype != jnp.int32 or first.shape not in ((), (starts.shape[0], 1))):
                raise ValueError(
                    f"documents: expected a first_row of int32, a scalar or [B, 1], got {described(first)}"
                )
            first = np.zeros((), np.int32) if first is None else on_host(first)
            _check_law(on_host(starts), first, self.alignment, padded=self.padded)
            object.__setattr__(self, "_is_checked", True)  # not a field: pytrees rebuilt from this object lack it
        return self

    @classmethod
    def unpacked(cls, batch: Size, length: Size) -> Documents:
        """One document per row, which starts at row 0 and fills the row.

        Raises:
            ValueError: `batch` or `length` is neither an int >= 0 nor a symbolic dimension.
        """
        return cls.whole(as_size("batch", batch), as_size("length", length))

    @classmethod
    def whole(cls, batch: Size, length: Size) -> Documents:
        """`unpacked` for checked sizes."""
        return cls._made(jnp.zeros((batch, length), jnp.int32), alignment=0, padded=False)

    @classmethod
    @any_mesh(like="segment_ids")
    def from_segment_ids(
        cls, segment_ids: Int[Array, "B S"] | np.ndarray | Sequence[Sequence[int]], *, alignment: int = 1
    ) -> Documents:
        """Documents from segment ids: the maximal runs of one nonzero id; id 0 is padding anywhere in a row.

        Args:
            segment_ids: integers [B, S], not negative. May be traced; their values are then not checked.
            alignment: the caller's promise that every document starts at a multiple of it (0: at row 0).

        Raises:
            ValueError: wrong rank or dtype; where the ids are concrete, a negative id or a broken promise.
        """
        alignment = as_int("alignment", alignment, 0)
        narrow, concrete = as_integers("segment_ids", segment_ids, ndims=(2,))
        # Traced ids are compared in their own width: narrowing could make different ids equal, or turn one into 0.
        ids = narrow if concrete is not None else jnp.asarray(segment_ids)
        require("segment_ids", concrete, lambda a: a >= 0, "no negative id (0 is padding)")
        if concrete is not None:
            rows = np.arange(concrete.shape[1])
            begins = np.pad(concrete[:, 1:] != concrete[:, :-1], ((0, 0), (1, 0)), constant_values=True)
            _check_alignment(np.broadcast_to(rows, concrete.shape)[begins[:, : rows.size] & (concrete > 0)], alignment)
        row = jax.lax.broadcasted_iota(jnp.int32, ids.shape, 1)
        starts = jnp.ones(ids.shape, bool).at[:, 1:].set(ids[:, 1:] != ids[:, :-1])
        begun = jax.lax.cummax(jnp.where(starts, row, 0), axis=1)
        return cls._made(jnp.where(ids == 0, row + 1, begun), alignment=alignment)

    @classmethod
    @any_mesh(like="cu_seqlens", dims=1)
    def from_cu_seqlens(
        cls,
        cu_seqlens: Int[Array, "*B ends"] | np.ndarray | Sequence[int] | Sequence[Sequence[int]],
        length: int,
        *,
        alignment: int = 1,
    ) -> Documents:
        """Documents from cumulative lengths, as variable-length attention kernels take them.

        Args:
            cu_seqlens: integers [N + 1] for one row or [B, N + 1]: 0 first, then the end of each document. Repeated
                values are empty documents; rows from the last value on are padding. May be traced.
            length: S, the static number of rows.
            alignment: the caller's promise that every document starts at a multiple of it (0: at row 0).

        Raises:
            ValueError: wrong rank or dtype; where the values are concrete, a first value that is not 0, a decreasing
                sequence, a document beyond `length`, or a broken promise.
        """
        length, alignment = as_int("length", length, 0), as_int("alignment", alignment, 0)
        ends, concrete = as_integers("cu_seqlens", cu_seqlens, ndims=(1, 2))
        if ends.shape[-1] < 1:
            raise ValueError(f"cu_seqlens: expected at least the leading 0, got shape {ends.shape}")
        check_cu_seqlens(concrete, length)
        if concrete is not None:
            _check_alignment(concrete[..., :-1][np.diff(concrete) > 0], alignment)
        ends = ends if ends.ndim == 2 else ends[None]
        rows = jnp.arange(length, dtype=jnp.int32)
        which = jax.vmap(lambda e: jnp.searchsorted(e, rows, side="right"))(ends).astype(jnp.int32)
        inside = (which > 0) & (which < ends.shape[-1])
        begun = jnp.take_along_axis(ends, jnp.maximum(which - 1, 0), axis=1)
        return cls._made(jnp.where(inside, begun, rows[None] + 1), alignment=alignment)

    @classmethod
    @any_mesh(like="lengths", dims=1)
    def from_lengths(
        cls,
        lengths: Int[Array, "*B documents"] | np.ndarray | Sequence[int] | Sequence[Sequence[int]],
        length: int,
        *,
        alignment: int | None = None,
    ) -> Documents:
        """Documents from their lengths: side by side from row 0 on, the rest padding.

        Args:
            lengths: integers, not negative, 0 for no document: [B] for one right-padded document per row, or [B, N]
                for the documents of each row from left to right. May be traced.
            length: S, the static number of rows.
            alignment: the caller's promise, as in `from_segment_ids`. One document per row always starts at row
                0, so it defaults to 0 for [B] and to 1 for [B, N].

        Raises:
            ValueError: wrong rank or dtype; where the values are concrete, a negative length, or more than `length`
                rows in all.
        """
        length = as_int("length", length, 0)
        each, concrete = as_integers("lengths", lengths, ndims=(1, 2))
        if alignment is None:
            alignment = 0 if each.ndim == 1 else 1
        require("lengths", concrete, lambda a: a >= 0, "no negative length")
        one_each = each.ndim == 1
        if concrete is not None:
            each = concrete[:, None] if one_each else concrete
            require("lengths", each.sum(1, dtype=np.int64), lambda a: a <= length, f"at most {length} rows in all")
            ends = np.pad(np.cumsum(each, axis=1, dtype=np.int32), ((0, 0), (1, 0)))
        else:
            each = jnp.clip(each[:, None] if one_each else each, 0, length)  # so that no sum wraps
            ends = jnp.pad(jnp.cumsum(each, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
        return cls.from_cu_seqlens(ends, length, alignment=alignment)

    @classmethod
    @any_mesh(like="lengths", dims=1)
    def continuing(
        cls,
        lengths: Int[Array, " B"] | np.ndarray | Sequence[int],
        counts: Int[Array, " B"] | np.ndarray | Sequence[int],
        size: int,
    ) -> Documents:
        """One document per batch row, of which these are the next tokens, right-padded to `size`.

        They are tokens [lengths, lengths + size) of the document. What they see depends on earlier tokens, so they need
        a `Visibility` with `history` and a number of slots, and a layout from `WindowLayout.continuing`.

        Args:
            lengths: integers [B], number of earlier tokens. May be traced.
            counts: integers [B], number of new tokens, at most `size`; the rest is padding. May be traced.
            size: S, static.

        Raises:
            ValueError: wrong shape or dtype; `size` not an int >= 0; a negative number or a count above `size`, except
                in JAX arrays, whose values are not fetched.
        """
        size = as_int("size", size, 0)
        lengths, before = as_lengths("lengths", lengths, None, fetch=False)
        counts, fresh = as_lengths("counts", counts, lengths.shape[0], fetch=False)
        require("lengths", before, lambda a: a >= 0, "no negative length")
        require("counts", fresh, lambda a: (a >= 0) & (a <= size), f"0 to {size}")
        return cls.made(lengths, counts, size)

    @classmethod
    def made(cls, lengths: Array, counts: Array, size: int) -> Documents:
        """`continuing` for checked int32 lengths and counts."""
        row, first = jnp.arange(size, dtype=jnp.int32)[None], lengths[:, None]
        return cls._made(jnp.where(row < counts[:, None], 0, first + row + 1), first, alignment=0)

    @property
    def shape(self) -> tuple[Size, Size]:
        """(B, S)."""
        batch, length = self.document_start.shape
        return batch, length

    @property
    def continues(self) -> bool:
        """Whether these rows are part of a longer row, so that documents may have begun before them; static."""
        return self.first_row is not None

    @property
    def is_unpacked(self) -> bool:
        """Whether every row is known to be one document that fills it, so all follows from the row number; static."""
        return self.alignment == 0 and not self.padded and self.first_row is None

    @property
    def positions(self) -> Int32[Array, "B S"]:
        """int32 [B, S]: each token's position in its document; -1 on padding rows."""
        return self._rows - self.document_start

    @property
    def is_padding(self) -> Bool[Array, "B S"]:
        """bool [B, S]: whether each row belongs to no document."""
        return self.document_start > self._rows

    def is_aligned(self, multiple: int) -> bool:
        """Whether every document is known to start at a multiple of `multiple`; static.

        Raises:
            ValueError: `multiple` is not an int >= 1.
        """
        if type(multiple) is not int or multiple < 1:
            multiple = as_int("multiple", multiple, 1)
        return self.alignment % multiple == 0

    @property
    def _rows(self) -> Int32[Array, "B S"]:
        row = jax.lax.broadcasted_iota(jnp.int32, self.document_start.shape, 1)
        return row if self.first_row is None else self.first_row + row


def as_documents(name: str, value: object) -> Documents:
    """Return `value` as `Documents`, checked as far as they are concrete, or raise ValueError."""
    if not isinstance(value, Documents):
        raise ValueError(
            f"{name}: expected Documents, got {described(value)}; segment ids go to Documents.from_segment_ids"
        )
    return value.checked()


def check_cu_seqlens(ends: np.ndarray | None, length: int) -> None:
    """Raise ValueError if the ends of documents, [..., N + 1], are concrete and do not fit `length` rows."""
    if ends is not None:
        first = np.arange(ends.shape[-1]) == 0
        require("cu_seqlens", ends, lambda a: ~first | (a == 0), "0 as the first value")
        require("cu_seqlens", ends, lambda a: first | (a >= np.roll(a, 1, axis=-1)), "values that never decrease")
        require("cu_seqlens", ends, lambda a: a <= length, f"an end within the {length} rows")


def _check_law(starts: np.ndarray | None, first: np.ndarray | None, alignment: int, *, padded: bool) -> None:
    """Check concrete starts [B, S] of the rows from `first` on against the rules of `Documents`."""
    if starts is None or first is None or not starts.size:
        return
    row = first + np.arange(starts.shape[1])[None]
    padding, before = starts == row + 1, np.roll(starts, 1, axis=1)
    lawful = padding | (starts == row) | (starts == before)
    lawful[:, 0] = (starts[:, 0] >= 0) & (starts[:, 0] <= np.broadcast_to(row, starts.shape)[:, 0] + 1)
    expected = "t where a document starts, row t - 1's start where it goes on, t + 1 on padding"
    require("document_start", starts, lambda _: lawful, expected, "; segment ids go to Documents.from_segment_ids")
    if not padded:
        require("padded", starts, lambda _: ~padding, "True where there are padding rows", " of document_start")
    _check_alignment(starts[~padding], alignment)


def _check_alignment(starts: np.ndarray, alignment: int) -> None:
    """Check the promised alignment of the rows at which documents begin."""
    broken = starts[starts % alignment != 0] if alignment else starts[starts != 0]
    if broken.size:
        raise ValueError(
            f"alignment: expected every document to start at a multiple of {alignment}, "
            f"got one that starts at row {broken[0]}"
        )
