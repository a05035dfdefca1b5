"""Tiles: some queries with all their heads, and the columns of keys that they are scored with."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from foveal.backends.chunked.plan import ChunkedPlan
from foveal.backends.operands import Operands
from foveal.geometry import Block, TileRanges, membership
from foveal.program import varying
from foveal.typing import Array

T = TypeVar("T")


def as_uint16(plan: ChunkedPlan, array: Array) -> Array:
    """Return bfloat16 arrays as their bits where `slice_bits` asks for it, for tiles to slice; others as they are.

    Behind a barrier, since XLA computes wrong bits for an array that is a constant of the program.
    """
    if not (plan.slice_bits and array.dtype == jnp.bfloat16):
        return array
    return jax.lax.optimization_barrier(_as_bits(array))


def as_bfloat16(arrays: T) -> T:
    """Undo `as_uint16`, for an array or a pytree; no other array here holds 16-bit integers."""
    return jax.tree.map(lambda a: jax.lax.bitcast_convert_type(a, jnp.bfloat16) if a.dtype == jnp.uint16 else a, arrays)


def _as_bits(array: Array) -> Array:
    return jax.lax.bitcast_convert_type(array.astype(jnp.bfloat16), jnp.uint16)


class Keys(NamedTuple):
    """Keys for both matmuls: rows [B, N, D] for the weighted sum, transposed [B, D, N] for the scores.

    CPU matmuls are fastest this way. Transposing once for all tiles (`ChunkedPlan.transpose`) costs nothing, tile by
    tile a tenth of the time. Gathered keys [B, T, N, D] belong to one query each; their `transposed` is None.
    """

    rows: Array
    transposed: Array | None

    @classmethod
    def from_rows(cls, plan: ChunkedPlan, rows: Array) -> Keys:
        """Store keys [..., N, D] for slicing (`as_uint16`)."""
        rows = as_uint16(plan, rows)
        return cls(rows, jnp.swapaxes(rows, -1, -2) if plan.transpose else None)

    def slice(self, start: Array, size: int) -> Keys:
        """Slice `size` keys from `start` on, converted back to floats."""
        rows = as_bfloat16(jax.lax.dynamic_slice_in_dim(self.rows, start, size, axis=1))
        if self.transposed is None:
            return Keys(rows, jnp.swapaxes(rows, -1, -2))
        return Keys(rows, as_bfloat16(jax.lax.dynamic_slice_in_dim(self.transposed, start, size, axis=2)))


class Tile(NamedTuple):
    """Tile of T queries.

    Attributes:
        rows: their rows.
        fresh: bool [T], rows that no earlier tile has.
        ranges: what they see.
        padding: bool [B or 1, T], queries that see nothing: every other one sees its own key.
        q: [B, T, H, D].
        slots: the slots that they selected, int32 [B, T, K], or None for all.
        tainted: bool [B, T], or None: see `Operands`.
        saved: their rows of the other arrays that the pass needs.
    """

    rows: Block
    fresh: Array
    ranges: TileRanges
    padding: Array
    q: Array
    slots: Array | None
    tainted: Array | None
    saved: tuple[Array, ...]

    @classmethod
    def at(cls, operands: Operands, rows: Block, *saved: Array) -> Tile:
        """Take the tile at some rows from arrays [B, S, ...], which may be bits (`as_uint16`)."""
        ranges = operands.visibility.tile(rows.start, rows.size)
        padding = ranges.window_end <= ranges.window_first
        fresh = rows.fresh
        # Saved arrays first: with the queries first, XLA for CPUs takes 2 % longer for the backward pass in bfloat16.
        saved, q, slots, tainted = as_bfloat16(rows.take((saved, operands.q, operands.indices, operands.tainted)))
        return cls(rows, fresh, ranges, padding, q, slots, tainted, saved)

    def put(self, arrays: T, rows: T) -> T:
        """Replace the tile's rows of arrays [B, S, ...], which may be bits (`as_uint16`); in place under jit."""

        def as_in(array: Array, rows: Array) -> Array:
            return _as_bits(rows) if array.dtype == jnp.uint16 else rows.astype(array.dtype)

        return self.rows.put(arrays, jax.tree.map(as_in, arrays, rows))


class Columns(NamedTuple):
    """Keys that a tile is scored with in one matmul, and their mask.

    Attributes:
        keys: [B, N, D], or [B, T, N, D] where each query has its own.
        mask: bool [B or 1, T, N].
    """

    keys: Keys
    mask: Array


class KeySources(NamedTuple):
    """All raw keys and all entries."""

    kv: Keys
    entries: Keys


def window_columns(plan: ChunkedPlan, operands: Operands, sources: KeySources, tile: Tile) -> tuple[Block, Columns]:
    """Raw keys up to the last query's own, followed by all entries where these are few; and which raw keys."""
    row = operands.visibility.history + tile.rows.start + plan.query_block - plan.window_columns
    start = jnp.clip(row, 0, operands.kv.shape[1] - plan.window_columns)
    block, slots = Block(start, start, plan.window_columns), operands.entries.shape[1]
    mask = tile.ranges.sees_keys(start, block.size)
    if plan.entries != "few":
        return block, Columns(sources.kv.slice(start, block.size), mask)
    entry_mask = tile.ranges.sees(0, slots)
    if tile.slots is not None:
        entry_mask = entry_mask & membership(tile.slots, slots)
    keys, entries = sources.kv.slice(start, block.size), sources.entries.slice(jnp.int32(0), slots)
    assert keys.transposed is not None
    assert entries.transposed is not None
    masks = jnp.broadcast_arrays(mask[..., :1], entry_mask[..., :1])[0].shape[0]
    both = [jnp.broadcast_to(m, (masks, *m.shape[1:])) for m in (mask, entry_mask)]
    together = Keys(
        jnp.concatenate([keys.rows, entries.rows], axis=1),
        jnp.concatenate([keys.transposed, entries.transposed], axis=2),
    )
    return block, Columns(together, jnp.concatenate(both, axis=-1))


def selected_slots(count: int, tile: Tile, steps: EntrySteps) -> Array | None:
    """Mask [B, T, C] of the slots that each query may use, or None for all; arbitrary where a tile does not stream."""
    slots = tile.slots
    if slots is None:
        return None
    if isinstance(steps.parts, int):
        return membership(slots, count)
    nothing = varying(jnp.zeros((*slots.shape[:2], count), bool), slots)
    first, end = steps.streamed
    return jax.lax.cond(end > first, lambda: membership(slots, count), lambda: nothing)


def entry_columns(sources: KeySources, tile: Tile, selected: Array | None, block: Block) -> Columns:
    """Columns of one block of entries; `selected` comes from `selected_slots`."""
    keys = sources.entries.slice(block.start, block.size)
    mask = tile.ranges.sees(block.start, block.size) & block.fresh[None, None]
    if selected is not None:
        mask = mask & block.take(selected, axis=2)
    return Columns(keys, mask)


class EntrySteps(NamedTuple):
    """Loops of a tile over the entries: stream blocks [first, end), then gather for `parts` parts of its queries."""

    streamed: tuple[Array, Array]
    parts: Array | int


def entry_steps(plan: ChunkedPlan, tile: Tile) -> EntrySteps:
    """Choose whether a tile streams or gathers its entries.

    A tile gathers where its queries, over all batch rows, span many slots. Two loops, one of which is empty, are faster
    than a branch: with a branch XLA for CPUs copies the arrays it adds to, and under `vmap` both sides are computed.
    """
    blocks = tile.ranges.slot_blocks(plan.entry_block)
    if plan.entries != "gather":
        return EntrySteps(blocks, 0)
    first, end = tile.ranges.slots
    gather = end - first > plan.stream_up_to
    parts = jnp.where(gather, plan.query_block // plan.gather_block, 0)
    return EntrySteps((blocks[0], jnp.where(gather, blocks[0], blocks[1])), parts)


def gathered_columns(operands: Operands, slots: Array) -> Columns:
    """Columns of the entries that some queries selected, with slots [B, T, K]."""
    batch, size, count = slots.shape
    flat = jnp.maximum(slots, 0).reshape(batch, size * count, 1)
    keys = jnp.take_along_axis(operands.entries, flat, axis=1, mode="promise_in_bounds")
    return Columns(Keys(keys.reshape(batch, size, count, keys.shape[-1]), None), slots >= 0)
