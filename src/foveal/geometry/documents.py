"""Where each token's document begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from foveal.typing import Array, Bool, Int, Int32, narrowed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Documents:
    """The documents of a batch of rows. A pytree: `document_start` is data, the other fields are static.

    Build one with `unpacked`, `from_segment_ids`, `from_cu_seqlens`, `from_lengths`, `continuing` or `pack_documents`.

    Attributes:
        document_start: int32 [B, S], the row at which token t's document begins, negative if that was before these
            rows; t + 1 on padding rows, which makes everything they could see empty and lets no window start there.
        alignment: every document is known to start at a multiple of this: 1 if nothing is known, 0 if every document
            starts at row 0. Static, because a backend that needs aligned documents must know while tracing.
        padded: whether there may be padding rows. Static.
        continues: documents may have begun before these rows (`continuing`). Static.

    Raises:
        ValueError: `alignment` is not an int >= 0.
    """

    __no_type_check__ = True  # JAX builds pytrees of placeholders too: annotations cannot hold then

    document_start: Int32[Array, "B S"]
    alignment: int = dataclasses.field(default=1, metadata={"static": True})
    padded: bool = dataclasses.field(default=True, metadata={"static": True})
    continues: bool = dataclasses.field(default=False, metadata={"static": True})

    def __post_init__(self) -> None:
        """Checks the static fields; the data may be anything a tree transformation puts there."""
        if isinstance(self.alignment, bool) or not isinstance(self.alignment, int) or self.alignment < 0:
            raise ValueError(f"alignment: expected an int >= 0, got {self.alignment!r}")

    @classmethod
    def unpacked(cls, batch: int, length: int) -> Documents:
        """Every row is one document that starts at row 0 and fills it."""
        return cls(jnp.zeros((batch, length), jnp.int32), alignment=0, padded=False)

    @classmethod
    def from_segment_ids(cls, segment_ids: Int[Array, "B S"] | np.ndarray, *, alignment: int = 1) -> Documents:
        """Documents are the maximal runs of one nonzero id; id 0 is padding, wherever it stands.

        Args:
            segment_ids: integers [B, S], not negative. Traced ids are fine; their values are then not checked.
            alignment: the caller's promise that every document starts at a multiple of it (0: at row 0).

        Raises:
            ValueError: wrong rank or dtype; where the ids are concrete, a negative id or a broken promise.
        """
        narrow, concrete = as_integers("segment_ids", segment_ids, ndims=(2,))
        # Traced ids are compared in their own width: narrowed, different ones could become equal, and one become 0.
        ids = narrow if concrete is not None else jnp.asarray(segment_ids)
        _require(concrete, "segment_ids", lambda a: bool((a >= 0).all()), "no negative id (0 is padding)")
        if concrete is not None:
            rows = np.arange(concrete.shape[1])
            begins = np.pad(concrete[:, 1:] != concrete[:, :-1], ((0, 0), (1, 0)), constant_values=True)
            _check_alignment(np.broadcast_to(rows, concrete.shape)[begins[:, : rows.size] & (concrete > 0)], alignment)
        row = jax.lax.broadcasted_iota(jnp.int32, ids.shape, 1)
        starts = jnp.ones(ids.shape, bool).at[:, 1:].set(ids[:, 1:] != ids[:, :-1])
        begun = jax.lax.cummax(jnp.where(starts, row, 0), axis=1)
        return cls(jnp.where(ids == 0, row + 1, begun), alignment=alignment)

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: Int[Array, "*B N"] | np.ndarray, length: int, *, alignment: int = 1
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
        if isinstance(length, bool) or not isinstance(length, int | np.integer) or length < 0:
            raise ValueError(f"length: expected an int >= 0, got {length!r}")
        ends, concrete = as_integers("cu_seqlens", cu_seqlens, ndims=(1, 2))
        if ends.shape[-1] < 1:
            raise ValueError(f"cu_seqlens: expected at least the leading 0, got shape {ends.shape}")
        _require(concrete, "cu_seqlens", lambda a: bool((a[..., 0] == 0).all()), "0 as the first value")
        _require(concrete, "cu_seqlens", lambda a: bool((np.diff(a) >= 0).all()), "values that never decrease")
        _require(concrete, "cu_seqlens", lambda a: bool((a <= length).all()), f"an end within the {length} rows")
        if concrete is not None:
            _check_alignment(concrete[..., :-1][np.diff(concrete) > 0], alignment)
        ends = ends if ends.ndim == 2 else ends[None]
        rows = jnp.arange(length, dtype=jnp.int32)
        which = jax.vmap(lambda e: jnp.searchsorted(e, rows, side="right"))(ends).astype(jnp.int32)
        inside = (which > 0) & (which < ends.shape[-1])
        begun = jnp.take_along_axis(ends, jnp.maximum(which - 1, 0), axis=1)
        return cls(jnp.where(inside, begun, rows[None] + 1), alignment=alignment)

    @classmethod
    def from_lengths(
        cls, lengths: Int[Array, "*B N"] | np.ndarray, length: int, *, alignment: int | None = None
    ) -> Documents:
        """Documents laid side by side from row 0 on, the rest padding.

        Args:
            lengths: integers, not negative, 0 for none: [B] for one right-padded document a row, or [B, N] for the
                documents of each row from left to right. May be traced.
            length: S, the static number of rows.
            alignment: the caller's promise, as in `from_segment_ids`. One document a row always starts at row 0,
                so it defaults to 0 for [B] and to 1 for [B, N].

        Raises:
            ValueError: wrong rank or dtype; where the values are concrete, a negative length, or more than `length`
                rows in all.
        """
        each, concrete = as_integers("lengths", lengths, ndims=(1, 2))
        if alignment is None:
            alignment = 0 if each.ndim == 1 else 1
        _require(concrete, "lengths", lambda a: bool((a >= 0).all()), "no negative length")
        one_each = each.ndim == 1
        if concrete is not None:
            each = concrete[:, None] if one_each else concrete
            _require(each, "lengths", lambda a: bool((a.sum(1) <= length).all()), f"at most {length} rows in all")
            ends = np.pad(np.cumsum(each, axis=1, dtype=np.int32), ((0, 0), (1, 0)))
        else:
            each = jnp.clip(each[:, None] if one_each else each, 0, length)  # so that no sum wraps
            ends = jnp.pad(jnp.cumsum(each, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
        return cls.from_cu_seqlens(ends, length, alignment=alignment)

    @classmethod
    def continuing(cls, lengths: Int32[Array, " B"], counts: Int32[Array, " B"], size: int) -> Documents:
        """One document a row that began before these rows: `size` rows hold its next tokens, right-padded.

        Its first token lies `lengths` rows before row 0, so that `document_start` is negative and `positions` go on
        from `lengths`. Who sees what then depends on what stands before the rows: only a `Visibility` with `history`
        and `capacity` tells, and `WindowLayout.continuing`.

        Args:
            lengths: int32 [B], tokens that came before. May be traced.
            counts: int32 [B], tokens in these rows, at most `size`; the rest is padding. May be traced.
            size: S, static.
        """
        row = jnp.arange(size, dtype=jnp.int32)[None]
        return cls(jnp.where(row < counts[:, None], -lengths[:, None], row + 1), continues=True)

    @property
    def shape(self) -> tuple[int, int]:
        """(B, S)."""
        batch, length = self.document_start.shape
        return batch, length

    @property
    def is_unpacked(self) -> bool:
        """Statically known: every row is one document that fills it, so everything follows from the row number."""
        return self.alignment == 0 and not self.padded

    @property
    def positions(self) -> Int32[Array, "B S"]:
        """int32 [B, S]: the token's position in its document; -1 on padding rows."""
        return self._rows - self.document_start

    @property
    def is_padding(self) -> Bool[Array, "B S"]:
        """bool [B, S]: rows that belong to no document."""
        return self.document_start > self._rows

    def is_aligned(self, multiple: int) -> bool:
        """Statically known: every document starts at a multiple of `multiple`."""
        return self.alignment % multiple == 0

    @property
    def _rows(self) -> Int32[Array, "B S"]:
        return jax.lax.broadcasted_iota(jnp.int32, self.document_start.shape, 1)


def _check_alignment(starts: np.ndarray, alignment: int) -> None:
    """Holds the promise against the rows at which documents begin."""
    if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 0:
        return  # `Documents` itself says so
    broken = starts[starts % alignment != 0] if alignment else starts[starts != 0]
    if broken.size:
        raise ValueError(
            f"alignment: expected every document to start at a multiple of {alignment}, "
            f"got one that starts at row {broken[0]}"
        )


def as_integers(
    name: str, values: Array | np.ndarray, *, ndims: tuple[int, ...]
) -> tuple[Int32[Array, "..."], np.ndarray | None]:
    """`values` as int32, and on the host where they are concrete; or a ValueError that says what is wrong with them.

    Traced values beyond int32 become its ends. The host copy is taken before JAX sees the values: within a trace even
    constants become tracers.
    """
    concrete = None if isinstance(values, Tracer) else np.asarray(values)
    shape, dtype = (values.shape, values.dtype) if concrete is None else (concrete.shape, concrete.dtype)
    if len(shape) not in ndims:
        raise ValueError(f"{name}: expected rank {' or '.join(map(str, ndims))}, got shape {shape}")
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"{name}: expected an integer dtype, got {dtype}")
    limits = np.iinfo(np.int32)
    if concrete is None:
        return narrowed(values, limits.min, limits.max), None
    _require(concrete, name, lambda a: not a.size or limits.min <= a.min() <= a.max() <= limits.max, "int32 values")
    concrete = concrete.astype(np.int32)
    return jnp.asarray(concrete), concrete


def _require(values: np.ndarray | None, name: str, holds: Callable[[np.ndarray], bool], expected: str) -> None:
    """Checks concrete values; traced ones cannot be looked at."""
    if values is not None and not holds(values):
        raise ValueError(f"{name}: expected {expected}, got {np.array2string(values, threshold=20)}")
