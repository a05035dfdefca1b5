"""Forward pass: an online softmax."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from foveal.backends.chunked.plan import ChunkedPlan
from foveal.backends.chunked.tiles import (
    Columns,
    Keys,
    KeySources,
    Tile,
    as_bfloat16,
    as_uint16,
    entry_columns,
    entry_steps,
    gathered_columns,
    selected_slots,
    window_columns,
)
from foveal.backends.operands import Operands, settled
from foveal.backends.sinks import share_of_keys
from foveal.geometry import Block, Blocks
from foveal.typing import Array


class Softmax(NamedTuple):
    """State of the softmax over the columns so far: largest logit, sum of weights, weighted sum of keys."""

    peak: Array
    total: Array
    values: Array


def forward(plan: ChunkedPlan, operands: Operands) -> tuple[Array, Array]:
    """Output [B, S, H, D] in q's dtype and log-sum-exp over the keys [B, S, H], 0 for padding."""
    q = operands.q

    sources = KeySources(Keys.from_rows(plan, operands.kv), Keys.from_rows(plan, operands.entries))
    operands = dataclasses.replace(operands, q=as_uint16(plan, q))

    def step(rows: Block, made: tuple[Array, Array]) -> tuple[Array, Array]:
        tile = Tile.at(operands, rows)
        state = _absorb(None, plan, tile.q, window_columns(plan, operands, sources, tile)[1])
        if plan.entries in ("stream", "gather"):
            state = _absorb_entries(state, plan, operands, sources, tile)
        # The largest weight of a query that sees a key is 1, unless an infinity in the query made all weights 0.
        seen = state.total != 0.0  # true for NaN, which must propagate
        total = jnp.where(seen, state.total, 1.0)
        lse = state.peak + jnp.log(total)
        lost = ~seen | jnp.isnan(lse)
        if tile.tainted is not None:
            lost = lost | tile.tainted[..., None]
        share, padding = share_of_keys(jnp.where(lost, 0.0, lse), operands.sinks), tile.padding[..., None]
        out = state.values * (share / total)[..., None]
        out = settled(out, padding[..., None], lost[..., None])
        return tile.put(made, (out, settled(lse, padding, lost)))

    start = as_uint16(plan, jax.lax.empty(q.shape, q.dtype)), jax.lax.empty(q.shape[:3], plan.wide)
    out, lse = Blocks(plan.query_block, q.shape[1]).fold(step, start, like=q, backwards=True)
    return as_bfloat16(out), lse


def _absorb_entries(state: Softmax, plan: ChunkedPlan, operands: Operands, sources: KeySources, tile: Tile) -> Softmax:
    """Fold the entries into the softmax: block by block or, in a tile that gathers, query by query."""
    slots, steps = operands.entries.shape[1], entry_steps(plan, tile)
    selected = selected_slots(slots, tile, steps)

    def streamed(block: Block, state: Softmax) -> Softmax:
        return _absorb(state, plan, tile.q, entry_columns(sources, tile, selected, block))

    state = Blocks(plan.entry_block, slots).fold(streamed, state, bounds=steps.streamed)
    if plan.entries == "stream":
        return state

    def gathered(part: Block, state: Softmax) -> Softmax:
        mine, q, slots = part.take((state, tile.q, tile.slots))
        assert slots is not None
        return part.put(state, _absorb(mine, plan, q, gathered_columns(operands, slots)))

    return Blocks(plan.gather_block, plan.query_block).fold(gathered, state, bounds=(0, steps.parts))


def _absorb(state: Softmax | None, plan: ChunkedPlan, q: Array, columns: Columns) -> Softmax:
    """Fold more columns into the softmax."""
    logits = _masked_logits(plan, q, columns)
    peak = jnp.max(logits, axis=-1)
    peak = peak if state is None else jnp.maximum(peak, state.peak)
    peak = jnp.where(peak <= plan.lowest, 0.0, peak)  # nothing seen yet: any number far above `lowest` will do
    weights = jnp.exp(logits - peak[..., None])
    total = jnp.sum(weights, axis=-1)
    values = combine(plan, weights.astype(q.dtype), columns.keys)
    if state is None:
        return Softmax(peak, total, values)
    shrink = jnp.where(state.total != 0.0, jnp.exp(state.peak - peak), 0.0)
    return Softmax(peak, state.total * shrink + total, state.values * shrink[..., None] + values)


def _masked_logits(plan: ChunkedPlan, q: Array, columns: Columns) -> Array:
    """Logits [B, T, H, N] in the accumulation dtype, `lowest` where masked."""
    logits = dot_keys(plan, q, columns.keys) * plan.scale
    return jnp.where(columns.mask[:, :, None], logits, plan.lowest)


def dot_keys(plan: ChunkedPlan, rows: Array, keys: Keys) -> Array:
    """Rows [B, T, H, D] times keys -> [B, T, H, N]. T and H are not merged, so that heads can be sharded."""
    if keys.transposed is not None:
        return contract(plan, rows, keys.transposed, ((3,), (1,)), ((0,), (0,)))
    return contract(plan, rows, keys.rows, ((3,), (3,)), ((0, 1), (0, 1)))


def onto_keys(plan: ChunkedPlan, weights: Array, rows: Array, keys: Keys) -> Array:
    """Weights [B, T, H, N] and rows [B, T, H, D] -> the keys' shape, summed over a key's heads and queries."""
    if keys.transposed is not None:
        return contract(plan, weights, rows, ((1, 2), (1, 2)), ((0,), (0,)))
    return contract(plan, weights, rows, ((2,), (2,)), ((0, 1), (0, 1)))


def combine(plan: ChunkedPlan, weights: Array, keys: Keys) -> Array:
    """Weights [B, T, H, N] times keys -> [B, T, H, D]."""
    if keys.transposed is not None:
        return contract(plan, weights, keys.rows, ((3,), (1,)), ((0,), (0,)))
    return contract(plan, weights, keys.rows, ((3,), (2,)), ((0, 1), (0, 1)))


Axes = tuple[tuple[int, ...], tuple[int, ...]]


def contract(plan: ChunkedPlan, left: Array, right: Array, over: Axes, batch: Axes) -> Array:
    """Matmul accumulated in `plan.wide`.

    Not einsum, which may reorder two contracted axes: transposing them costs as much as the matmul itself.
    """
    return jax.lax.dot_general(left, right, (over, batch), precision=plan.precision, preferred_element_type=plan.wide)
