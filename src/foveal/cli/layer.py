"""The demo's layers and their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from flax import nnx

from foveal.config import AttentionConfig
from foveal.geometry import PackedDocuments, pack_documents
from foveal.layers import LayerType, RopeConfig, YarnConfig
from foveal.nn import CompressedAttention
from foveal.testing.generators import random_params
from foveal.testing.parameters import set_params

DEMO_CONFIG = AttentionConfig(
    hidden_size=256,
    num_attention_heads=8,
    head_dim=64,
    qk_rope_head_dim=32,
    q_lora_rank=128,
    o_groups=4,
    o_lora_rank=32,
    sliding_window=128,
    layer_types=tuple(LayerType),
    csa_ratio=4,
    hca_ratio=128,
    index_n_heads=8,
    index_head_dim=32,
    index_topk=16,
    rope=RopeConfig(10_000.0),
    compress_rope=RopeConfig(160_000.0, YarnConfig(16.0, 65_536, 32.0, 1.0)),
)
"""The released models' window, ratios and RoPE, in layers small enough for any CPU."""


class Sample(NamedTuple):
    """Text as a layer's input.

    Attributes:
        hidden: one float32 [T, E] per document.
        cotangents: one float32 [T, E] per document; the loss is the sum of the outputs times these.
        packed: the hidden states, packed into rows.
    """

    hidden: list[np.ndarray]
    cotangents: list[np.ndarray]
    packed: PackedDocuments


def make_sample(documents: Sequence[bytes], length: int, config: AttentionConfig, seed: int) -> Sample:
    """Embed documents, one token per byte: a fixed random vector per byte value, plus noise of half its size.

    Without the noise, a run of one byte would be a run of equal hidden states, which do not occur in a model, and its
    gradients would cancel to nothing but rounding.
    """
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(256, config.hidden_size))
    tokens = [np.frombuffer(document, np.uint8) for document in documents]
    hidden = [table[t] + 0.5 * rng.normal(size=(len(t), config.hidden_size)) for t in tokens]
    hidden = [h.astype(np.float32) for h in hidden]
    cotangents = [rng.normal(size=h.shape).astype(np.float32) for h in hidden]
    return Sample(hidden, cotangents, pack_documents(hidden, length))


def make_layer(config: AttentionConfig, layer_type: LayerType, seed: int) -> CompressedAttention:
    """Return a layer with random parameters that make mistakes visible."""
    layer = CompressedAttention(config, layer_type=layer_type, rngs=nnx.Rngs(seed))
    set_params(layer, random_params(config, layer_type, seed))
    return layer
