"""The lightning indexer's training objective: its distribution over entries against the attention's."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from foveal.backends.program import platform, varying
from foveal.geometry import Visibility
from foveal.ops.indexing import relu
from foveal.typing import Array, Float, Float32, Int, Precision


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexerLoss:
    """A sum over queries and how many it is over, float32 scalars: sums of both over layers and devices can be divided.

    Attributes:
        total: the sum of the divergences, in nats.
        count: queries that have an entry to attend to; the others add nothing.
    """

    __no_type_check__ = True  # JAX builds pytrees of placeholders too: annotations cannot hold then

    total: Float32[Array, ""]
    count: Float32[Array, ""]

    @property
    def mean(self) -> Float32[Array, ""]:
        """A query's, 0 where none has an entry."""
        return self.total / jnp.maximum(self.count, 1.0)


def indexer_loss(
    index_q: Float[Array, "B S I J"],
    index_weights: Float[Array, "B S I"],
    index_keys: Float[Array, "B C J"],
    *,
    q: Float[Array, "B S H D"],
    entries: Float[Array, "B C D"],
    lse: Float[Array, "B S H"],
    sinks: Float[Array, " H"] | None,
    visibility: Visibility,
    indices: Int[Array, "B S K"] | None = None,
    scale: float | None = None,
    denominator: Literal["all", "entries"] = "all",
    precision: Precision = None,
) -> IndexerLoss:
    """KL divergence of the indexer's softmax from the attention's weights of the entries, summed over queries.

    For query t the teacher is p[c] = sum_h a[h, c] / sum_c' sum_h a[h, c'], with a[h, c] the weight that head h gives
    entry c; the indexer has softmax(score)[c], with `select_entries`' score. Both are over the same entries: those in
    `indices` (sparse training) or all that t sees (dense warm-up). The teacher is constant: gradients go to the first
    three arguments alone. DeepSeek-V3.2 (arXiv 2512.02556, section 2.1.1), with V4's entries for tokens.

    Nothing of S x C elements is built, neither for the value nor for gradients: these are computed block by block in
    the forward pass and scaled in the backward.

    Args:
        index_q: indexer queries after RoPE, [B, S, I, J].
        index_weights: per query and indexer head, any scaling included, [B, S, I].
        index_keys: the indexer's own entries after RoPE, [B, C, J].
        q: attention queries, [B, S, H, D].
        entries: the attention's entries, [B, C, D].
        lse: log-sum-exp of the attention's logits, [B, S, H], from `core_attention(..., return_lse=True)` over the same
            entries.
        sinks: [H], or None.
        visibility: who sees what.
        indices: integers [B, S, K], each a slot that the query sees, none twice, or -1; as `select_entries` gives them.
        scale: of the attention's logits, D ** -0.5 by default.
        denominator: what a head's weights are shares of: "all" it attends to, window and sink included, or "entries"
            alone, as MaxText has it, which gives heads that look at the window as much say as others.
        precision: of the matmuls.

    Raises:
        ValueError: shapes that do not fit each other, or an unknown denominator.
    """
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    _check(index_q, index_weights, index_keys, q, entries, lse, sinks, visibility, indices, denominator)
    wide = jnp.float32
    whole = lse.astype(wide) if sinks is None else jnp.logaddexp(lse.astype(wide), sinks.astype(wide)[None, None])
    teacher = jax.lax.stop_gradient(_Teacher(q, entries, whole))
    student = _Student(index_q, index_weights, index_keys)
    if index_q.shape[0] * index_q.shape[1] * index_keys.shape[1] == 0 or (
        indices is not None and indices.shape[2] == 0
    ):
        return IndexerLoss(jnp.zeros((), wide), jnp.zeros((), wide))
    if indices is not None:
        indices = indices.astype(jnp.int32)
    plan = _Plan.of(student, teacher, indices, scale, denominator, precision)
    sums: Any = _loss(plan, student, teacher, visibility, indices)
    total, count = sums
    return IndexerLoss(total, jax.lax.stop_gradient(count))


class _Student(NamedTuple):
    q: Array
    weights: Array
    keys: Array


class _Teacher(NamedTuple):
    q: Array
    entries: Array
    whole: Array  # float32 [B, S, H]: what a head's weights are shares of, as a logarithm


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is static; `queries` and `entries` of a block."""

    queries: int
    entries: int
    scale: float
    own_denominator: bool
    precision: Precision

    @classmethod
    def of(
        cls, student: _Student, teacher: _Teacher, indices: Array | None, scale: float, denominator: str, precision: Any
    ) -> _Plan:
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
        queries = min(max(1, queries // batch), length)
        return cls(queries, min(entries, slots), scale, denominator == "entries", precision)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(
    plan: _Plan, student: _Student, teacher: _Teacher, visibility: Visibility, indices: Array | None
) -> tuple[Array, Array]:
    return _over_blocks(plan, student, teacher, visibility, indices, gradients=False)[0]


def _forward_rule(
    plan: _Plan, student: _Student, teacher: _Teacher, visibility: Visibility, indices: Array | None
) -> tuple[tuple[Array, Array], Any]:
    return _over_blocks(plan, student, teacher, visibility, indices, gradients=True)


def _backward_rule(plan: _Plan, gradients: _Student, cotangents: tuple[Array, Array]) -> Any:
    del plan
    d_total, _ = cotangents
    scaled = jax.tree.map(lambda g: (g.astype(jnp.float32) * d_total).astype(g.dtype), gradients)
    nothing: Any = None  # for all of an argument that has no gradient
    return scaled, nothing, nothing, nothing


_loss.defvjp(_forward_rule, _backward_rule)


class _Sums(NamedTuple):
    """What a loop over blocks of queries adds up and fills in."""

    total: Array
    queries: Array
    gradients: _Student | None  # of q and weights in their dtypes, of keys in float32


def _over_blocks(
    plan: _Plan,
    student: _Student,
    teacher: _Teacher,
    visibility: Visibility,
    indices: Array | None,
    *,
    gradients: bool,
) -> tuple[tuple[Array, Array], _Student | None]:
    length, size = student.q.shape[1], plan.queries
    finite = jnp.isfinite(student.keys).all(axis=-1)
    # What is not seen must not matter, and 0 x NaN is NaN: such keys become zeros, and their scores NaN.
    keys = jnp.where(finite[..., None], student.keys, 0.0)
    sources = _Sources(keys, finite, teacher.entries)

    def step(i: Array, sums: _Sums) -> _Sums:
        row = jnp.minimum(i * size, length - size)
        fresh = row + jnp.arange(size, dtype=jnp.int32) >= i * size  # the last block may begin in the one before

        def at(array: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(array, row, size, axis=1)

        seen = visibility.tile(row, size)
        weights = at(student.weights).astype(jnp.float32)
        block = _Block(at(student.q), weights, at(teacher.q), at(teacher.whole), seen.entry_first, seen.entry_end)
        pairs = _Streamed(plan, sources, block) if indices is None else _Gathered(plan, sources, block, at(indices))
        scores, logits, able = pairs.both()
        rows, d_scores = _divergence(scores, logits, able)
        keep = fresh[None] & rows.any_entry
        total = sums.total + jnp.sum(jnp.where(keep, rows.divergence, 0.0))
        count = sums.queries + jnp.sum(keep.astype(jnp.float32))
        if sums.gradients is None:
            return _Sums(total, count, None)
        # Queries that count nothing, padding above all, may hold anything, of which nothing must reach a gradient.
        d_scores = jnp.where(rows.any_entry[..., None], d_scores, 0.0)
        counted = jnp.where(rows.any_entry[..., None, None], block.index_q, 0.0)
        weights = jnp.where(rows.any_entry[..., None], weights, 0.0)
        pairs = dataclasses.replace(pairs, block=block._replace(index_q=counted, weights=weights))
        d_q, d_weights, d_keys = pairs.pull(d_scores, jnp.where(keep[..., None], d_scores, 0.0), sums.gradients.keys)
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=row, axis=1)
        filled = _Student(
            put(sums.gradients.q, d_q.astype(student.q.dtype)),
            put(sums.gradients.weights, d_weights.astype(student.weights.dtype)),
            d_keys,
        )
        return _Sums(total, count, filled)

    zero = jnp.zeros((), jnp.float32)
    empty = None
    if gradients:
        empty = _Student(
            jnp.zeros_like(student.q), jnp.zeros_like(student.weights), jnp.zeros(student.keys.shape, jnp.float32)
        )
    start = varying(_Sums(zero, zero, empty), (student, teacher, visibility, indices))
    sums = jax.lax.fori_loop(jnp.int32(0), jnp.int32(-(-length // size)), step, start)
    if sums.gradients is not None:
        narrow = sums.gradients.keys.astype(student.keys.dtype)
        sums = sums._replace(gradients=sums.gradients._replace(keys=narrow))
    return (sums.total, sums.queries), sums.gradients


class _Sources(NamedTuple):
    """Index keys [B, C, J], which of them were finite [B, C], and entries [B, C, D]."""

    keys: Array
    finite: Array
    entries: Array


class _Block(NamedTuple):
    """Of T queries: the indexer's q and float32 weights, the attention's q and denominators, the slots each sees."""

    index_q: Array
    weights: Array
    q: Array
    whole: Array
    first: Array
    end: Array


class _RowSums(NamedTuple):
    divergence: Array
    any_entry: Array


def _divergence(scores: Array, logits: Array, able: Array) -> tuple[_RowSums, Array]:
    """[B, T] divergences of softmax(scores) from softmax(logits), [B, T, N] each, and gradients of the scores."""
    some = able & (logits != -jnp.inf)  # of an infinite sink nothing remains to learn from
    any_entry = some.any(axis=-1)

    def log_softmax(values: Array, among: Array) -> Array:
        values = jnp.where(among, values, -jnp.inf)
        peak = jax.lax.stop_gradient(jnp.max(values, axis=-1, keepdims=True))
        peak = jnp.where(peak == -jnp.inf, 0.0, peak)
        total = jnp.sum(jnp.where(among, jnp.exp(values - peak), 0.0), axis=-1, keepdims=True)
        return jnp.where(among, values - peak - jnp.log(jnp.where(total == 0.0, 1.0, total)), -jnp.inf)

    log_teacher, log_student = log_softmax(logits, some), log_softmax(scores, able)
    teacher, student = jnp.exp(log_teacher), jnp.exp(log_student)
    each = jnp.where(some, teacher * (log_teacher - log_student), 0.0)
    return _RowSums(each.sum(axis=-1), any_entry), jnp.where(able, student - teacher, 0.0)


def _heads_logits(logits: Array, whole: Array) -> Array:
    """log sum_h exp(logits - whole), [B, T, N] of [B, T, H, N] and [B, T, H]; none of a head with nothing to share."""
    shares = jnp.where(jnp.isfinite(whole)[..., None], logits - whole[..., None], -jnp.inf)
    shares = jnp.where(jnp.isnan(whole)[..., None], jnp.nan, shares)
    peak = shares.max(axis=2, keepdims=True)
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    return jnp.log(jnp.sum(jnp.exp(shares - peak), axis=2)) + peak[:, :, 0]


@dataclasses.dataclass(frozen=True)
class _Streamed:
    """All entries that a block of queries sees, some at a time."""

    plan: _Plan
    sources: _Sources
    block: _Block

    def _columns(self) -> tuple[Array, Array]:
        """First and last block of entries that any query sees."""
        sees, size = self.block.end > self.block.first, self.plan.entries
        first = jnp.where(sees, self.block.first, self.sources.keys.shape[1]).min() // size
        return first, -(-jnp.where(sees, self.block.end, 0).max() // size)

    def _at(self, j: Array) -> tuple[Array, Array]:
        """First slot of a block, and whether each query sees each: bool [B or 1, T, N]."""
        column = jnp.minimum(j * self.plan.entries, self.sources.keys.shape[1] - self.plan.entries)
        slot = column + jnp.arange(self.plan.entries, dtype=jnp.int32)[None, None]
        return column, (slot >= self.block.first[..., None]) & (slot < self.block.end[..., None])

    def _take(self, array: Array, column: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(array, column, self.plan.entries, axis=1)

    def _dots(self, column: Array) -> tuple[Array, Array]:
        """float32 [B, T, I, N], and the keys."""
        keys = self._take(self.sources.keys, column)
        return _matmul("btij,bcj->btic", self.block.index_q, keys, self.plan), keys

    def _logits(self, column: Array) -> Array:
        entries = self._take(self.sources.entries, column)
        return _matmul("bthd,bcd->bthc", self.block.q, entries, self.plan) * self.plan.scale

    def both(self) -> tuple[Array, Array, Array]:
        """Scores and the teacher's logits float32 [B, T, C], and which are seen."""
        batch, queries = self.block.index_q.shape[:2]
        slots = self.sources.keys.shape[1]
        whole = self._own_denominators() if self.plan.own_denominator else self.block.whole

        def step(j: Array, both: tuple[Array, Array]) -> tuple[Array, Array]:
            column, _ = self._at(j)
            dots, _ = self._dots(column)
            scores = jnp.sum(relu(dots) * self.block.weights[..., None], axis=2)
            scores = jnp.where(self._take(self.sources.finite, column)[:, None], scores, jnp.nan)
            logits = _heads_logits(self._logits(column), whole)
            put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=column, axis=2)
            return put(both[0], scores), put(both[1], logits)

        empty = jnp.full((batch, queries, slots), -jnp.inf, jnp.float32)
        start = varying((empty, empty), (self.sources, self.block))
        scores, logits = jax.lax.fori_loop(*self._columns(), step, start)
        slot = jnp.arange(slots, dtype=jnp.int32)[None, None]
        able = (slot >= self.block.first[..., None]) & (slot < self.block.end[..., None])
        return scores, logits, jnp.broadcast_to(able, scores.shape)

    def _own_denominators(self) -> Array:
        """float32 [B, T, H]: log-sum-exp of a head's logits over the entries alone."""

        def step(j: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            column, seen = self._at(j)
            # What the block before had of these columns, if the last begins within it, is not counted again.
            fresh = column + jnp.arange(self.plan.entries, dtype=jnp.int32) >= j * self.plan.entries
            logits = jnp.where((seen & fresh[None, None])[:, :, None], self._logits(column), -jnp.inf)
            peak = jnp.maximum(sums[0], logits.max(axis=-1))
            safe = jnp.where(peak == -jnp.inf, 0.0, peak)
            total = sums[1] * jnp.exp(sums[0] - safe) + jnp.sum(jnp.exp(logits - safe[..., None]), axis=-1)
            return peak, total

        shape = self.block.q.shape[:3]
        start = varying(
            (jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.float32)), (self.sources, self.block)
        )
        peak, total = jax.lax.fori_loop(*self._columns(), step, start)
        return jnp.where(peak == -jnp.inf, -jnp.inf, peak + jnp.log(jnp.where(total == 0.0, 1.0, total)))

    def pull(self, d_scores: Array, d_fresh: Array, d_keys: Array) -> tuple[Array, Array, Array]:
        """Gradients of the indexer's queries and weights, and of its keys with those in `d_keys` [B, C, J]."""

        def step(j: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            column, seen = self._at(j)
            fresh = column + jnp.arange(self.plan.entries, dtype=jnp.int32) >= j * self.plan.entries
            dots, keys = self._dots(column)
            dots = jnp.where(seen[:, :, None], dots, 0.0)
            take = functools.partial(
                jax.lax.dynamic_slice_in_dim, start_index=column, slice_size=self.plan.entries, axis=2
            )
            of_all, of_fresh = (jnp.where(fresh[None, None], take(d), 0.0) for d in (d_scores, d_fresh))
            d_q, d_weights, d_dots = _pull_dots(self.plan, self.block, dots, of_all, "btic,bcj->btij", keys)
            d_here = _matmul("btic,btij->bcj", d_dots(of_fresh), self.block.index_q, self.plan)
            old = jax.lax.dynamic_slice_in_dim(sums[2], column, self.plan.entries, axis=1)
            added = jax.lax.dynamic_update_slice_in_dim(sums[2], old + d_here, column, axis=1)
            return sums[0] + d_q, sums[1] + d_weights, added

        zeros = (jnp.zeros(a.shape, jnp.float32) for a in (self.block.index_q, self.block.weights))
        start = (*varying(tuple(zeros), (self.sources, self.block)), d_keys)
        return jax.lax.fori_loop(*self._columns(), step, start)


@dataclasses.dataclass(frozen=True)
class _Gathered:
    """The entries that each query selected."""

    plan: _Plan
    sources: _Sources
    block: _Block
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
        """Scores and the teacher's logits float32 [B, T, K], and which are entries."""
        able = self.indices >= 0
        scores = jnp.sum(relu(self._dots()[0]) * self.block.weights[..., None], axis=2)
        finite = jnp.take_along_axis(self.sources.finite[:, None], jnp.maximum(self.indices, 0), axis=2)
        scores = jnp.where(finite, scores, jnp.nan)
        entries = self._gather(self.sources.entries)
        logits = _matmul("bthd,btkd->bthk", self.block.q, entries, self.plan) * self.plan.scale
        whole = self.block.whole
        if self.plan.own_denominator:
            whole = jax.nn.logsumexp(jnp.where(able[:, :, None], logits, -jnp.inf), axis=-1)
        return scores, _heads_logits(logits, whole), able

    def pull(self, d_scores: Array, d_fresh: Array, d_keys: Array) -> tuple[Array, Array, Array]:
        """As `_Streamed.pull`."""
        dots, keys = self._dots()
        dots = jnp.where((self.indices >= 0)[:, :, None], dots, 0.0)
        d_q, d_weights, d_dots = _pull_dots(self.plan, self.block, dots, d_scores, "btik,btkj->btij", keys)
        each = _matmul("btik,btij->btkj", d_dots(d_fresh), self.block.index_q, self.plan)
        batch = jnp.arange(self.indices.shape[0])[:, None, None]
        target = jnp.where(self.indices < 0, d_keys.shape[1], self.indices)  # past the end: dropped
        return d_q, d_weights, d_keys.at[batch, target].add(each, mode="drop")


def _pull_dots(
    plan: _Plan, block: _Block, dots: Array, d_scores: Array, spelling: str, keys: Array
) -> tuple[Array, Array, Any]:
    """Of score = sum_i w_i relu(dot_i): gradients of q and w, and those of the dots as a function of d_scores.

    Where an entry is not the query's, its dot must be 0: however large, it must not meet a gradient of 0.
    """

    def d_dots(d_scores: Array) -> Array:
        return jnp.where(dots > 0.0, d_scores[:, :, None] * block.weights[..., None], 0.0).astype(keys.dtype)

    d_weights = jnp.sum(relu(dots) * d_scores[:, :, None], axis=-1)
    return _matmul(spelling, d_dots(d_scores), keys, plan), d_weights, d_dots


def _matmul(spelling: str, a: Array, b: Array, plan: _Plan) -> Array:
    return jnp.einsum(spelling, a, b, precision=plan.precision, preferred_element_type=jnp.float32)


def _check(
    index_q: Array,
    index_weights: Array,
    index_keys: Array,
    q: Array,
    entries: Array,
    lse: Array,
    sinks: Array | None,
    visibility: Visibility,
    indices: Array | None,
    denominator: str,
) -> None:
    if denominator not in ("all", "entries"):
        raise ValueError(f'denominator: expected "all" or "entries", got {denominator!r}')
    rows, slots = visibility.documents.shape, visibility.slots
    for name, array, ndim in (("index_q", index_q, 4), ("q", q, 4)):
        if array.ndim != ndim or array.shape[:2] != rows:
            raise ValueError(f"{name}: expected [B, S, ., .] with (B, S) = {rows}, got shape {array.shape}")
    expected = {
        "index_weights": (index_weights, index_q.shape[:3]),
        "index_keys": (index_keys, (rows[0], slots, index_q.shape[3])),
        "entries": (entries, (rows[0], slots, q.shape[3])),
        "lse": (lse, q.shape[:3]),
    }
    if sinks is not None:
        expected["sinks"] = (sinks, (q.shape[2],))
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {array.shape}")
    if indices is not None:
        if indices.ndim != 3 or indices.shape[:2] != rows:
            raise ValueError(f"indices: expected [B, S, K] with (B, S) = {rows}, got shape {indices.shape}")
        if not jnp.issubdtype(indices.dtype, jnp.integer):
            raise ValueError(f"indices: expected an integer dtype, got {indices.dtype}")
