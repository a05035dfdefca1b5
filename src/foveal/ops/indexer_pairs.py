"""Query-entry pairs of the indexer's loss: their scores, the teacher's logits, and the gradients of the scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from foveal.checks import as_array
from foveal.geometry import Block, Blocks, TileRanges, Visibility
from foveal.ops.indexing import relu
from foveal.program import per_row, platform
from foveal.typing import Array, Precision, lowest

T = TypeVar("T")


class Student(NamedTuple):
    """Arrays of the indexer, or their gradients: q [B, S, I, J], weights [B, S, I], keys [B, C, J]."""

    q: Array
    weights: Array
    keys: Array


class Teacher(NamedTuple):
    """Arrays of the attention: q [B, S, H, D], entries [B, C, D], log_denominator float32 [B, S, H].

    The last is the logarithm of what each head's weights are normalised by.
    """

    q: Array
    entries: Array
    log_denominator: Array

    @classmethod
    def from_arguments(
        cls, q: Array, entries: Array, lse: Array, sinks: Array | None, visibility: Visibility
    ) -> Teacher:
        """Check an op's arguments and build a teacher from them that passes no gradient on."""
        q = as_array("q", q, "B S H D", visibility.documents.shape)
        batch, _, heads, dim = q.shape
        entries = as_array("entries", entries, "B C D", (batch, visibility.slots, dim))
        lse = as_array("lse", lse, "B S H", q.shape[:3])
        sinks = None if sinks is None else as_array("sinks", sinks, "H", (heads,))
        return jax.lax.stop_gradient(cls(q, entries, log_denominator(lse, sinks)))


@dataclasses.dataclass(frozen=True)
class LossPlan:
    """Static parameters; `queries` and `entries` are the sizes of a block."""

    queries: int
    entries: int
    scale: float
    own_denominator: bool
    precision: Precision

    @classmethod
    def for_shapes(
        cls, student: Student, teacher: Teacher, indices: Array | None, scale: float, denominator: str, precision: Any
    ) -> LossPlan:
        """Choose blocks small enough for a CPU's caches, or large enough to keep another device busy."""
        batch, length, heads, dim = teacher.q.shape
        slots = student.keys.shape[1]
        heads = max(heads, student.q.shape[2])
        cpu = platform() == "cpu"
        if indices is None:
            rows, entries = (1 << 10, 1 << 8) if cpu else (1 << 13, 1 << 10)
            queries = rows // heads
        else:  # a block's entries are gathered for each query
            elements, entries = (1 << 20 if cpu else 1 << 24), 1
            queries = elements // (indices.shape[2] * dim)
        queries = min(per_row(queries, batch, 1), length)
        return cls(queries, min(entries, slots), scale, denominator == "entries", precision)


class LossSources(NamedTuple):
    """Index keys [B, C, J], which of them were finite [B, C], and entries [B, C, D]."""

    keys: Array
    finite: Array
    entries: Array


class QueryBlock(NamedTuple):
    """T queries: the indexer's q and float32 weights, the attention's q and denominators, and what they see."""

    index_q: Array
    weights: Array
    q: Array
    log_denominator: Array
    ranges: TileRanges


LOWEST = lowest(jnp.float32)
"""Score, logit and log-share of a slot that a query does not use."""


def log_denominator(lse: Array, sinks: Array | None) -> Array:
    """Logarithm of the softmax denominator over window, entries and sink: float32 [B, S, H].

    Any finite number where a query sees nothing.
    """
    lse = lse.astype(jnp.float32)
    lse = jnp.where(lse < LOWEST, 0.0, lse)
    return lse if sinks is None else jnp.logaddexp(lse, sinks.astype(jnp.float32)[None, None])


def heads_logits(logits: Array, denominator: Array) -> Array:
    """log sum_h exp(logits - denominator): [B, T, N] from [B, T, H, N] and [B, T, H].

    A head whose sink is infinite adds nothing; `LOWEST` where no head adds anything.
    """
    shares = jnp.where(jnp.isfinite(denominator)[..., None], logits - denominator[..., None], LOWEST)
    shares = jnp.where(jnp.isnan(denominator)[..., None], jnp.nan, shares)
    return log_sum_exp(shares, axis=2)


def log_sum_exp(logits: Array, *, axis: int) -> Array:
    """Log-sum-exp of float32 logits over an axis; `LOWEST` where all of them are."""
    peak = logits.max(axis=axis, keepdims=True)
    peak = jnp.where(peak <= LOWEST, 0.0, peak)
    total = jnp.sum(jnp.exp(logits - peak), axis=axis)
    none = total == 0.0
    return jnp.where(none, LOWEST, jnp.log(jnp.where(none, 1.0, total)) + jnp.squeeze(peak, axis))


@dataclasses.dataclass(frozen=True)
class Streamed:
    """A block of queries and all entries that they see, one block of entries at a time."""

    plan: LossPlan
    sources: LossSources
    block: QueryBlock

    def _fold(self, step: Callable[[Block, T], T], start: T) -> T:
        """Loop over the blocks of entries that any query sees."""
        bounds = self.block.ranges.slot_blocks(self.plan.entries)
        blocks = Blocks(self.plan.entries, self.sources.keys.shape[1])
        return blocks.fold(step, start, like=(self.sources, self.block), bounds=bounds)

    def _seen(self, columns: Block) -> Array:
        """Whether each query sees each slot of a block, bool [B or 1, T, N]."""
        return self.block.ranges.sees(columns.start, columns.size)

    def _dots(self, columns: Block) -> tuple[Array, Array]:
        """Dot products float32 [B, T, I, N], and the keys."""
        keys = columns.take(self.sources.keys)
        return _matmul("btij,bcj->btic", self.block.index_q, keys, self.plan), keys

    def _logits(self, columns: Block) -> Array:
        entries = columns.take(self.sources.entries)
        return _matmul("bthd,bcd->bthc", self.block.q, entries, self.plan) * self.plan.scale

    def both(self) -> tuple[Array, Array, Array]:
        """Scores and the teacher's logits, float32 [B, T, C], and the mask of visible entries."""
        batch, queries = self.block.index_q.shape[:2]
        slots = self.sources.keys.shape[1]
        denominator = self._own_denominators() if self.plan.own_denominator else self.block.log_denominator

        def step(columns: Block, both: tuple[Array, Array]) -> tuple[Array, Array]:
            dots, _ = self._dots(columns)
            scores = jnp.sum(relu(dots) * self.block.weights[..., None], axis=2)
            scores = jnp.where(columns.take(self.sources.finite)[:, None], scores, jnp.nan)
            logits = heads_logits(self._logits(columns), denominator)
            return columns.put(both, (scores, logits), axis=2)

        empty = jnp.full((batch, queries, slots), LOWEST, jnp.float32)
        scores, logits = self._fold(step, (empty, empty))
        return scores, logits, jnp.broadcast_to(self.block.ranges.sees(0, slots), scores.shape)

    def _own_denominators(self) -> Array:
        """Log-sum-exp of each head's logits over the entries alone, float32 [B, T, H]; finite without entries."""

        def step(columns: Block, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            logits = jnp.where(
                (self._seen(columns) & columns.fresh[None, None])[:, :, None], self._logits(columns), LOWEST
            )
            peak = jnp.maximum(sums[0], logits.max(axis=-1))
            safe = jnp.where(peak <= LOWEST, 0.0, peak)
            total = sums[1] * jnp.exp(sums[0] - safe) + jnp.sum(jnp.exp(logits - safe[..., None]), axis=-1)
            return peak, total

        shape = self.block.q.shape[:3]
        peak, total = self._fold(step, (jnp.full(shape, LOWEST, jnp.float32), jnp.zeros(shape, jnp.float32)))
        none = total == 0.0
        return jnp.where(none, 0.0, peak) + jnp.log(jnp.where(none, 1.0, total))

    def pull(self, d_scores: Array, d_fresh: Array, d_keys: Array) -> tuple[Array, Array, Array]:
        """Gradients of the indexer's queries and weights, and `d_keys` [B, C, J] with those of its keys added."""

        def step(columns: Block, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dots, keys = self._dots(columns)
            dots = jnp.where(self._seen(columns)[:, :, None], dots, 0.0)
            fresh = columns.fresh[None, None]
            of_all, of_fresh = (jnp.where(fresh, d, 0.0) for d in columns.take((d_scores, d_fresh), axis=2))
            d_q, d_weights, d_dots = _pull_dots(self.plan, self.block, dots, of_all, "btic,bcj->btij", keys)
            d_here = _matmul("btic,btij->bcj", d_dots(of_fresh), self.block.index_q, self.plan)
            return sums[0] + d_q, sums[1] + d_weights, columns.add(sums[2], d_here)

        q, weights = self.block.index_q, self.block.weights
        return self._fold(step, (jnp.zeros(q.shape, jnp.float32), jnp.zeros(weights.shape, jnp.float32), d_keys))


@dataclasses.dataclass(frozen=True)
class Gathered:
    """A block of queries and the entries that each of them selected."""

    plan: LossPlan
    sources: LossSources
    block: QueryBlock
    indices: Array

    def _gather(self, array: Array) -> Array:
        """[B, C, F] -> [B, T, K, F]."""
        batch, queries, count = self.indices.shape
        slot = jnp.maximum(self.indices, 0).reshape(batch, queries * count)
        return jnp.take_along_axis(array, slot[..., None], axis=1).reshape(batch, queries, count, -1)

    def _dots(self) -> tuple[Array, Array]:
        keys = self._gather(self.sources.keys)
        return _matmul("btij,btkj->btik", self.block.index_q, keys, self.plan), keys

    def both(self) -> tuple[Array, Array, Array]:
        """Scores and the teacher's logits, float32 [B, T, K], and the mask of selected entries."""
        able = self.indices >= 0
        scores = jnp.sum(relu(self._dots()[0]) * self.block.weights[..., None], axis=2)
        finite = jnp.take_along_axis(self.sources.finite[:, None], jnp.maximum(self.indices, 0), axis=2)
        scores = jnp.where(finite, scores, jnp.nan)
        entries = self._gather(self.sources.entries)
        logits = _matmul("bthd,btkd->bthk", self.block.q, entries, self.plan) * self.plan.scale
        denominator = self.block.log_denominator
        if self.plan.own_denominator:
            denominator = log_sum_exp(jnp.where(able[:, :, None], logits, LOWEST), axis=-1)
            denominator = jnp.where(denominator == LOWEST, 0.0, denominator)
        return scores, heads_logits(logits, denominator), able

    def pull(self, d_scores: Array, d_fresh: Array, d_keys: Array) -> tuple[Array, Array, Array]:
        """See `Streamed.pull`."""
        dots, keys = self._dots()
        dots = jnp.where((self.indices >= 0)[:, :, None], dots, 0.0)
        d_q, d_weights, d_dots = _pull_dots(self.plan, self.block, dots, d_scores, "btik,btkj->btij", keys)
        each = _matmul("btik,btij->btkj", d_dots(d_fresh), self.block.index_q, self.plan)
        batch = jnp.arange(self.indices.shape[0])[:, None, None]
        target = jnp.where(self.indices < 0, d_keys.shape[1], self.indices)  # past the end: dropped
        return d_q, d_weights, d_keys.at[batch, target].add(each, mode="drop")


def _pull_dots(
    plan: LossPlan, block: QueryBlock, dots: Array, d_scores: Array, spelling: str, keys: Array
) -> tuple[Array, Array, Any]:
    """Gradients for score = sum_i w_i relu(dot_i): of q, of w, and of the dots as a function of d_scores.

    The dots of entries that a query does not use must be 0: an infinite one times a gradient of 0 would be NaN.
    """

    def d_dots(d_scores: Array) -> Array:
        return jnp.where(dots > 0.0, d_scores[:, :, None] * block.weights[..., None], 0.0).astype(keys.dtype)

    d_weights = jnp.sum(relu(dots) * d_scores[:, :, None], axis=-1)
    return _matmul(spelling, d_dots(d_scores), keys, plan), d_weights, d_dots


def _matmul(spelling: str, a: Array, b: Array, plan: LossPlan) -> Array:
    return jnp.einsum(spelling, a, b, precision=plan.precision, preferred_element_type=jnp.float32)
