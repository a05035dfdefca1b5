"""Activations of a layer, up to core attention."""

from __future__ import annotations

from typing import NamedTuple

from foveal.geometry import Visibility
from foveal.ops.rope import RopeTable
from foveal.typing import Array

ACTIVATION_NAMES = ("q_residual", "q", "kv", "entries", "index_keys", "indices", "attention")
"""The `checkpoint_name`s of a layer's activations, in order of computation, for `jax.checkpoint` policies."""


class Scored(NamedTuple):
    """Inputs of the index scores: queries [B, S, I, J], head weights [B, S, I], index keys [B, C, J]."""

    q: Array
    weights: Array
    keys: Array


class Activations(NamedTuple):
    """Inputs of core attention and of the indexer's loss in one call.

    Attributes:
        q: queries, [B, S, H, D].
        kv: raw keys, [B, N, D].
        entries: compressed keys by slot, [B, C, D]; C = 0 in a layer without entries.
        scored: inputs of the index scores; None where no indexer runs.
        indices: selected slots, int32 [B, S, K]; None where every visible entry is attended to.
        visibility: the raw keys and entries that each query sees.
        table: RoPE at the queries' positions.
    """

    q: Array
    kv: Array
    entries: Array
    scored: Scored | None
    indices: Array | None
    visibility: Visibility
    table: RopeTable
