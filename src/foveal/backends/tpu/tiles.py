"""Arrays that the kernels read in place of masks, and the layouts of their operands."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from foveal.backends.tpu.plan import LANES, SUBLANES, FusedPlan
from foveal.geometry import Visibility, union
from foveal.typing import Array

FIRST_SLOT, BLOCKS, QUIET = range(3)
"""Elements of `TileArrays.spans`."""


class TileArrays(NamedTuple):
    """Arrays of one block per tile.

    Attributes:
        bounds: int32 [B, tiles, 8, 128]; lane l belongs to the tile's token l % T, as rows are in order of heads, then
            tokens. The first raw key of the tile's slab that it sees, and one past the last; the first slot, and one
            past the last; whether it sees a key that was not finite. All 0 for tokens past the last.
        spans: int32 [B, tiles, 1, 4], in scalar memory. The first slot that the tile takes, a multiple of 16; the
            number of blocks of slots after the first ones; whether some of its rows pass no gradient on.
    """

    bounds: Array
    spans: Array


def tile_arrays(
    plan: FusedPlan, visibility: Visibility, *, tainted: Array | None = None, quiet: Array | None = None
) -> TileArrays:
    """Arrays of a call.

    Args:
        plan: the call's.
        visibility: who sees what.
        tainted: bool [B, S], tokens that see a key which was not finite; None for none.
        quiet: bool [B, S], tokens with rows that pass no gradient on; None in the forward pass.
    """
    ranges, tokens = visibility.ranges, plan.tokens

    def by_tile(array: Array) -> Array:
        padded = jnp.pad(array, ((0, 0), (0, plan.tiles * tokens - plan.length)))
        return padded.reshape(array.shape[0], plan.tiles, tokens)

    window_first, window_end, slot_first, slot_end = map(by_tile, ranges)
    slab_start = jnp.arange(plan.tiles, dtype=jnp.int32) * tokens + (plan.history - plan.reach)
    seen = window_end > window_first
    window = [jnp.where(seen, bound - slab_start[None, :, None], 0) for bound in (window_first, window_end)]
    flags = jnp.zeros_like(slot_first) if tainted is None else by_tile(tainted.astype(jnp.int32))
    rows = [*window, slot_first, slot_end, flags]
    bounds = jnp.stack([*rows, *[jnp.zeros_like(slot_first)] * (8 - len(rows))], axis=2)
    bounds = jnp.tile(bounds, (1, 1, 1, LANES // tokens))

    first, end = union(slot_first, slot_end, axis=2)
    first = first // SUBLANES * SUBLANES
    blocks = jnp.maximum(-(-(end - first - plan.first_slots) // plan.block_slots), 0)
    rare = jnp.zeros_like(first) if quiet is None else jnp.any(by_tile(quiet) | ~seen, axis=2).astype(jnp.int32)
    spans = jnp.stack([first, blocks, rare, jnp.zeros_like(first)], axis=2)
    return TileArrays(bounds, spans[:, :, None])


def padded_keys(plan: FusedPlan, kv: Array) -> Array:
    """Raw keys with the slab of tile i at rows [i T, i T + slab): [B, N, D] -> [B, `padded_keys`, D]."""
    before = plan.reach - plan.history
    kv = kv[:, max(-before, 0) :]
    return jnp.pad(kv, ((0, 0), (max(before, 0), plan.tiles * plan.tokens - plan.length), (0, 0)))


def from_padded_keys(plan: FusedPlan, keys: Array) -> Array:
    """`padded_keys` undone; rows that no query reaches are 0."""
    before = plan.reach - plan.history
    keys = jnp.pad(keys, ((0, 0), (max(-before, 0), 0), (0, 0)))
    return keys[:, max(before, 0) :][:, : plan.history + plan.length]


def padded_entries(plan: FusedPlan, entries: Array) -> Array:
    """Entries [B, C, D] -> [B, `padded_slots`, D]."""
    return jnp.pad(entries, ((0, 0), (0, plan.padded_slots - plan.slots), (0, 0)))


def as_rows(plan: FusedPlan, array: Array, fill: float) -> Array:
    """One number per head and token, [B, S, H], as the kernels' rows: [B, tiles, 1, T x H]."""
    more = plan.tiles * plan.tokens - plan.length
    array = jnp.pad(array, ((0, 0), (0, more), (0, 0)), constant_values=fill)
    array = array.reshape(array.shape[0], plan.tiles, plan.tokens, plan.heads)
    return jnp.swapaxes(array, 2, 3).reshape(array.shape[0], plan.tiles, 1, plan.rows)


def from_rows(plan: FusedPlan, rows: Array) -> Array:
    """`as_rows` undone."""
    array = rows.reshape(rows.shape[0], plan.tiles, plan.heads, plan.tokens)
    return jnp.swapaxes(array, 2, 3).reshape(rows.shape[0], -1, plan.heads)[:, : plan.length]
