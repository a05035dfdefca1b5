"""Scores of the lightning indexer, and the exact selection of the best entries."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from foveal.checks import as_array, as_int, as_precision
from foveal.geometry import Block, Blocks, TileRanges, Visibility, as_visibility
from foveal.meshes import any_mesh
from foveal.program import per_row, planned, platform, varying
from foveal.typing import Array, Float, Int32, Precision, Size

_LANES = 128

_LARGEST = 1e37
"""Bound on a score below which no step of its computation can overflow float32."""


@any_mesh(like="q", dims=2)
def select_entries(
    q: Float[Array, "B S I J"],
    weights: Float[Array, "B S I"],
    keys: Float[Array, "B C J"],
    *,
    visibility: Visibility,
    top_k: int,
    block_size: int | None = None,
    precision: Precision = None,
) -> Int32[Array, "B S K"]:
    """Select the slots of the `top_k` visible entries with the highest index scores, for every query.

    score[t, c] = sum_i weights[t, i] * relu(q[t, i] . keys[c]), in float32; the weights may be negative. Technical
    report, arXiv 2606.19348, equations 15-17. The same slots serve all attention heads.

    Exact and deterministic: of equal scores the lower slot wins, and -0.0 equals 0.0. An entry whose score is NaN or
    that the query does not see is never chosen. Where fewer than `top_k` remain, all of them are chosen. No gradient
    flows through the selection.

    Scores are computed for one block of queries and one of entries at a time, summed over heads, up to the last entry
    that the queries see: memory is linear in S. A block whose queries see no more than `top_k` entries each is not
    scored, unless it is the only one.

    Args:
        q: indexer queries after RoPE, [B, S, I, J].
        weights: weights per query and indexer head, any scaling included, [B, S, I].
        keys: the indexer's own entries after RoPE, [B, C, J].
        visibility: who sees what; its `slots` must be C.
        top_k: entries to choose per query, >= 1; may exceed C.
        block_size: queries scored at a time; the result does not depend on it.
        precision: matmul precision.

    Returns:
        int32 [B, S, K], K = min(top_k, C): chosen slots in ascending order, then -1 for none.

    Raises:
        ValueError: arguments that do not fit each other, or `top_k` or `block_size` below 1.
    """
    visibility = as_visibility(visibility)
    q = as_array("q", q, "B S I J", visibility.documents.shape)
    weights = as_array("weights", weights, "B S I", q.shape[:3])
    keys = as_array("keys", keys, "B C J", (q.shape[0], visibility.slots, q.shape[3]))
    top_k, precision = as_int("top_k", top_k, 1), as_precision(precision)
    block_size = None if block_size is None else as_int("block_size", block_size, 1)
    return best_entries(q, weights, keys, visibility, top_k, block_size=block_size, precision=precision)


def best_entries(
    q: Array,
    weights: Array,
    keys: Array,
    visibility: Visibility,
    top_k: int,
    *,
    block_size: int | None = None,
    precision: Precision = None,
) -> Array:
    """`select_entries` for checked arguments."""
    batch, length, heads, _ = q.shape
    slots = keys.shape[1]
    chosen = min(top_k, slots)
    if chosen == 0 or batch * length == 0:
        return jnp.zeros((batch, length, chosen), jnp.int32)
    plan = _SelectionPlan.for_shapes(batch, length, heads, slots, chosen, block_size, precision)
    q, weights, keys = jax.lax.stop_gradient((planned(q), weights, keys))
    weights = weights.astype(jnp.float32)
    if plan.at_once:
        return best_of(_ranks(plan, _ScoredBlock(q, weights, keys, visibility.tile(0, length))), chosen, cpu=plan.cpu)
    index = _Index(q, weights, jnp.swapaxes(keys, 1, 2), _largest(keys), visibility)

    def step(rows: Block, out: Array) -> Array:
        return rows.put(out, _select_block(plan, index.at(rows), index.largest))

    start = jnp.zeros((batch, length, chosen), jnp.int32)
    return Blocks(plan.queries, length).fold(step, start, like=(q, weights, keys, visibility))


@dataclasses.dataclass(frozen=True)
class _SelectionPlan:
    """Static parameters: queries and entries per block, K, and whether the platform is a CPU.

    `at_once`: one block holds all queries, as in decoding. Each key is then read once, to be scored: transposing all
    keys first, or finding the largest, would cost as much.
    """

    queries: int
    entries: int
    chosen: int
    precision: Precision
    at_once: bool
    cpu: bool

    @classmethod
    def for_shapes(
        cls,
        batch: Size,
        length: int,
        heads: int,
        slots: int,
        chosen: int,
        block_size: int | None,
        precision: Precision,
    ) -> _SelectionPlan:
        """Choose blocks small enough for a CPU's caches, or large enough to keep another device busy."""
        cpu = platform() == "cpu"
        # Rows of the matmul are queries times heads; a row of ranks has all entries.
        rows, entries, ranks = (1 << 10, 1 << 8, 1 << 22) if cpu else (1 << 15, 1 << 10, 1 << 24)
        if block_size is None:
            block_size = per_row(min(rows // heads, ranks // slots), batch, 8)
        at_once = length <= block_size and chosen < slots
        return cls(min(block_size, length), min(entries, slots), chosen, precision, at_once, cpu)


class _Index(NamedTuple):
    """All queries: q [B, S, I, J], float32 weights [B, S, I], transposed keys [B, J, C] and their largest magnitude."""

    q: Array
    weights: Array
    keys: Array
    largest: Array
    visibility: Visibility

    def at(self, rows: Block) -> _ScoredBlock:
        """The queries at a block of rows, in every batch row."""
        ranges = self.visibility.tile(rows.start, rows.size)
        return _ScoredBlock(*rows.take((self.q, self.weights)), self.keys, ranges)


class _ScoredBlock(NamedTuple):
    """T queries: q [B, T, I, J], weights [B, T, I], keys [B, J, C] ([B, C, J] if `at_once`), and what they see."""

    q: Array
    weights: Array
    keys: Array
    ranges: TileRanges


def _select_block(plan: _SelectionPlan, block: _ScoredBlock, largest_key: Array) -> Array:
    """Chosen slots of a block of queries: int32 [B, T, K]."""
    batch, queries, heads, dim = block.q.shape
    # Without overflow and NaN no score is NaN: a query that sees at most K entries then chooses all of them.
    largest = _largest(block.q) * largest_key * _largest(block.weights) * (heads * dim)
    first, end = block.ranges.entry_first, block.ranges.entry_end
    no_choice = ((end - first).max() <= plan.chosen) & (largest < _LARGEST)

    def all_seen(block: _ScoredBlock) -> Array:
        slot = block.ranges.entry_first[..., None] + jnp.arange(plan.chosen, dtype=jnp.int32)[None, None]
        seen = jnp.where(slot < block.ranges.entry_end[..., None], slot, -1)
        return varying(jnp.broadcast_to(seen, (batch, queries, plan.chosen)), block)

    def best(block: _ScoredBlock) -> Array:
        return best_of(_ranks(plan, block), plan.chosen, cpu=plan.cpu)

    return jax.lax.cond(no_choice, all_seen, best, block)


_NEVER = np.iinfo(np.int32).min
"""Rank of an entry that must not be chosen."""


def _ranks(plan: _SelectionPlan, block: _ScoredBlock) -> Array:
    """Ranks int32 [B, T, C], in the order of the scores."""
    batch, queries, heads = block.q.shape[:3]
    axis, product = (1, "btij,bcj->btic") if plan.at_once else (2, "btij,bjc->btic")
    slots = block.keys.shape[axis]

    def step(columns: Block, ranks: Array) -> Array:
        keys, seen = columns.take(block.keys, axis), block.ranges.sees(columns.start, columns.size)
        dots = jnp.einsum(product, block.q, keys, precision=plan.precision, preferred_element_type=jnp.float32)
        # Three axes: with a fourth of length 1, CPUs take three times as long (JAX 0.10).
        weighted = relu(dots.reshape(batch * queries, heads, -1)) * block.weights.reshape(-1, heads, 1)
        scores = weighted.sum(axis=1).reshape(batch, queries, -1)
        return columns.put(ranks, rank(scores, seen), axis=2)

    start, bounds = jnp.full((batch, queries, slots), _NEVER, jnp.int32), block.ranges.slot_blocks(plan.entries)
    return Blocks(plan.entries, slots).fold(step, start, like=block, bounds=bounds)


def relu(dots: Array) -> Array:
    """ReLU that keeps NaN: where XLA for CPUs fuses `jax.nn.relu` with a sum over heads, max(NaN, 0) is 0."""
    return jnp.where(dots <= 0.0, 0.0, dots)


def rank(scores: Array, seen: Array) -> Array:
    """Ranks int32 [B, T, N] in the order of float32 scores, -0.0 like 0.0; `_NEVER`, the lowest, for NaN or unseen."""
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0.0, 0.0, scores), jnp.int32)
    ordered = jnp.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)
    return jnp.where(seen & ~jnp.isnan(scores), ordered, _NEVER)


def best_of(ranks: Array, count: int, *, cpu: bool) -> Array:
    """Slots of the highest ranks: int32 [B, T, count], ascending, then -1. Of equal ranks the lower slot wins.

    CPUs find the K-th highest rank of a row by bisection, without sorting. Other devices sort: they have no fast way to
    compact what bisection finds.
    """
    return _best_by_bisection(ranks, count) if cpu else _best_by_sorting(ranks, count)


def _best_by_sorting(ranks: Array, count: int) -> Array:
    slots = ranks.shape[2]
    best, slot = jax.lax.top_k(ranks, count)  # the lower slot first among equal ranks
    ascending = jnp.sort(jnp.where(best > _NEVER, slot, slots), axis=2)
    return jnp.where(ascending < slots, ascending, -1)


def _best_by_bisection(ranks: Array, count: int) -> Array:
    """Find the `count`-th highest rank bit by bit, then choose the ranks above it and as many equal to it as needed."""

    def step(i: Array, reached: Array) -> Array:
        # In uint32, counted from the lowest int32.
        higher = reached | (jnp.uint32(1) << (jnp.uint32(31) - jnp.uint32(i)))
        enough = _how_many(ranks >= _signed(higher)) >= count
        return jnp.where(enough, higher, reached)

    start = varying(jnp.zeros((*ranks.shape[:2], 1), jnp.uint32), ranks)
    limit = _signed(jax.lax.fori_loop(jnp.int32(0), jnp.int32(32), step, start))
    above, equal = ranks > limit, (ranks == limit) & (ranks > _NEVER)
    missing = count - _how_many(above)
    surplus = jnp.any(_how_many(equal) > missing)
    equal = jax.lax.cond(surplus, lambda e: e & (_running_count(e) <= missing), lambda e: e, equal)
    return _slots_of(above | equal, count)


def _signed(value: Array) -> Array:
    return jax.lax.bitcast_convert_type(value ^ jnp.uint32(1 << 31), jnp.int32)


def _how_many(flags: Array) -> Array:
    return jnp.sum(flags, axis=2, dtype=jnp.int32, keepdims=True)


def _slots_of(chosen: Array, count: int) -> Array:
    """Positions of up to `count` True values per query: int32 [B, T, count], ascending, then -1."""
    slot = jnp.arange(chosen.shape[2], dtype=jnp.int32)
    place = jnp.where(chosen, _running_count(chosen) - 1, count + slot[None, None])  # past the end: dropped

    def put(place: Array) -> Array:
        return jnp.full(count, -1, jnp.int32).at[place].set(slot, mode="drop", unique_indices=True)

    return jax.vmap(jax.vmap(put))(place)  # vmap, not indices of batch and queries: keeps a sharded batch sharded


def _running_count(flags: Array) -> Array:
    """Inclusive count of True along each row, int32: a matmul with a triangle takes CPUs half the time of a cumsum."""
    *rows, length = flags.shape
    groups = -(-length // _LANES)
    grouped = jnp.pad(flags, ((0, 0), (0, 0), (0, groups * _LANES - length))).reshape(*rows, groups, _LANES)
    within = grouped.astype(jnp.float32) @ np.triu(np.ones((_LANES, _LANES), np.float32))  # exact: small integers
    total = within[..., -1]
    count = within + (jnp.cumsum(total, axis=2) - total)[..., None]
    return count.reshape(*rows, -1)[..., :length].astype(jnp.int32)


def _largest(array: Array) -> Array:
    """Largest magnitude; NaN if any element is not finite, which a maximum alone may miss (see `relu`)."""
    array = array.astype(jnp.float32)
    return jnp.where(jnp.isfinite(array).all(), jnp.abs(array).max(), jnp.nan)
