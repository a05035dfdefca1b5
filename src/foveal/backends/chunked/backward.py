"""The backward pass: every score is computed again from the saved log-sum-exp."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from foveal.backends.chunked.forward import combine, dot_keys
from foveal.backends.chunked.plan import Plan
from foveal.backends.chunked.tiles import (
    Columns,
    Operands,
    Tile,
    entry_blocks,
    entry_columns,
    entry_start,
    gathered_columns,
    tile_at,
    tile_count,
    tile_queries,
    window_columns,
    window_start,
)
from foveal.backends.sinks import keys_share
from foveal.typing import Array, accumulation_dtype


class Gradients(NamedTuple):
    """Of q in its own dtype, of all else in the accumulation dtype."""

    q: Array
    kv: Array
    entries: Array
    sinks: Array | None


class _Rows(NamedTuple):
    """A tile's part of what the gradient of a logit takes.

    With p = exp(logit - lse) the weight among the keys and f = sigmoid(lse - sink) the keys' share of the softmax, out
    = f sum_j p_j k_j, and the gradient of logit j is p_j (f (d_out . k_j) - f (d_out . out) + d_lse).
    """

    q: Array
    d_out: Array
    lse: Array
    share: Array
    offset: Array  # d_lse - f (d_out . out)


def backward(plan: Plan, operands: Operands, out: Array, lse: Array, d_out: Array, d_lse: Array) -> Gradients:
    """Gradients of q, kv, entries and sinks."""
    wide = lse.dtype

    def step(i: Array, grads: Gradients) -> Gradients:
        tile = tile_at(plan, operands, i)
        rows, d_sinks = _rows(operands, tile, out, lse, d_out, d_lse)
        d_q, grads = _window(plan, operands, tile, rows, grads)
        if plan.entries == "gather":
            d_q, grads = _gathered(plan, operands, tile, rows, d_q, grads)
        elif plan.entries == "stream":
            d_q, grads = _streamed(plan, operands, tile, rows, d_q, grads)
        if grads.sinks is not None:
            grads = grads._replace(sinks=grads.sinks + d_sinks)
        return grads._replace(q=tile.put(grads.q, d_q))

    q, kv, entries, sinks = operands[:4]
    start = Gradients(
        jnp.zeros(q.shape, q.dtype),
        jnp.zeros(kv.shape, wide),
        jnp.zeros(entries.shape, wide),
        None if sinks is None else jnp.zeros(sinks.shape, wide),
    )
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(tile_count(plan, operands)), step, start)


def _rows(operands: Operands, tile: Tile, out: Array, lse: Array, d_out: Array, d_lse: Array) -> tuple[_Rows, Array]:
    """The tile's rows, and its part of the sinks' gradient."""
    wide = lse.dtype
    d_out_rows, lse_rows = tile.take(d_out), tile.take(lse)
    seen = lse_rows != -jnp.inf
    lse_rows = jnp.where(seen, lse_rows, 0.0)
    inner = jnp.sum(d_out_rows.astype(wide) * tile.take(out).astype(wide), axis=-1)
    if operands.sinks is None:
        share = jnp.ones_like(lse_rows)
        d_sinks = jnp.zeros((), wide)
    else:
        margin = lse_rows - operands.sinks[None, None]
        share = keys_share(margin)
        counted = seen & tile.fresh[None, :, None]
        # keys_share(-margin) is 1 - share without the cancellation
        d_sinks = -jnp.sum(jnp.where(counted, keys_share(-margin) * inner, 0.0), axis=(0, 1))
    offset = tile.take(d_lse) - share * inner
    return _Rows(tile_queries(tile, operands), d_out_rows, lse_rows, share, offset), d_sinks


def _window(plan: Plan, operands: Operands, tile: Tile, rows: _Rows, grads: Gradients) -> tuple[Array, Gradients]:
    d_q, d_keys = _columns(plan, tile, rows, window_columns(plan, operands, tile))
    start, size = window_start(plan, operands, tile), plan.window_columns
    grads = grads._replace(kv=_add_at(grads.kv, d_keys[:, :size], start))
    if plan.entries == "few":
        grads = grads._replace(entries=grads.entries + d_keys[:, size:])
    return d_q, grads


def _streamed(
    plan: Plan, operands: Operands, tile: Tile, rows: _Rows, d_q: Array, grads: Gradients
) -> tuple[Array, Gradients]:
    def block_step(block: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        d_q, d_keys = _columns(plan, tile, rows, entry_columns(plan, operands, tile, block))
        return carry[0] + d_q, _add_at(carry[1], d_keys, entry_start(plan, operands, block))

    d_q, d_entries = jax.lax.fori_loop(*entry_blocks(plan, tile), block_step, (d_q, grads.entries))
    return d_q, grads._replace(entries=d_entries)


def _gathered(
    plan: Plan, operands: Operands, tile: Tile, rows: _Rows, d_q: Array, grads: Gradients
) -> tuple[Array, Gradients]:
    columns, slots = gathered_columns(operands, tile)
    more, d_keys = _columns(plan, tile, rows, columns)
    batch = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None, None]
    # A masked column's gradient is zero, so that its slot may be any.
    d_entries = grads.entries.at[batch, jnp.maximum(slots, 0)].add(d_keys)
    return d_q + more, grads._replace(entries=d_entries)


def _columns(plan: Plan, tile: Tile, rows: _Rows, columns: Columns) -> tuple[Array, Array]:
    """What some columns add to the gradient of q, [B, T, H, D], and the gradient of their keys."""
    mask = (columns.mask & tile.fresh[None, :, None])[:, :, None]
    logits = dot_keys(plan, rows.q, columns.keys) * plan.scale
    weights = jnp.exp(jnp.where(mask, logits - rows.lse[..., None], -jnp.inf))
    shared = weights * rows.share[..., None]
    d_weights = dot_keys(plan, rows.d_out, columns.keys)
    d_logits = shared * d_weights + weights * rows.offset[..., None]
    narrow = rows.q.dtype
    d_scores = (d_logits * plan.scale).astype(narrow)
    d_keys = _onto_keys(plan, d_scores, rows.q, columns) + _onto_keys(plan, shared.astype(narrow), rows.d_out, columns)
    return combine(plan, d_scores, columns.keys), d_keys


def _onto_keys(plan: Plan, weights: Array, rows: Array, columns: Columns) -> Array:
    """[B, T, H, N] and [B, T, H, D] -> the keys' shape, summed over who sees them."""
    wide = accumulation_dtype(weights.dtype)
    equation = "bthn,bthd->bnd" if columns.keys.ndim == 3 else "bthn,bthd->btnd"
    return jnp.einsum(equation, weights, rows, precision=plan.precision, preferred_element_type=wide)


def _add_at(array: Array, rows: Array, start: Array) -> Array:
    """`array` [B, N, D] with `rows` added from row `start` on."""
    old = jax.lax.dynamic_slice_in_dim(array, start, rows.shape[1], axis=1)
    return jax.lax.dynamic_update_slice_in_dim(array, old + rows, start, axis=1)
