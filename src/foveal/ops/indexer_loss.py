"""Training objective of the lightning indexer: match its distribution over entries to the attention's."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from foveal.backends.once import first_only, reverse_only
from foveal.checks import as_array, as_choice, as_indices, as_precision, as_scale
from foveal.geometry import Block, Blocks, Visibility, as_visibility
from foveal.meshes import any_mesh
from foveal.ops.indexer_pairs import LOWEST, Gathered, LossPlan, LossSources, QueryBlock, Streamed, Student, Teacher
from foveal.program import planned
from foveal.typing import Array, Float, Float32, Int, Precision


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexerLoss:
    """Sum of divergences and number of queries, float32 scalars: add both over layers and devices before dividing.

    Attributes:
        total: sum of the divergences, in nats.
        count: number of queries that have an entry to attend to; the others add nothing.
    """

    __no_type_check__ = True  # JAX builds pytrees of placeholders too: annotations cannot hold then

    total: Float32[Array, ""]
    count: Float32[Array, ""]

    @property
    def mean(self) -> Float32[Array, ""]:
        """Mean divergence per query, in nats; 0 if no query has an entry."""
        return self.total / jnp.maximum(self.count, 1.0)


@any_mesh()
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
    scale: float | int | None = None,
    denominator: Literal["all", "entries"] = "all",
    precision: Precision = None,
) -> IndexerLoss:
    """KL divergence between the attention's weights of the entries and the indexer's softmax, summed over queries.

    The loss of query t is KL(p || softmax(score)), with `select_entries`' score and the teacher p[c] = sum_h a[h, c] /
    sum_c' sum_h a[h, c'], where a[h, c] is the weight that head h gives entry c. Both range over the same entries:
    those in `indices` (sparse training) or all that t sees (dense warm-up). The teacher is constant: only the first
    three arguments get gradients. From DeepSeek-V3.2 (arXiv 2512.02556, section 2.1.1), with V4's entries in place of
    tokens.

    No array of S x C elements is built: value and gradients are computed block by block in the forward pass, and the
    backward pass scales the gradients. Differentiable once, in reverse mode.

    Args:
        index_q: indexer queries after RoPE, [B, S, I, J].
        index_weights: weights per query and indexer head, any scaling included, [B, S, I].
        index_keys: the indexer's own entries after RoPE, [B, C, J].
        q: attention queries, [B, S, H, D].
        entries: the attention's entries, [B, C, D].
        lse: log-sum-exp of the attention's logits, [B, S, H], from `core_attention(..., return_lse=True)` over the same
            entries.
        sinks: [H], or None.
        visibility: who sees what.
        indices: integers [B, S, K], the slots each query selected, by `core_attention`'s rule: -1, slots out of range
            and slots that the query does not see are ignored; a duplicate counts once. None: all visible slots.
        scale: factor on the attention's logits, D ** -0.5 by default.
        denominator: what each head's weights are normalised over: "all" it attends to, window and sink included, or
            "entries" alone, as in MaxText, which gives heads that attend mostly to the window as much influence as
            others.
        precision: matmul precision.

    Raises:
        ValueError: arguments that do not fit each other, or an unknown denominator.
        NotImplementedError: when differentiated twice, or in forward mode.
    """
    as_choice("denominator", denominator, ("all", "entries"))
    visibility = as_visibility(visibility)
    rows, slots = visibility.documents.shape, visibility.slots
    index_q = as_array("index_q", index_q, "B S I J", rows)
    index_weights = as_array("index_weights", index_weights, "B S I", index_q.shape[:3])
    index_keys = as_array("index_keys", index_keys, "B C J", (rows[0], slots, index_q.shape[3]))
    teacher = Teacher.from_arguments(q, entries, lse, sinks, visibility)
    indices = None if indices is None else as_indices("indices", indices, rows)
    scale, precision = as_scale(scale, teacher.q.shape[3]), as_precision(precision)
    wide = jnp.float32
    student = Student(planned(index_q), index_weights, index_keys)
    if index_q.shape[0] * index_q.shape[1] * index_keys.shape[1] == 0 or (
        indices is not None and indices.shape[2] == 0
    ):
        return IndexerLoss(jnp.zeros((), wide), jnp.zeros((), wide))
    if indices is not None:
        indices = visibility.seen_slots(indices)
    plan = LossPlan.for_shapes(student, teacher, indices, scale, denominator, precision)
    sums: Any = _loss(plan, reverse_only(_ONCE, student), teacher, visibility, indices)
    total, count = sums
    return IndexerLoss(total, jax.lax.stop_gradient(count))


_ONCE = "indexer_loss is once differentiable, in reverse mode"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(
    plan: LossPlan, student: Student, teacher: Teacher, visibility: Visibility, indices: Array | None
) -> tuple[Array, Array]:
    return _over_blocks(plan, student, teacher, visibility, indices, gradients=False)[0]


def _forward_rule(
    plan: LossPlan, student: Student, teacher: Teacher, visibility: Visibility, indices: Array | None
) -> tuple[tuple[Array, Array], Any]:
    student, teacher = first_only(_ONCE, (student, teacher))
    return _over_blocks(plan, student, teacher, visibility, indices, gradients=True)


def _backward_rule(plan: LossPlan, gradients: Student, cotangents: tuple[Array, Array]) -> Any:
    del plan
    gradients, (d_total, _) = first_only(_ONCE, (gradients, cotangents))
    scaled = jax.tree.map(lambda g: (g.astype(jnp.float32) * d_total).astype(g.dtype), gradients)
    nothing: Any = None  # the cotangent of an argument without gradient
    return scaled, nothing, nothing, nothing


_loss.defvjp(_forward_rule, _backward_rule)


class _LossSums(NamedTuple):
    """Carry of the loop over blocks of queries."""

    total: Array
    queries: Array
    gradients: Student | None  # of q and weights in their dtypes, of keys in float32


def _over_blocks(
    plan: LossPlan,
    student: Student,
    teacher: Teacher,
    visibility: Visibility,
    indices: Array | None,
    *,
    gradients: bool,
) -> tuple[tuple[Array, Array], Student | None]:
    """Sum and count of `IndexerLoss`, and the gradients if requested."""
    finite = jnp.isfinite(student.keys).all(axis=-1)
    # Unseen keys must not matter, but 0 x NaN is NaN: non-finite keys become zeros, and their scores NaN.
    sources = LossSources(jnp.where(finite[..., None], student.keys, 0.0), finite, teacher.entries)

    def step(rows: Block, sums: _LossSums) -> _LossSums:
        index_q, weights, q, denominator, chosen = rows.take(
            (student.q, student.weights, teacher.q, teacher.log_denominator, indices)
        )
        ranges = visibility.tile(rows.start, rows.size)
        block = QueryBlock(index_q, weights.astype(jnp.float32), q, denominator, ranges)
        pairs = Streamed(plan, sources, block) if chosen is None else Gathered(plan, sources, block, chosen)
        divergences, d_scores = _divergence(*pairs.both())
        keep = rows.fresh[None] & divergences.any_entry
        total = sums.total + jnp.sum(jnp.where(keep, divergences.divergence, 0.0))
        count = sums.queries + jnp.sum(keep.astype(jnp.float32))
        filled = sums.gradients
        if filled is not None:
            filled = _pulled(pairs, rows, divergences.any_entry, keep, d_scores, filled)
        return _LossSums(total, count, filled)

    zero, empty = jnp.zeros((), jnp.float32), None
    if gradients:
        empty = student._replace(keys=student.keys.astype(jnp.float32))
        empty = jax.tree.map(jnp.zeros_like, empty)
    like = student, teacher, visibility, indices
    sums = Blocks(plan.queries, student.q.shape[1]).fold(step, _LossSums(zero, zero, empty), like=like)
    filled = sums.gradients
    if filled is not None:
        filled = filled._replace(keys=filled.keys.astype(student.keys.dtype))
    return (sums.total, sums.queries), filled


def _pulled(
    pairs: Streamed | Gathered, rows: Block, counts: Array, keep: Array, d_scores: Array, filled: Student
) -> Student:
    """Write the gradients of a block's queries into `filled`, and add those of the keys.

    Queries without an entry, mostly padding, may hold NaN; keep it out of the gradients.
    """
    block = pairs.block
    d_scores = jnp.where(counts[..., None], d_scores, 0.0)
    q, weights = (
        jnp.where(counts[..., None, None], block.index_q, 0.0),
        jnp.where(counts[..., None], block.weights, 0.0),
    )
    pairs = dataclasses.replace(pairs, block=block._replace(index_q=q, weights=weights))
    d_q, d_weights, d_keys = pairs.pull(d_scores, jnp.where(keep[..., None], d_scores, 0.0), filled.keys)
    fresh = d_q.astype(filled.q.dtype), d_weights.astype(filled.weights.dtype)
    return Student(*rows.put((filled.q, filled.weights), fresh), d_keys)


class _Divergences(NamedTuple):
    divergence: Array
    any_entry: Array


def _divergence(scores: Array, logits: Array, able: Array) -> tuple[_Divergences, Array]:
    """KL(softmax(logits) || softmax(scores)), [B, T] from [B, T, N] each, and the gradients of the scores."""
    some = able & (logits != LOWEST)  # LOWEST where every head's sink is infinite: nothing to learn
    any_entry = some.any(axis=-1)

    def log_softmax(values: Array, among: Array) -> Array:
        values = jnp.where(among, values, LOWEST)
        peak = jax.lax.stop_gradient(jnp.max(values, axis=-1, keepdims=True))
        peak = jnp.where(peak <= LOWEST, 0.0, peak)
        total = jnp.sum(jnp.where(among, jnp.exp(values - peak), 0.0), axis=-1, keepdims=True)
        return jnp.where(among, values - peak - jnp.log(jnp.where(total == 0.0, 1.0, total)), LOWEST)

    log_teacher, log_student = log_softmax(logits, some), log_softmax(scores, able)
    teacher, student = jnp.exp(log_teacher), jnp.exp(log_student)
    each = jnp.where(some, teacher * (log_teacher - log_student), 0.0)
    return _Divergences(each.sum(axis=-1), any_entry), jnp.where(able, student - teacher, 0.0)
