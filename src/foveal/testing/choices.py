"""Selection of a CSA layer's indexer, and its margin: where rounding decides, two correct layers may differ."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from foveal.geometry import Documents
from foveal.nn import CompressedAttention
from foveal.nn.memory import Fresh
from foveal.typing import Array

UNDECIDED = 1e-5
"""Leads of a selected entry below this may be due to rounding."""


def selected_entries(layer: CompressedAttention, x: np.ndarray, documents: Documents) -> tuple[np.ndarray, np.ndarray]:
    """Entries that a CSA layer's indexer selects, and the margin by which it does.

    Args:
        layer: a CSA layer.
        x: hidden states, [B, S, E].
        documents: of these rows.

    Returns:
        int32 [B, S, K], the selected slots, -1 for none; and float32 [B, S], the lead of the last selected entry over
        the best one not selected, relative to the query's largest |score|; infinite where there is no such entry. Where
        the lead is tiny, another order of summation may select another entry, and neither is wrong.
    """
    graph, state = nnx.split(layer)
    config = layer.config

    @jax.jit
    def select(state: Any, x: Array, documents: Documents) -> tuple[Array, Array]:
        layer = nnx.merge(graph, state)
        made = layer.activations(x, Fresh(config, layer.spec, documents))
        assert made.scored is not None
        assert made.indices is not None
        queries, weights, keys = made.scored
        matches = jax.nn.relu(jnp.einsum("btij,bcj->btic", queries, keys, preferred_element_type=jnp.float32))
        scores = jnp.einsum("btic,bti->btc", matches, weights)
        return made.indices, _lead(scores, made.visibility.entry_mask(), config.index_topk)

    slots, lead = select(state, jnp.asarray(x), documents)
    return np.asarray(slots), np.asarray(lead)


def _lead(scores: Array, visible: Array, top_k: int) -> Array:
    """Leads of scores, [B, S, C] -> [B, S]; see `selected_entries`."""
    if scores.shape[-1] <= top_k:
        return jnp.full(scores.shape[:2], jnp.inf, scores.dtype)
    best, _ = jax.lax.top_k(jnp.where(visible, scores, -jnp.inf), top_k + 1)
    last, next_best = best[:, :, top_k - 1], best[:, :, top_k]
    largest = jnp.max(jnp.where(visible, jnp.abs(scores), 0.0), axis=-1)
    lead = (last - next_best) / jnp.maximum(largest, jnp.finfo(scores.dtype).tiny)
    return jnp.where(next_best == -jnp.inf, jnp.inf, lead)
