"""The backward pass: every score is computed again from the saved log-sum-exp."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from foveal.backends.chunked.forward import combine, contract, dot_keys
from foveal.backends.chunked.plan import Plan
from foveal.backends.chunked.tiles import (
    Columns,
    Keys,
    Sources,
    Tile,
    entry_block,
    entry_columns,
    entry_steps,
    gathered_columns,
    restored,
    selected_slots,
    stored,
    tile_at,
    tiles_of,
    window_columns,
    window_start,
)
from foveal.backends.operands import Operands, silent
from foveal.backends.sinks import RowGradients, row_gradients
from foveal.geometry import Block, Blocks
from foveal.program import varying
from foveal.typing import Array

T = TypeVar("T")


class Gradients(NamedTuple):
    """Of q in its own dtype, of all else in the accumulation dtype."""

    q: Array
    kv: Array
    entries: Array
    sinks: Array | None


class _Rows(NamedTuple):
    """A tile's part of what the gradient of a logit takes: see `RowGradients`."""

    q: Array
    d_out: Array
    share: Array
    lse: Array
    offset: Array


class _Sums(NamedTuple):
    """Sums of a tile over its columns.

    Attributes:
        q: the gradient of its queries, [B, T, H, D].
        inner: sum_j p_j d_out . k_j, [B, T, H], where the output has been rounded: the sinks' gradient is made of
            nothing else, and of the rounded output it would have no more digits than that. None where not needed.
    """

    q: Array
    inner: Array | None


def backward(plan: Plan, operands: Operands, out: Array, lse: Array, d_out: Array, d_lse: Array) -> Gradients:
    """Gradients of q, kv, entries and sinks."""
    wide = lse.dtype
    sources = Sources(Keys.of(plan, operands.kv), Keys.of(plan, operands.entries))
    q, kv, entries, sinks = operands.q, operands.kv, operands.entries, operands.sinks
    operands = dataclasses.replace(operands, q=stored(plan, q))
    out, d_out = stored(plan, out), stored(plan, d_out)

    def step(i: Array, grads: Gradients) -> Gradients:
        tile = tile_at(plan, operands, i)
        of_rows, rows = _rows(operands, tile, out, lse, d_out, d_lse)
        sums, grads = _window(plan, operands, sources, tile, rows, grads)
        if plan.entries in ("stream", "gather"):
            sums, d_entries = _entries(plan, operands, sources, tile, rows, (sums, grads.entries))
            grads = grads._replace(entries=d_entries)
        if grads.sinks is not None and of_rows.sink_share is not None:
            inner = of_rows.inner if sums.inner is None else of_rows.share * sums.inner
            d_sinks = jnp.where(tile.rows.fresh[None, :, None], -of_rows.sink_share * inner, 0.0)
            grads = grads._replace(sinks=grads.sinks + jnp.sum(d_sinks, axis=(0, 1)))
        return grads._replace(q=tile.put(grads.q, sums.q))

    start = Gradients(
        stored(plan, jax.lax.empty(q.shape, q.dtype)),
        jnp.zeros(kv.shape, wide),
        jnp.zeros(entries.shape, wide),
        None if sinks is None else jnp.zeros(sinks.shape, wide),
    )
    start = varying(start, (q, d_out, d_lse))
    grads = jax.lax.fori_loop(jnp.int32(0), jnp.int32(tiles_of(plan, operands).count), step, start)
    return grads._replace(q=restored(grads.q))


def _rows(
    operands: Operands, tile: Tile, out: Array, lse: Array, d_out: Array, d_lse: Array
) -> tuple[RowGradients, _Rows]:
    wide = lse.dtype
    q, out, d_out_rows, lse_rows, d_lse_rows = tile.take_all(operands.q, out, d_out, lse, d_lse)
    quiet = silent(lse_rows, tile.is_padding[..., None])
    inner = _row_sums(d_out_rows.astype(wide) * out.astype(wide))
    sinks = None if operands.sinks is None else operands.sinks[None, None]
    of_rows = row_gradients(inner, lse_rows, d_lse_rows, sinks, quiet)
    q = jnp.where(jnp.isfinite(q), q, 0.0)  # of a silent query: its weights are zero, but 0 * NaN is not
    d_out_rows = jnp.where(quiet[..., None], 0.0, d_out_rows)
    return of_rows, _Rows(q, d_out_rows, of_rows.share, of_rows.lse, of_rows.offset)


def _row_sums(array: Array) -> Array:
    """Sums over the last axis, as a matmul: XLA's own reduction of a product is ten times slower on CPUs."""
    ones = jnp.ones((array.shape[-1], 1), array.dtype)
    return jax.lax.dot_general(array, ones, (((array.ndim - 1,), (0,)), ((), ())), precision="highest")[..., 0]


def _window(
    plan: Plan, operands: Operands, sources: Sources, tile: Tile, rows: _Rows, grads: Gradients
) -> tuple[_Sums, Gradients]:
    exact = operands.sinks is not None and rows.q.dtype != rows.lse.dtype
    sums, d_keys = _columns(plan, tile, rows, window_columns(plan, operands, sources, tile), exact=exact)
    start, size = window_start(plan, operands, tile), plan.window_columns
    grads = grads._replace(kv=Block(start, start, size).add(grads.kv, d_keys[:, :size]))
    if plan.entries == "few":
        grads = grads._replace(entries=grads.entries + d_keys[:, size:])
    return sums, grads


Both = tuple[_Sums, Array]
"""A tile's sums so far, and the gradient of all entries, [B, C, D]."""


def _entries(plan: Plan, operands: Operands, sources: Sources, tile: Tile, rows: _Rows, both: Both) -> Both:
    """`both` with what entries add, block by block or, of a tile that gathers, query by query."""
    steps = entry_steps(plan, tile)
    selected = selected_slots(operands, tile, steps)

    def streamed(i: Array, both: Both) -> Both:
        block = entry_block(plan, operands, i)
        columns = entry_columns(sources, tile, selected, block)
        more, d_keys = _columns(plan, tile, rows, columns, exact=both[0].inner is not None)
        return jax.tree.map(jnp.add, both[0], more), block.add(both[1], d_keys)

    both = jax.lax.fori_loop(steps.first, steps.end, streamed, both)
    if plan.entries != "gather":
        return both
    assert operands.indices is not None
    slots = tile.take(operands.indices)

    def gathered(i: Array, both: Both) -> Both:
        part = Blocks(plan.gather_block, plan.query_block).at(i)
        return _gathered(plan, operands, tile, rows, slots, part, both)

    return jax.lax.fori_loop(0, steps.parts, gathered, both)


def _gathered(plan: Plan, operands: Operands, tile: Tile, rows: _Rows, slots: Array, part: Block, both: Both) -> Both:
    """`both` with what some queries' selected entries add.

    q and d_out are stacked, as are the gradients of the scores and the weights: in one matmul instead of two, since
    these are small, a query's heads by its entries.
    """
    slots, fresh = part.take(slots), part.take(tile.rows.fresh, axis=0)
    columns = gathered_columns(operands, slots)
    mine, keys, narrow = jax.tree.map(part.take, rows), columns.keys.rows, rows.q.dtype
    stacked_rows = jnp.stack([mine.q, mine.d_out], axis=2)
    dots = contract(plan, stacked_rows, keys, ((4,), (3,)), ((0, 1), (0, 1)))
    mask = (columns.mask & fresh[None, :, None])[:, :, None]
    weights = _once(plan, tile, dots, lambda: _weights(plan, mine, mask, dots[:, :, 0]))

    def stacked() -> tuple[Array, Array]:
        d_scores, products = _score_gradients(plan, mine, mask, weights, dots[:, :, 1])
        of_keys = weights * mine.share[..., None]
        return jnp.stack([d_scores.astype(narrow), of_keys.astype(narrow)], axis=2), products

    scores, products = _once(plan, tile, weights, stacked)
    d_q = contract(plan, scores[:, :, 0], keys, ((3,), (2,)), ((0, 1), (0, 1)))
    d_keys = contract(plan, scores, stacked_rows, ((2, 3), (2, 3)), ((0, 1), (0, 1)))
    # A masked column's gradient is zero, so that its slot may be any. Mapped over the batch, so that it stays sharded.
    d_entries = jax.vmap(lambda total, slot, part: total.at[slot].add(part, mode="promise_in_bounds"))(
        both[1], jnp.maximum(slots, 0), d_keys
    )
    more = _Sums(d_q, None if both[0].inner is None else _row_sums(products))
    return jax.tree.map(lambda all_rows, some: part.put(all_rows, part.take(all_rows) + some), both[0], more), d_entries


def _columns(plan: Plan, tile: Tile, rows: _Rows, columns: Columns, *, exact: bool) -> tuple[_Sums, Array]:
    """The addends of some columns to a tile's sums, with or without `_Sums.inner`, and the gradient of their keys."""
    mask = (columns.mask & tile.rows.fresh[None, :, None])[:, :, None]
    weights = _weights(plan, rows, mask, dot_keys(plan, rows.q, columns.keys))
    d_weights = dot_keys(plan, rows.d_out, columns.keys)
    narrow = rows.q.dtype

    def score_gradients() -> tuple[Array, Array | None]:
        d_scores, products = _score_gradients(plan, rows, mask, weights, d_weights)
        return d_scores.astype(narrow), _row_sums(products) if exact else None

    d_scores, inner = _once(plan, tile, weights, score_gradients)
    of_keys = (weights * rows.share[..., None]).astype(narrow)
    d_keys = _onto_keys(plan, d_scores, rows.q, columns) + _onto_keys(plan, of_keys, rows.d_out, columns)
    return _Sums(combine(plan, d_scores, columns.keys), inner), d_keys


def _weights(plan: Plan, rows: _Rows, mask: Array, dots: Array) -> Array:
    """exp(logit - lse), [B, T, H, N]; 0 where not seen."""
    logits = dots * plan.scale - rows.lse[..., None]
    return jnp.exp(jnp.where(mask, logits, plan.lowest))


def _score_gradients(plan: Plan, rows: _Rows, mask: Array, weights: Array, d_weights: Array) -> tuple[Array, Array]:
    """Gradients of the dots of q, and p_j d_out . k_j, from weights p_j and dots of d_out: [B, T, H, N] each."""
    # Of a key that is not seen the product may be infinite: its weight is zero, but 0 * inf is not.
    of_seen = jnp.where(mask, d_weights, 0.0)
    d_scores = weights * (of_seen * rows.share[..., None] + rows.offset[..., None]) * plan.scale
    return d_scores, weights * of_seen


def _once(plan: Plan, tile: Tile, like: Array, compute: Callable[[], T]) -> T:
    """What `compute` returns, which XLA must not compute again for every use: see `Plan.shield`.

    It varies over the devices that `like` varies over.
    """
    if not plan.shield:
        return compute()
    made = jax.eval_shape(compute)
    return jax.lax.cond(
        tile.rows.start >= 0, compute, lambda: varying(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), made), like)
    )


def _onto_keys(plan: Plan, weights: Array, rows: Array, columns: Columns) -> Array:
    """[B, T, H, N] and [B, T, H, D] -> the keys' shape, summed over who sees them."""
    if columns.keys.columns is not None:
        return contract(plan, weights, rows, ((1, 2), (1, 2)), ((0,), (0,)))
    return contract(plan, weights, rows, ((2,), (2,)), ((0, 1), (0, 1)))
