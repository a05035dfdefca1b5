"""The lightning indexer's training objective: its distribution over entries against the attention's."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from foveal.backends.once import first_only, reverse_only
from foveal.backends.program import varying
from foveal.geometry import Visibility
from foveal.ops.indexer_pairs import Block, Gathered, Plan, Sources, Streamed, Student, Teacher, log_denominator
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
    the forward pass and scaled in the backward. Differentiable once, in reverse mode.

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
        NotImplementedError: differentiated twice, or in forward mode.
    """
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    _check(index_q, index_weights, index_keys, q, entries, lse, sinks, visibility, indices, denominator)
    wide = jnp.float32
    teacher = jax.lax.stop_gradient(Teacher(q, entries, log_denominator(lse, sinks)))
    student = Student(index_q, index_weights, index_keys)
    if index_q.shape[0] * index_q.shape[1] * index_keys.shape[1] == 0 or (
        indices is not None and indices.shape[2] == 0
    ):
        return IndexerLoss(jnp.zeros((), wide), jnp.zeros((), wide))
    if indices is not None:
        indices = indices.astype(jnp.int32)
    plan = Plan.of(student, teacher, indices, scale, denominator, precision)
    sums: Any = _loss(plan, reverse_only(_ONCE, student), teacher, visibility, indices)
    total, count = sums
    return IndexerLoss(total, jax.lax.stop_gradient(count))


_ONCE = "indexer_loss is once differentiable, in reverse mode"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(
    plan: Plan, student: Student, teacher: Teacher, visibility: Visibility, indices: Array | None
) -> tuple[Array, Array]:
    return _over_blocks(plan, student, teacher, visibility, indices, gradients=False)[0]


def _forward_rule(
    plan: Plan, student: Student, teacher: Teacher, visibility: Visibility, indices: Array | None
) -> tuple[tuple[Array, Array], Any]:
    student, teacher = first_only(_ONCE, (student, teacher))
    return _over_blocks(plan, student, teacher, visibility, indices, gradients=True)


def _backward_rule(plan: Plan, gradients: Student, cotangents: tuple[Array, Array]) -> Any:
    del plan
    gradients, (d_total, _) = first_only(_ONCE, (gradients, cotangents))
    scaled = jax.tree.map(lambda g: (g.astype(jnp.float32) * d_total).astype(g.dtype), gradients)
    nothing: Any = None  # for all of an argument that has no gradient
    return scaled, nothing, nothing, nothing


_loss.defvjp(_forward_rule, _backward_rule)


class _Sums(NamedTuple):
    """What a loop over blocks of queries adds up and fills in."""

    total: Array
    queries: Array
    gradients: Student | None  # of q and weights in their dtypes, of keys in float32


def _over_blocks(
    plan: Plan,
    student: Student,
    teacher: Teacher,
    visibility: Visibility,
    indices: Array | None,
    *,
    gradients: bool,
) -> tuple[tuple[Array, Array], Student | None]:
    length, size = student.q.shape[1], plan.queries
    finite = jnp.isfinite(student.keys).all(axis=-1)
    # What is not seen must not matter, and 0 x NaN is NaN: such keys become zeros, and their scores NaN.
    keys = jnp.where(finite[..., None], student.keys, 0.0)
    sources = Sources(keys, finite, teacher.entries)

    def step(i: Array, sums: _Sums) -> _Sums:
        row = jnp.minimum(i * size, length - size)
        fresh = row + jnp.arange(size, dtype=jnp.int32) >= i * size  # the last block may begin in the one before

        def at(array: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(array, row, size, axis=1)

        weights = at(student.weights).astype(jnp.float32)
        block = Block(at(student.q), weights, at(teacher.q), at(teacher.whole), visibility.tile(row, size))
        pairs = Streamed(plan, sources, block) if indices is None else Gathered(plan, sources, block, at(indices))
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
        filled = Student(
            put(sums.gradients.q, d_q.astype(student.q.dtype)),
            put(sums.gradients.weights, d_weights.astype(student.weights.dtype)),
            d_keys,
        )
        return _Sums(total, count, filled)

    zero = jnp.zeros((), jnp.float32)
    empty = None
    if gradients:
        empty = Student(
            jnp.zeros_like(student.q), jnp.zeros_like(student.weights), jnp.zeros(student.keys.shape, jnp.float32)
        )
    start = varying(_Sums(zero, zero, empty), (student, teacher, visibility, indices))
    sums = jax.lax.fori_loop(jnp.int32(0), jnp.int32(-(-length // size)), step, start)
    if sums.gradients is not None:
        narrow = sums.gradients.keys.astype(student.keys.dtype)
        sums = sums._replace(gradients=sums.gradients._replace(keys=narrow))
    return (sums.total, sums.queries), sums.gradients


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
