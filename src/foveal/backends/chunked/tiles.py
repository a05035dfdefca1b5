"""A tile: some queries with all their heads, and the columns of keys that they look at."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from foveal.backends.chunked.plan import Plan
from foveal.backends.operands import Operands
from foveal.geometry import TileRanges, membership
from foveal.program import varying
from foveal.typing import Array


def stored(plan: Plan, array: Array) -> Array:
    """An array as tiles are to be sliced from it: bfloat16 as its bits where slicing it would widen all of it.

    Behind a barrier: of an array that is a constant of the program, XLA works out wrong bits.
    """
    if not (plan.slice_bits and array.dtype == jnp.bfloat16):
        return array
    return jax.lax.optimization_barrier(_as_bits(array))


def restored(array: Array) -> Array:
    """What was `stored`; no other array here holds 16-bit integers."""
    return jax.lax.bitcast_convert_type(array, jnp.bfloat16) if array.dtype == jnp.uint16 else array


def _as_bits(array: Array) -> Array:
    return jax.lax.bitcast_convert_type(array.astype(jnp.bfloat16), jnp.uint16)


class Keys(NamedTuple):
    """Keys for both matmuls: [B, N, D] to be summed and [B, D, N] to be scored.

    A CPU's matmul wants them so; transposed once for all tiles (`Plan.transpose`) they cost nothing, tile by tile a
    tenth of the time. Gathered keys, [B, T, N, D], are each query's own and are not transposed: `columns` is None.
    """

    rows: Array
    columns: Array | None

    @classmethod
    def of(cls, plan: Plan, rows: Array) -> Keys:
        """Keys [..., N, D], `stored`."""
        rows = stored(plan, rows)
        return cls(rows, jnp.swapaxes(rows, -1, -2) if plan.transpose else None)

    def slice(self, start: Array, size: int) -> Keys:
        """N = size of them, restored."""
        rows = restored(jax.lax.dynamic_slice_in_dim(self.rows, start, size, axis=1))
        if self.columns is None:
            return Keys(rows, jnp.swapaxes(rows, -1, -2))
        return Keys(rows, restored(jax.lax.dynamic_slice_in_dim(self.columns, start, size, axis=2)))


class Tile(NamedTuple):
    """T queries.

    Attributes:
        row: their first row.
        fresh: bool [T]: the queries that no other tile computes. The last tile is moved up to end with the row, so
            it repeats some queries of the one before.
        ranges: what they see.
    """

    row: Array
    fresh: Array
    ranges: TileRanges

    @property
    def is_padding(self) -> Array:
        """bool [B or 1, T]: queries that see nothing, since every other one sees its own key."""
        return self.ranges.window_end <= self.ranges.window_first

    def take(self, array: Array) -> Array:
        """Its rows of [B, S, ...], `stored` or not."""
        return restored(jax.lax.dynamic_slice_in_dim(array, self.row, self.fresh.shape[0], axis=1))

    def put(self, array: Array, rows: Array) -> Array:
        """`array` [B, S, ...], `stored` or not, with its rows replaced, in place under jit."""
        stored_rows = _as_bits(rows) if array.dtype == jnp.uint16 else rows.astype(array.dtype)
        return jax.lax.dynamic_update_slice_in_dim(array, stored_rows, self.row, axis=1)


class Part(NamedTuple):
    """Some consecutive queries of a tile: `size` of them, which is static."""

    first: Array
    size: int

    def take(self, array: Array) -> Array:
        """Of [B, T, ...]."""
        return jax.lax.dynamic_slice_in_dim(array, self.first, self.size, axis=1)

    def put(self, array: Array, rows: Array) -> Array:
        """`array` [B, T, ...] with these of its rows replaced."""
        return jax.lax.dynamic_update_slice_in_dim(array, rows, self.first, axis=1)


class Columns(NamedTuple):
    """Keys that a tile is scored with in one matmul, and who sees which.

    Attributes:
        keys: of [B, N, D], or of [B, T, N, D] where each query has its own.
        mask: bool [B or 1, T, N].
    """

    keys: Keys
    mask: Array


def tile_count(plan: Plan, operands: Operands) -> int:
    """How many tiles cover the rows."""
    return -(-operands.q.shape[1] // plan.query_block)


def tile_at(plan: Plan, operands: Operands, step: Array) -> Tile:
    """The tile of a step. The last comes first, so that the rows it repeats are written again by their own tile."""
    size, length = plan.query_block, operands.q.shape[1]
    first = (tile_count(plan, operands) - 1 - step) * size
    row = jnp.minimum(first, length - size)
    fresh = row + jnp.arange(size, dtype=jnp.int32) >= first
    return Tile(row, fresh, operands.visibility.tile(row, size))


def window_start(plan: Plan, operands: Operands, tile: Tile) -> Array:
    """First raw key of the tile's window columns, which end with its last query's own."""
    row = operands.visibility.history + tile.row + plan.query_block - plan.window_columns
    return jnp.clip(row, 0, operands.kv.shape[1] - plan.window_columns)


class Sources(NamedTuple):
    """All raw keys and all entries."""

    kv: Keys
    entries: Keys


def window_columns(plan: Plan, operands: Operands, sources: Sources, tile: Tile) -> Columns:
    """The raw keys, followed by all entries where these are few."""
    start = window_start(plan, operands, tile)
    keys = sources.kv.slice(start, plan.window_columns)
    mask = _between(start, plan.window_columns, tile.ranges.window_first, tile.ranges.window_end)
    if plan.entries != "few":
        return Columns(keys, mask)
    slots = operands.entries.shape[1]
    entries = sources.entries.slice(jnp.int32(0), slots)
    assert keys.columns is not None
    assert entries.columns is not None
    entry_mask = _between(jnp.int32(0), slots, tile.ranges.entry_first, tile.ranges.entry_end)
    selected = selected_slots(operands, tile)
    if selected is not None:
        entry_mask = entry_mask & selected
    masks = jnp.broadcast_arrays(mask[..., :1], entry_mask[..., :1])[0].shape[0]
    both = [jnp.broadcast_to(m, (masks, *m.shape[1:])) for m in (mask, entry_mask)]
    together = Keys(
        jnp.concatenate([keys.rows, entries.rows], axis=1),
        jnp.concatenate([keys.columns, entries.columns], axis=2),
    )
    return Columns(together, jnp.concatenate(both, axis=-1))


def entry_start(plan: Plan, operands: Operands, block: Array) -> Array:
    """First slot of a block's columns; the last block is moved up to end with the entries."""
    return jnp.minimum(block * plan.entry_block, operands.entries.shape[1] - plan.entry_block)


def selected_slots(operands: Operands, tile: Tile, steps: Steps | None = None) -> Array | None:
    """bool [B, T, C], the slots that each query may use, or None for all; anything where a tile does not stream."""
    if operands.indices is None:
        return None
    slots, count = tile.take(operands.indices), operands.entries.shape[1]
    if steps is None or isinstance(steps.parts, int):
        return membership(slots, count)
    nothing = varying(jnp.zeros((*slots.shape[:2], count), bool), slots)
    return jax.lax.cond(steps.end > steps.first, lambda: membership(slots, count), lambda: nothing)


def entry_columns(
    plan: Plan, operands: Operands, sources: Sources, tile: Tile, selected: Array | None, block: Array
) -> Columns:
    """One block of entries; `selected` of `selected_slots`."""
    start = entry_start(plan, operands, block)
    keys = sources.entries.slice(start, plan.entry_block)
    first = jnp.maximum(tile.ranges.entry_first, block * plan.entry_block)  # the slots before are another block's
    mask = _between(start, plan.entry_block, first, tile.ranges.entry_end)
    if selected is not None:
        mask = mask & jax.lax.dynamic_slice_in_dim(selected, start, plan.entry_block, axis=2)
    return Columns(keys, mask)


class Steps(NamedTuple):
    """How a tile goes over the entries: streaming blocks [first, end), then gathering so many parts of its queries."""

    first: Array
    end: Array
    parts: Array | int


def entry_steps(plan: Plan, tile: Tile) -> Steps:
    """What streams has nothing to gather, and the other way round.

    A tile gathers where its queries together, of all batch rows, span many slots. Two loops, one of which is empty,
    serve better than a branch: with it XLA for CPUs copies what it adds to, and under `vmap` both sides are computed.
    """
    first, end = tile.ranges.slots
    blocks = first // plan.entry_block, -(-end // plan.entry_block)
    if plan.entries != "gather":
        return Steps(*blocks, 0)
    gather = end - first > plan.stream_up_to
    parts = jnp.where(gather, plan.query_block // plan.gather_block, 0)
    return Steps(blocks[0], jnp.where(gather, blocks[0], blocks[1]), parts)


def gathered_columns(operands: Operands, slots: Array) -> Columns:
    """The selected entries of some queries, whose slots are [B, T, K]."""
    batch, size, count = slots.shape
    flat = jnp.maximum(slots, 0).reshape(batch, size * count, 1)
    keys = jnp.take_along_axis(operands.entries, flat, axis=1, mode="promise_in_bounds")
    return Columns(Keys(keys.reshape(batch, size, count, keys.shape[-1]), None), slots >= 0)


def _between(start: Array, size: int, first: Array, end: Array) -> Array:
    """bool [B or 1, T, size]: columns start ... start + size - 1 that lie in [first, end)."""
    column = start + jnp.arange(size, dtype=jnp.int32)[None, None]
    return (column >= first[..., None]) & (column < end[..., None])
