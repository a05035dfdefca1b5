"""Activations of a layer, up to core attention."""

from __future__ import annotations

from typing import NamedTuple

from foveal.geometry import Visibility
from foveal.ops.rope import RopeTable
from foveal.typing import Array

ACTIVATION_NAMES = ("q_residual", "q", "kv", "entries", "index_keys", "indices", "attention")
"""The `checkpoint_name`s of a layer's activations, for `jax.checkpoint` policies, in order of computation."""


class Scored(NamedTuple):
    """Inputs of the index scores: queries [B, S, I, J], heads' weights [B, S, I], index keys [B, C, J]."""

    q: Array
    weights: Array
    keys: Array


class Activations(NamedTuple):
    """Inputs of core attention and of the indexer's loss in one call.

    Attributes:
        q: queries, [B, S, H, D].
        kv: raw keys, [B, N, D].
        entries: [B, C, D]; C = 0 in a layer without.
        scored: None where no indexer is asked.
        indices: the selected slots, int32 [B, S, K]; None where all that are visible are attended to.
        visibility: who sees what.
        table: RoPE at the queries' positions.
    """

    q: Array
    kv: Array
    entries: Array
    scored: Scored | None
    indices: Array | None
    visibility: Visibility
    table: RopeTable
