"""Backward pass: scores are recomputed, and weights follow from the saved log-sum-exp."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from foveal.backends.chunked.forward import combine, contract, dot_keys, onto_keys
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
from foveal.backends.operands import Operands, silent
from foveal.backends.sinks import RowGradients, row_gradients
from foveal.geometry import Block, Blocks
from foveal.program import varying
from foveal.typing import Array

T = TypeVar("T")


class Gradients(NamedTuple):
    """Gradients: of q in q's dtype, of everything else in the accumulation dtype."""

    q: Array
    kv: Array
    entries: Array
    sinks: Array | None


class _RowTerms(NamedTuple):
    """A tile's terms in the gradients of its logits: see `RowGradients`."""

    q: Array
    d_out: Array
    share: Array
    lse: Array
    offset: Array


class _TileSums(NamedTuple):
    """Sums of a tile over its columns.

    Attributes:
        q: gradient of its queries, [B, T, H, D].
        inner: sum_j p_j d_out . k_j, [B, T, H], for the sinks' gradient where the output has been rounded: computed
            from the rounded output, it would be no more accurate than that. None where not needed.
    """

    q: Array
    inner: Array | None


def backward(plan: ChunkedPlan, operands: Operands, out: Array, lse: Array, d_out: Array, d_lse: Array) -> Gradients:
    """Gradients of q, kv, entries and sinks."""
    wide = lse.dtype
    sources = KeySources(Keys.from_rows(plan, operands.kv), Keys.from_rows(plan, operands.entries))
    q, kv, entries, sinks = operands.q, operands.kv, operands.entries, operands.sinks
    operands = dataclasses.replace(operands, q=as_uint16(plan, q))
    out, d_out = as_uint16(plan, out), as_uint16(plan, d_out)

    def step(rows: Block, grads: Gradients) -> Gradients:
        tile = Tile.at(operands, rows, d_out, lse, d_lse, out)
        keys, columns = window_columns(plan, operands, sources, tile)
        of_rows, mine = _rows(operands, tile)
        sums, grads = _window(plan, operands, tile, mine, columns, keys, grads)
        if plan.entries in ("stream", "gather"):
            sums, d_entries = _entries(plan, operands, sources, tile, mine, (sums, grads.entries))
            grads = grads._replace(entries=d_entries)
        if grads.sinks is not None and of_rows.sink_share is not None:
            inner = of_rows.inner if sums.inner is None else of_rows.share * sums.inner
            d_sinks = jnp.where(tile.fresh[None, :, None], -of_rows.sink_share * inner, 0.0)
            grads = grads._replace(sinks=grads.sinks + jnp.sum(d_sinks, axis=(0, 1)))
        return grads._replace(q=tile.put(grads.q, sums.q))

    start = Gradients(
        as_uint16(plan, jax.lax.empty(q.shape, q.dtype)),
        jnp.zeros(kv.shape, wide),
        jnp.zeros(entries.shape, wide),
        None if sinks is None else jnp.zeros(sinks.shape, wide),
    )
    tiles = Blocks(plan.query_block, q.shape[1])
    grads = tiles.fold(step, start, like=(q, d_out, d_lse), backwards=True)
    return grads._replace(q=as_bfloat16(grads.q))


def _rows(operands: Operands, tile: Tile) -> tuple[RowGradients, _RowTerms]:
    d_out, lse, d_lse, out = tile.saved
    quiet = silent(lse, tile.padding[..., None])
    inner = _row_sums(d_out.astype(lse.dtype) * out.astype(lse.dtype))
    sinks = None if operands.sinks is None else operands.sinks[None, None]
    of_rows = row_gradients(inner, lse, d_lse, sinks, quiet)
    q = jnp.where(jnp.isfinite(tile.q), tile.q, 0.0)  # a silent query has zero weights, but 0 * NaN is NaN
    d_out = jnp.where(quiet[..., None], 0.0, d_out)
    return of_rows, _RowTerms(q, d_out, of_rows.share, of_rows.lse, of_rows.offset)


def _row_sums(array: Array) -> Array:
    """Sums over the last axis, as a matmul: XLA's own reduction of a product is ten times slower on CPUs."""
    ones = jnp.ones((array.shape[-1], 1), array.dtype)
    return jax.lax.dot_general(array, ones, (((array.ndim - 1,), (0,)), ((), ())), precision="highest")[..., 0]


def _window(
    plan: ChunkedPlan, operands: Operands, tile: Tile, rows: _RowTerms, columns: Columns, keys: Block, grads: Gradients
) -> tuple[_TileSums, Gradients]:
    exact = operands.sinks is not None and rows.q.dtype != rows.lse.dtype
    sums, d_keys = _columns(plan, tile, rows, columns, exact=exact)
    grads = grads._replace(kv=keys.add(grads.kv, d_keys[:, : keys.size]))
    if plan.entries == "few":
        grads = grads._replace(entries=grads.entries + d_keys[:, keys.size :])
    return sums, grads


_Totals = tuple[_TileSums, Array]
"""A tile's sums so far, and the gradient of all entries, [B, C, D]."""


def _entries(
    plan: ChunkedPlan, operands: Operands, sources: KeySources, tile: Tile, rows: _RowTerms, both: _Totals
) -> _Totals:
    """Add the entries' part to `both`: block by block or, in a tile that gathers, query by query."""
    slots, steps = operands.entries.shape[1], entry_steps(plan, tile)
    selected = selected_slots(slots, tile, steps)

    def streamed(block: Block, both: _Totals) -> _Totals:
        columns = entry_columns(sources, tile, selected, block)
        more, d_keys = _columns(plan, tile, rows, columns, exact=both[0].inner is not None)
        return jax.tree.map(jnp.add, both[0], more), block.add(both[1], d_keys)

    both = Blocks(plan.entry_block, slots).fold(streamed, both, bounds=steps.streamed)
    if plan.entries != "gather":
        return both

    def gathered(part: Block, both: _Totals) -> _Totals:
        return _gathered(plan, operands, tile, rows, part, both)

    return Blocks(plan.gather_block, plan.query_block).fold(gathered, both, bounds=(0, steps.parts))


def _gathered(
    plan: ChunkedPlan, operands: Operands, tile: Tile, rows: _RowTerms, part: Block, both: _Totals
) -> _Totals:
    """Add the part of some queries' selected entries to `both`."""
    (sums, d_entries), fresh = both, part.take(tile.fresh, axis=0)
    mine, slots = part.take((rows, tile.slots))
    assert slots is not None
    columns = gathered_columns(operands, slots)
    columns = columns._replace(mask=columns.mask & fresh[None, :, None])
    more, d_keys = _own_columns(plan, tile, mine, columns, exact=sums.inner is not None)
    # A masked column's gradient is zero, so any slot will do. vmap over the batch keeps a sharded batch sharded.
    d_entries = jax.vmap(lambda total, slot, part: total.at[slot].add(part, mode="promise_in_bounds"))(
        d_entries, jnp.maximum(slots, 0), d_keys
    )
    return part.put(sums, jax.tree.map(jnp.add, part.take(sums), more)), d_entries


def _own_columns(
    plan: ChunkedPlan, tile: Tile, rows: _RowTerms, columns: Columns, *, exact: bool
) -> tuple[_TileSums, Array]:
    """`_columns` where each query has columns of its own.

    q and d_out are stacked, as are the gradients of the scores and the weights: one matmul instead of two, since each
    is small, a query's heads by its entries.
    """
    keys, mask, narrow = columns.keys.rows, columns.mask[:, :, None], rows.q.dtype
    stacked_rows = jnp.stack([rows.q, rows.d_out], axis=2)
    dots = contract(plan, stacked_rows, keys, ((4,), (3,)), ((0, 1), (0, 1)))
    weights = _once(plan, tile, dots, lambda: _weights(plan, rows, mask, dots[:, :, 0]))

    def stacked() -> tuple[Array, Array]:
        d_scores, products = _score_gradients(plan, rows, mask, weights, dots[:, :, 1])
        of_keys = weights * rows.share[..., None]
        return jnp.stack([d_scores.astype(narrow), of_keys.astype(narrow)], axis=2), products

    scores, products = _once(plan, tile, weights, stacked)
    d_q = contract(plan, scores[:, :, 0], keys, ((3,), (2,)), ((0, 1), (0, 1)))
    d_keys = contract(plan, scores, stacked_rows, ((2, 3), (2, 3)), ((0, 1), (0, 1)))
    return _TileSums(d_q, _row_sums(products) if exact else None), d_keys


def _columns(
    plan: ChunkedPlan, tile: Tile, rows: _RowTerms, columns: Columns, *, exact: bool
) -> tuple[_TileSums, Array]:
    """Sums of a tile over some columns (`inner` only if `exact`), and the gradient of their keys."""
    mask = (columns.mask & tile.fresh[None, :, None])[:, :, None]
    dots, d_weights = dot_keys(plan, rows.q, columns.keys), dot_keys(plan, rows.d_out, columns.keys)
    weights, narrow = _weights(plan, rows, mask, dots), rows.q.dtype

    def score_gradients() -> tuple[Array, Array | None]:
        d_scores, products = _score_gradients(plan, rows, mask, weights, d_weights)
        return d_scores.astype(narrow), _row_sums(products) if exact else None

    d_scores, inner = _once(plan, tile, weights, score_gradients)
    of_keys = (weights * rows.share[..., None]).astype(narrow)
    d_keys = onto_keys(plan, d_scores, rows.q, columns.keys) + onto_keys(plan, of_keys, rows.d_out, columns.keys)
    return _TileSums(combine(plan, d_scores, columns.keys), inner), d_keys


def _weights(plan: ChunkedPlan, rows: _RowTerms, mask: Array, dots: Array) -> Array:
    """Weights exp(logit - lse), [B, T, H, N]; 0 where masked."""
    logits = dots * plan.scale - rows.lse[..., None]
    return jnp.exp(jnp.where(mask, logits, plan.lowest))


def _score_gradients(
    plan: ChunkedPlan, rows: _RowTerms, mask: Array, weights: Array, d_weights: Array
) -> tuple[Array, Array]:
    """Gradients of q . k_j, and p_j d_out . k_j, from weights p_j and `d_weights` d_out . k_j: [B, T, H, N] each."""
    # The product with a masked key may be infinite: its weight is zero, but 0 * inf is NaN.
    of_seen = jnp.where(mask, d_weights, 0.0)
    d_scores = weights * (of_seen * rows.share[..., None] + rows.offset[..., None]) * plan.scale
    return d_scores, weights * of_seen


def _once(plan: ChunkedPlan, tile: Tile, like: Array, compute: Callable[[], T]) -> T:
    """Return what `compute` returns, and keep XLA from computing it again for every use: see `ChunkedPlan.shield`.

    The result varies over the manual axes that `like` varies over.
    """
    if not plan.shield:
        return compute()
    made = jax.eval_shape(compute)
    return jax.lax.cond(
        tile.rows.start >= 0, compute, lambda: varying(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), made), like)
    )
