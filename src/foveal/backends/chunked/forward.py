"""The forward pass: a streamed softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from foveal.backends.chunked.plan import Plan
from foveal.backends.chunked.tiles import (
    Columns,
    Operands,
    Tile,
    entry_blocks,
    entry_columns,
    gathered_columns,
    tile_at,
    tile_count,
    tile_queries,
    window_columns,
)
from foveal.backends.sinks import attention_with_sinks
from foveal.typing import Array, accumulation_dtype


class Softmax(NamedTuple):
    """A softmax over the columns so far: their largest logit, sum of weights, weighted sum of keys."""

    peak: Array
    total: Array
    values: Array


def forward(plan: Plan, operands: Operands) -> tuple[Array, Array]:
    """Output [B, S, H, D] in q's dtype and log-sum-exp over the keys [B, S, H]."""
    q = operands.q
    wide = accumulation_dtype(q.dtype)

    def step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        tile = tile_at(plan, operands, i)
        state = _attend(plan, operands, tile)
        seen = state.total != 0.0  # true for NaN, which must show
        total = jnp.where(seen, state.total, 1.0)
        lse = jnp.where(seen, state.peak + jnp.log(total), -jnp.inf)
        out = attention_with_sinks(state.values / total[..., None], lse, operands.sinks)
        return tile.put(carry[0], out), tile.put(carry[1], lse)

    start = jnp.zeros(q.shape, q.dtype), jnp.zeros(q.shape[:3], wide)
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(tile_count(plan, operands)), step, start)


def _attend(plan: Plan, operands: Operands, tile: Tile) -> Softmax:
    q = tile_queries(tile, operands)
    state = _absorb(None, plan, q, window_columns(plan, operands, tile))
    if plan.entries == "gather":
        return _absorb(state, plan, q, gathered_columns(operands, tile)[0])
    if plan.entries == "stream":
        first, end = entry_blocks(plan, tile)
        absorb_block: Callable[[Array, Softmax], Softmax] = lambda block, state: _absorb(  # noqa: E731
            state, plan, q, entry_columns(plan, operands, tile, block)
        )
        return jax.lax.fori_loop(first, end, absorb_block, state)
    return state


def _absorb(state: Softmax | None, plan: Plan, q: Array, columns: Columns) -> Softmax:
    """The softmax with more columns in it."""
    logits = masked_logits(plan, q, columns)
    peak = jnp.max(logits, axis=-1)
    peak = peak if state is None else jnp.maximum(peak, state.peak)
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)  # nothing seen yet: any finite number serves
    weights = jnp.exp(logits - peak[..., None])
    total = jnp.sum(weights, axis=-1)
    values = combine(plan, weights.astype(q.dtype), columns.keys)
    if state is None:
        return Softmax(peak, total, values)
    shrink = jnp.where(state.total != 0.0, jnp.exp(state.peak - peak), 0.0)
    return Softmax(peak, state.total * shrink + total, state.values * shrink[..., None] + values)


def masked_logits(plan: Plan, q: Array, columns: Columns) -> Array:
    """[B, T, H, N] in the accumulation dtype, -inf where unseen."""
    return jnp.where(columns.mask[:, :, None], dot_keys(plan, q, columns.keys) * plan.scale, -jnp.inf)


def dot_keys(plan: Plan, rows: Array, keys: Array) -> Array:
    """[B, T, H, D] times keys -> [B, T, H, N]. T and H stay apart: merged, they could not be sharded over heads."""
    wide = accumulation_dtype(rows.dtype)
    equation = "bthd,bnd->bthn" if keys.ndim == 3 else "bthd,btnd->bthn"
    return jnp.einsum(equation, rows, keys, precision=plan.precision, preferred_element_type=wide)


def combine(plan: Plan, weights: Array, keys: Array) -> Array:
    """[B, T, H, N] times keys -> [B, T, H, D]."""
    wide = accumulation_dtype(weights.dtype)
    equation = "bthn,bnd->bthd" if keys.ndim == 3 else "bthn,btnd->bthd"
    return jnp.einsum(equation, weights, keys, precision=plan.precision, preferred_element_type=wide)
