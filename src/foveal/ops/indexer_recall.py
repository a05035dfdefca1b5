"""Recall of the lightning indexer."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from foveal.checks import as_indices, as_precision, as_scale
from foveal.geometry import Block, Blocks, Visibility, as_visibility, membership
from foveal.meshes import any_mesh
from foveal.ops.indexer_pairs import Teacher, heads_logits
from foveal.ops.indexing import best_of, rank
from foveal.program import per_row, planned, platform
from foveal.typing import Array, Float, Float32, Int, Precision

_ELEMENTS = 1 << 22
"""Logits computed at a time: a block of queries, all heads and entries."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexerRecall:
    """Two sums over queries, float32 scalars: add both over layers and devices before dividing.

    Attributes:
        found: how many of each query's K highest-weight entries the indexer selected, summed over queries; K is the
            number of entries that it may select per query.
        count: number of those highest-weight entries. Only queries that see more than K entries count: the others leave
            no choice.
    """

    __no_type_check__ = True  # JAX builds pytrees of placeholders too: annotations cannot hold then

    found: Float32[Array, ""]
    count: Float32[Array, ""]

    @property
    def mean(self) -> Float32[Array, ""]:
        """Share of the highest-weight entries that was selected; 1 if no query has a choice."""
        return jnp.where(self.count == 0.0, 1.0, self.found / jnp.maximum(self.count, 1.0))


@any_mesh()
def indexer_recall(
    indices: Int[Array, "B S K"],
    *,
    q: Float[Array, "B S H D"],
    entries: Float[Array, "B C D"],
    lse: Float[Array, "B S H"],
    sinks: Float[Array, " H"] | None,
    visibility: Visibility,
    scale: float | int | None = None,
    precision: Precision = None,
) -> IndexerRecall:
    """Recall of the indexer: the share of the K highest-weight entries that it selects.

    For each query t that sees more than K entries: how many of the K entries with the largest p[c] are in `indices`,
    where p[c] = sum_h a[h, c] as in `indexer_loss`, from attention to all visible entries. Of equal p the lower slot
    ranks higher. An indexer that selects at random finds a share of K / visible.

    A metric, not an objective: it has no gradient. Logits are computed for one block of queries at a time, but for all
    entries, visible or not: this costs more than the attention it measures.

    Args:
        indices: the indexer's selection, integers [B, S, K], by `core_attention`'s rule: -1, slots out of range and
            slots that the query does not see are ignored; a duplicate counts once.
        q: attention queries, [B, S, H, D].
        entries: the attention's entries, [B, C, D].
        lse: log-sum-exp of the attention's logits, [B, S, H], from `core_attention(..., return_lse=True)` over the
            window and all visible entries, without indices.
        sinks: [H], or None.
        visibility: who sees what.
        scale: factor on the attention's logits, D ** -0.5 by default.
        precision: matmul precision.

    Raises:
        ValueError: arguments that do not fit each other.
    """
    visibility = as_visibility(visibility)
    q, entries, denominator = Teacher.from_arguments(q, entries, lse, sinks, visibility)
    indices = as_indices("indices", indices, visibility.documents.shape)
    scale, precision = as_scale(scale, q.shape[3]), as_precision(precision)
    batch, length, heads, _ = q.shape
    slots, chosen = entries.shape[1], indices.shape[2]
    zero = jnp.zeros((), jnp.float32)
    if batch * length == 0 or chosen == 0 or chosen >= slots:
        return IndexerRecall(zero, zero)
    indices = visibility.seen_slots(indices)
    q, blocks = planned(q), Blocks(min(per_row(_ELEMENTS // (heads * slots), batch, 1), length), length)

    def step(rows: Block, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        q_at, denominator_at, chosen_at = rows.take((q, denominator, indices))
        ranges = visibility.tile(rows.start, rows.size)
        logits = jnp.einsum("bthd,bcd->bthc", q_at, entries, precision=precision, preferred_element_type=jnp.float32)
        ranks = rank(heads_logits(logits * scale, denominator_at), ranges.sees(0, slots))
        best = best_of(ranks, chosen, cpu=platform() == "cpu")
        both = jnp.take_along_axis(membership(chosen_at, slots), jnp.maximum(best, 0), axis=2) & (best >= 0)
        choice = rows.fresh[None] & (ranges.entry_end - ranges.entry_first > chosen)
        found = jnp.sum(jnp.where(choice, both.sum(axis=-1), 0), dtype=jnp.float32)
        count = jnp.sum(jnp.where(choice, (best >= 0).sum(axis=-1), 0), dtype=jnp.float32)
        return sums[0] + found, sums[1] + count

    return IndexerRecall(*blocks.fold(step, (zero, zero), like=(q, entries, denominator, indices, visibility)))
