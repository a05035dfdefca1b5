"""How much of what the attention looks at the lightning indexer finds."""

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
"""Logits of a block of queries, of all heads and entries."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexerRecall:
    """Two sums over queries, float32 scalars: those of layers and devices can be added before they are divided.

    Attributes:
        found: of the entries that the attention weighs most, as many a query as the indexer may choose, how many it
            chose.
        count: how many there are. Only queries that see more entries than may be chosen count: others have no choice.
    """

    __no_type_check__ = True  # JAX builds pytrees of placeholders too: annotations cannot hold then

    found: Float32[Array, ""]
    count: Float32[Array, ""]

    @property
    def mean(self) -> Float32[Array, ""]:
        """The share that was found, 1 where no query has a choice."""
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
    """Recall of the K entries to which attention to all of them gives the most weight, summed over heads.

    For query t that sees more than K entries, with p[c] = sum_h a[h, c] as in `indexer_loss`: how many of the K
    largest p are in `indices`. Of equal ones the lower slot counts as the larger. An indexer that chooses at random
    finds K / visible of them.

    A measurement, not an objective: it has no gradient. Logits exist for one block of queries at a time, but of all
    entries, seen or not: it costs more than the attention it measures.

    Args:
        indices: the indexer's choice, integers [B, S, K], by `core_attention`'s rule: -1, slots out of range and slots
            that the query does not see are ignored; a duplicate counts once.
        q: attention queries, [B, S, H, D].
        entries: the attention's entries, [B, C, D].
        lse: log-sum-exp of the attention's logits, [B, S, H], from `core_attention(..., return_lse=True)` over the
            window and all visible entries: without indices.
        sinks: [H], or None.
        visibility: who sees what.
        scale: of the attention's logits, D ** -0.5 by default.
        precision: of the matmul.

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
