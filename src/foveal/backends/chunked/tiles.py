"""A tile: some queries with all their heads, and the columns of keys that they look at."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from foveal.backends.chunked.plan import Plan
from foveal.backends.operands import Operands
from foveal.geometry import Block, Blocks, TileRanges, membership
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
        rows: their rows.
        ranges: what they see.
    """

    rows: Block
    ranges: TileRanges

    @property
    def is_padding(self) -> Array:
        """bool [B or 1, T]: queries that see nothing, since every other one sees its own key."""
        return self.ranges.window_end <= self.ranges.window_first

    def take(self, array: Array) -> Array:
        """Its rows of [B, S, ...], `stored` or not."""
        return restored(self.rows.take(array))

    def take_all(self, *arrays: Array) -> list[Array]:
        """`take` of several."""
        return [restored(rows) for rows in [self.rows.take(array) for array in arrays]]

    def put(self, array: Array, rows: Array) -> Array:
        """`array` [B, S, ...], `stored` or not, with its rows replaced, in place under jit."""
        return self.rows.put(array, _as_bits(rows) if array.dtype == jnp.uint16 else rows.astype(array.dtype))


class Columns(NamedTuple):
    """Keys that a tile is scored with in one matmul, and who sees which.

    Attributes:
        keys: of [B, N, D], or of [B, T, N, D] where each query has its own.
        mask: bool [B or 1, T, N].
    """

    keys: Keys
    mask: Array


def tiles_of(plan: Plan, operands: Operands) -> Blocks:
    """The tiles that cover the rows."""
    return Blocks(plan.query_block, operands.q.shape[1])


def tile_at(plan: Plan, operands: Operands, step: Array) -> Tile:
    """The tile of a step. The last comes first, so that the rows it repeats are written again by their own tile."""
    tiles = tiles_of(plan, operands)
    rows = tiles.at(tiles.count - 1 - step)
    return Tile(rows, operands.visibility.tile(rows.start, rows.size))


def window_start(plan: Plan, operands: Operands, tile: Tile) -> Array:
    """First raw key of the tile's window columns, which end with its last query's own."""
    row = operands.visibility.history + tile.rows.start + plan.query_block - plan.window_columns
    return jnp.clip(row, 0, operands.kv.shape[1] - plan.window_columns)


class Sources(NamedTuple):
    """All raw keys and all entries."""

    kv: Keys
    entries: Keys


def window_columns(plan: Plan, operands: Operands, sources: Sources, tile: Tile) -> Columns:
    """The raw keys, followed by all entries where these are few."""
    start = window_start(plan, operands, tile)
    keys = sources.kv.slice(start, plan.window_columns)
    mask = tile.ranges.sees_keys(start, plan.window_columns)
    if plan.entries != "few":
        return Columns(keys, mask)
    slots = operands.entries.shape[1]
    entries = sources.entries.slice(jnp.int32(0), slots)
    assert keys.columns is not None
    assert entries.columns is not None
    entry_mask = tile.ranges.sees(0, slots)
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


def entry_block(plan: Plan, operands: Operands, index: Array) -> Block:
    """Slots that are streamed in one step."""
    return Blocks(plan.entry_block, operands.entries.shape[1]).at(index)


def selected_slots(operands: Operands, tile: Tile, steps: Steps | None = None) -> Array | None:
    """bool [B, T, C], the slots that each query may use, or None for all; anything where a tile does not stream."""
    if operands.indices is None:
        return None
    slots, count = tile.take(operands.indices), operands.entries.shape[1]
    if steps is None or isinstance(steps.parts, int):
        return membership(slots, count)
    nothing = varying(jnp.zeros((*slots.shape[:2], count), bool), slots)
    return jax.lax.cond(steps.end > steps.first, lambda: membership(slots, count), lambda: nothing)


def entry_columns(sources: Sources, tile: Tile, selected: Array | None, block: Block) -> Columns:
    """One block of entries; `selected` of `selected_slots`."""
    keys = sources.entries.slice(block.start, block.size)
    mask = tile.ranges.sees(block.start, block.size) & block.fresh[None, None]
    if selected is not None:
        mask = mask & block.take(selected, axis=2)
    return Columns(keys, mask)


class Steps(NamedTuple):
    """How a tile goes over the entries: streaming blocks [first, end), then gathering so many parts of its queries."""

    first: Array
    end: Array
    parts: Array | int


def entry_steps(plan: Plan, tile: Tile) -> Steps:
    """A tile either streams or gathers.

    A tile gathers where its queries together, of all batch rows, span many slots. Two loops, one of which is empty,
    serve better than a branch: with it XLA for CPUs copies what it adds to, and under `vmap` both sides are computed.
    """
    blocks = tile.ranges.slot_blocks(plan.entry_block)
    if plan.entries != "gather":
        return Steps(*blocks, 0)
    first, end = tile.ranges.slots
    gather = end - first > plan.stream_up_to
    parts = jnp.where(gather, plan.query_block // plan.gather_block, 0)
    return Steps(blocks[0], jnp.where(gather, blocks[0], blocks[1]), parts)


def gathered_columns(operands: Operands, slots: Array) -> Columns:
    """The selected entries of some queries, whose slots are [B, T, K]."""
    batch, size, count = slots.shape
    flat = jnp.maximum(slots, 0).reshape(batch, size * count, 1)
    keys = jnp.take_along_axis(operands.entries, flat, axis=1, mode="promise_in_bounds")
    return Columns(Keys(keys.reshape(batch, size, count, keys.shape[-1]), None), slots >= 0)
