"""Useful work of a layer: operations, bytes and visible keys, counted from the geometry, not from an implementation.

A multiplication and the addition it feeds are two operations. Masked scores and padding are not counted, so operations
per second are an honest measure of utilisation. A backward pass counts as 2.5 forward passes for the core: five matmuls
instead of two, as is usual (arXiv 2307.08691), one of which recomputes the scores, as it must unless they are stored.
For a projection it counts as 2.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from foveal.config import AttentionConfig
from foveal.geometry import Documents, Visibility
from foveal.layers import LayerType


@dataclasses.dataclass(frozen=True)
class Cost:
    """The least that some work costs.

    Attributes:
        operations: floating-point operations.
        bytes: main-memory traffic if every operand is read once and every result written once.
        visible_keys: keys that queries look at, summed over the queries: raw keys and entries in core attention,
            scored entries in an indexer.
    """

    operations: int
    bytes: int
    visible_keys: int

    def __add__(self, other: Cost) -> Cost:
        """Return the sum of both costs."""
        return Cost(
            self.operations + other.operations, self.bytes + other.bytes, self.visible_keys + other.visible_keys
        )


def core_cost(
    config: AttentionConfig,
    layer_type: LayerType,
    documents: Documents,
    *,
    bytes_per_element: int = 4,
    backward: bool = False,
) -> Cost:
    """Cost of core attention: 4 H D operations per query and visible key.

    Args:
        config: sizes and ratios.
        layer_type: type of the layer; a CSA query looks at `index_topk` entries at most.
        documents: concrete; `Documents.unpacked(batch, length)` for rows of one document.
        bytes_per_element: bytes per element of the activations.
        backward: count the forward and the backward pass.
    """
    batch, length = documents.shape
    visibility = _visibility(config, layer_type, documents)
    entries = _entry_counts(config, layer_type, visibility)
    keys = int(np.asarray(visibility.window_counts).sum(dtype=np.int64) + entries.sum(dtype=np.int64))
    forward = 4 * config.num_attention_heads * config.head_dim * keys
    queries = batch * length * config.num_attention_heads * config.head_dim  # elements of q, of the output, ...
    shared = batch * (length + visibility.slots) * config.head_dim  # elements of kv and entries
    elements = 2 * queries + shared
    if backward:  # q, output and its gradient read, the gradient of q written; kv and entries read, theirs written
        elements += 4 * queries + 2 * shared
    return Cost(forward * 7 // 2 if backward else forward, elements * bytes_per_element, keys)


def indexer_cost(
    config: AttentionConfig, documents: Documents, *, bytes_per_element: int = 4, backward: bool = False
) -> Cost:
    """Cost of the lightning indexer's scores: 2 I J + 2 I operations per query and visible entry, forward only.

    Selection passes no gradient, so `backward` adds nothing here; the argument exists for symmetry with the others.
    """
    del backward
    batch, length = documents.shape
    visibility = _visibility(config, LayerType.CSA, documents)
    keys = int(np.asarray(visibility.entry_counts).sum(dtype=np.int64))
    heads, dim = config.index_n_heads, config.index_head_dim
    elements = batch * (length * heads * (dim + 1) + visibility.slots * dim)
    chosen = batch * length * min(config.index_topk, visibility.slots) * 4  # bytes of the int32 indices
    return Cost(keys * 2 * heads * (dim + 1), elements * bytes_per_element + chosen, keys)


def layer_cost(
    config: AttentionConfig,
    layer_type: LayerType,
    documents: Documents,
    *,
    bytes_per_element: int = 4,
    backward: bool = False,
) -> Cost:
    """Cost of a whole layer: projections, core attention and, in a CSA layer, the indexer.

    The projections' bytes are those of their weights and of the hidden states read and written. Norms, RoPE, pooling
    and top-k are left out: they have no matmul.
    """
    batch, length = documents.shape
    weights, untrained = _projection_weights(config, layer_type)
    tokens = int((~np.asarray(documents.is_padding)).sum())
    operations = 2 * tokens * (weights * (3 if backward else 1) + untrained)
    elements = weights + untrained + 2 * batch * length * config.hidden_size
    cost = Cost(operations, elements * bytes_per_element * (2 if backward else 1), 0)
    cost += core_cost(config, layer_type, documents, bytes_per_element=bytes_per_element, backward=backward)
    if config.layer(layer_type).has_indexer:
        cost += indexer_cost(config, documents, bytes_per_element=bytes_per_element)
    return cost


def _visibility(config: AttentionConfig, layer_type: LayerType, documents: Documents) -> Visibility:
    return Visibility(documents, config.sliding_window, config.compress_ratio(layer_type))


def _entry_counts(config: AttentionConfig, layer_type: LayerType, visibility: Visibility) -> np.ndarray:
    counts = np.asarray(visibility.entry_counts)
    return np.minimum(counts, config.index_topk) if config.layer(layer_type).has_indexer else counts


def _projection_weights(config: AttentionConfig, layer_type: LayerType) -> tuple[int, int]:
    """Number of weights that learn from the layer's output, and of the indexer's, which do not."""
    model, heads, dim, latent = config.hidden_size, config.num_attention_heads, config.head_dim, config.q_lora_rank
    weights = model * (latent + dim) + latent * heads * dim
    weights += heads * dim * config.o_lora_rank + config.o_groups * config.o_lora_rank * model
    layer = config.layer(layer_type)
    compressor = 2 * model * layer.projections  # values and gates, per dim of an entry
    weights += compressor * dim
    if not layer.has_indexer:
        return weights, 0
    index_heads, index_dim = config.index_n_heads, config.index_head_dim
    indexer = latent * index_heads * index_dim + model * index_heads + compressor * index_dim
    return weights, indexer
