"""The backward pass: every score is computed again from the saved log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from foveal.backends.chunked.forward import combine, contract, dot_keys
from foveal.backends.chunked.plan import Plan
from foveal.backends.chunked.tiles import (
    Columns,
    Keys,
    Operands,
    Part,
    Sources,
    Tile,
    entry_columns,
    entry_start,
    entry_steps,
    gathered_columns,
    restored,
    selected_slots,
    stored,
    tile_at,
    tile_count,
    window_columns,
    window_start,
)
from foveal.backends.program import varying
from foveal.backends.sinks import row_gradients
from foveal.typing import Array


class Gradients(NamedTuple):
    """Of q in its own dtype, of all else in the accumulation dtype."""

    q: Array
    kv: Array
    entries: Array
    sinks: Array | None


class _Rows(NamedTuple):
    """A tile's part of what the gradient of a logit takes: see `RowGradients`."""

    q: Array
    g: Array
    lse: Array
    offset: Array


def backward(plan: Plan, operands: Operands, out: Array, lse: Array, d_out: Array, d_lse: Array) -> Gradients:
    """Gradients of q, kv, entries and sinks."""
    wide = lse.dtype
    sources = Sources(Keys.of(plan, operands.kv), Keys.of(plan, operands.entries))
    q, kv, entries, sinks = operands[:4]
    operands = operands._replace(q=stored(plan, q))
    out, d_out = stored(plan, out), stored(plan, d_out)

    def step(i: Array, grads: Gradients) -> Gradients:
        tile = tile_at(plan, operands, i)
        rows, d_sinks = _rows(operands, tile, out, lse, d_out, d_lse)
        d_q, grads = _window(plan, operands, sources, tile, rows, grads)
        if plan.entries in ("stream", "gather"):
            d_q, d_entries = _entries(plan, operands, sources, tile, rows, (d_q, grads.entries))
            grads = grads._replace(entries=d_entries)
        if grads.sinks is not None:
            grads = grads._replace(sinks=grads.sinks + d_sinks)
        return grads._replace(q=tile.put(grads.q, d_q))

    start = Gradients(
        stored(plan, jax.lax.empty(q.shape, q.dtype)),
        jnp.zeros(kv.shape, wide),
        jnp.zeros(entries.shape, wide),
        None if sinks is None else jnp.zeros(sinks.shape, wide),
    )
    start = varying(start, (operands, d_out, d_lse))
    grads = jax.lax.fori_loop(jnp.int32(0), jnp.int32(tile_count(plan, operands)), step, start)
    return grads._replace(q=restored(grads.q))


def _rows(operands: Operands, tile: Tile, out: Array, lse: Array, d_out: Array, d_lse: Array) -> tuple[_Rows, Array]:
    """The tile's rows, and its part of the sinks' gradient."""
    wide = lse.dtype
    d_out_rows, lse_rows, d_lse_rows = tile.take(d_out), tile.take(lse), tile.take(d_lse)
    out_rows = tile.take(out)
    silent = ~jnp.isfinite(lse_rows)  # queries that give no gradient: they saw nothing, or something not finite
    if operands.tainted is not None:
        silent = silent | tile.take(operands.tainted)[..., None]
    inner = _row_sums(d_out_rows.astype(wide) * out_rows.astype(wide))
    sinks = None if operands.sinks is None else operands.sinks[None, None]
    rows = row_gradients(inner, lse_rows, d_lse_rows, sinks, silent)
    d_sinks = jnp.zeros((), wide)
    if rows.sinks is not None:
        d_sinks = jnp.sum(jnp.where(tile.fresh[None, :, None], rows.sinks, 0.0), axis=(0, 1))
    g = jnp.where(silent[..., None], 0.0, d_out_rows * rows.share[..., None].astype(d_out_rows.dtype))
    q = tile.take(operands.q)
    q = jnp.where(jnp.isfinite(q), q, 0.0)  # of a silent query: its weights are zero, but 0 * NaN is not
    return _Rows(q, g, rows.lse, rows.offset), d_sinks


def _row_sums(array: Array) -> Array:
    """Sums over the last axis, as a matmul: XLA's own reduction of a product is ten times slower on CPUs."""
    ones = jnp.ones((array.shape[-1], 1), array.dtype)
    return jax.lax.dot_general(array, ones, (((array.ndim - 1,), (0,)), ((), ())), precision="highest")[..., 0]


def _window(
    plan: Plan, operands: Operands, sources: Sources, tile: Tile, rows: _Rows, grads: Gradients
) -> tuple[Array, Gradients]:
    d_q, d_keys = _columns(plan, tile, rows, window_columns(plan, operands, sources, tile))
    start, size = window_start(plan, operands, tile), plan.window_columns
    grads = grads._replace(kv=_add_at(grads.kv, d_keys[:, :size], start))
    if plan.entries == "few":
        grads = grads._replace(entries=grads.entries + d_keys[:, size:])
    return d_q, grads


Sums = tuple[Array, Array]
"""Gradients so far: of a tile's q [B, T, H, D], and of all entries [B, C, D]."""


def _entries(plan: Plan, operands: Operands, sources: Sources, tile: Tile, rows: _Rows, sums: Sums) -> Sums:
    """`sums` with what entries add, block by block or, of a tile that gathers, query by query."""
    steps = entry_steps(plan, tile)
    selected = selected_slots(operands, tile, steps)

    def streamed(block: Array, sums: Sums) -> Sums:
        d_q, d_keys = _columns(plan, tile, rows, entry_columns(plan, operands, sources, tile, selected, block))
        return sums[0] + d_q, _add_at(sums[1], d_keys, entry_start(plan, operands, block))

    sums = jax.lax.fori_loop(steps.first, steps.end, streamed, sums)
    if plan.entries != "gather":
        return sums
    assert operands.indices is not None
    slots = tile.take(operands.indices)

    def gathered(i: Array, sums: Sums) -> Sums:
        return _gathered(plan, operands, tile, rows, slots, i * plan.gather_block, sums)

    return jax.lax.fori_loop(0, steps.parts, gathered, sums)


def _gathered(plan: Plan, operands: Operands, tile: Tile, rows: _Rows, slots: Array, first: Array, sums: Sums) -> Sums:
    """`sums` with what some queries' selected entries add.

    q and g are stacked, as are the weights and the gradients of the scores: in one matmul instead of two, since these
    are small, a query's heads by its entries.
    """
    part = Part(first, plan.gather_block)
    slots, fresh = part.take(slots), jax.lax.dynamic_slice_in_dim(tile.fresh, first, plan.gather_block)
    columns = gathered_columns(operands, slots)
    keys, narrow = columns.keys.rows, rows.q.dtype
    both = jnp.stack([part.take(rows.q), part.take(rows.g)], axis=2)
    dots = contract(plan, both, keys, ((4,), (3,)), ((0, 1), (0, 1)))
    mask = (columns.mask & fresh[None, :, None])[:, :, None]

    def weigh() -> Array:
        logits = dots[:, :, 0] * plan.scale - part.take(rows.lse)[..., None]
        return jnp.exp(jnp.where(mask, logits, -jnp.inf))

    weights = _once(plan, tile, dots, weigh)

    def score_gradients() -> Array:
        of_seen = jnp.where(mask, dots[:, :, 1] + part.take(rows.offset)[..., None], 0.0)
        d_scores = weights * of_seen * plan.scale
        return jnp.stack([d_scores.astype(narrow), weights.astype(narrow)], axis=2)

    stacked = _once(plan, tile, weights, score_gradients)
    d_q = contract(plan, stacked[:, :, 0], keys, ((3,), (2,)), ((0, 1), (0, 1)))
    d_keys = contract(plan, stacked, both, ((2, 3), (2, 3)), ((0, 1), (0, 1)))
    # A masked column's gradient is zero, so that its slot may be any. Mapped over the batch, so that it stays sharded.
    d_entries = jax.vmap(lambda total, slot, part: total.at[slot].add(part, mode="promise_in_bounds"))(
        sums[1], jnp.maximum(slots, 0), d_keys
    )
    return part.put(sums[0], part.take(sums[0]) + d_q), d_entries


def _columns(plan: Plan, tile: Tile, rows: _Rows, columns: Columns) -> tuple[Array, Array]:
    """What some columns add to the gradient of q, [B, T, H, D], and the gradient of their keys."""
    mask = (columns.mask & tile.fresh[None, :, None])[:, :, None]
    logits = dot_keys(plan, rows.q, columns.keys) * plan.scale
    weights = jnp.exp(jnp.where(mask, logits - rows.lse[..., None], -jnp.inf))
    narrow = rows.q.dtype
    d_weights = dot_keys(plan, rows.g, columns.keys)

    def score_gradients() -> Array:
        # Of a key that is not seen the product may be infinite: its weight is zero, but 0 * inf is not.
        of_seen = jnp.where(mask, d_weights + rows.offset[..., None], 0.0)
        return (weights * of_seen * plan.scale).astype(narrow)

    d_scores = _once(plan, tile, weights, score_gradients)
    d_keys = _onto_keys(plan, d_scores, rows.q, columns) + _onto_keys(plan, weights.astype(narrow), rows.g, columns)
    return combine(plan, d_scores, columns.keys), d_keys


def _once(plan: Plan, tile: Tile, like: Array, compute: Callable[[], Array]) -> Array:
    """What `compute` returns, which XLA must not compute again for every use: see `Plan.shield`.

    It varies over the devices that `like` varies over.
    """
    if not plan.shield:
        return compute()
    made = jax.eval_shape(compute)
    return jax.lax.cond(tile.row >= 0, compute, lambda: varying(jnp.zeros(made.shape, made.dtype), like))


def _onto_keys(plan: Plan, weights: Array, rows: Array, columns: Columns) -> Array:
    """[B, T, H, N] and [B, T, H, D] -> the keys' shape, summed over who sees them."""
    if columns.keys.columns is not None:
        return contract(plan, weights, rows, ((1, 2), (1, 2)), ((0,), (0,)))
    return contract(plan, weights, rows, ((2,), (2,)), ((0, 1), (0, 1)))


def _add_at(array: Array, rows: Array, start: Array) -> Array:
    """`array` [B, N, D] with `rows` added from row `start` on."""
    old = jax.lax.dynamic_slice_in_dim(array, start, rows.shape[1], axis=1)
    return jax.lax.dynamic_update_slice_in_dim(array, old + rows, start, axis=1)
