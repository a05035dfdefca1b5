"""The demo's layers and what goes into them."""

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
        hidden: float32 [T, E] a document.
        cotangents: likewise; the loss is the sum of outputs times these.
        packed: the hidden states, packed into rows.
    """

    hidden: list[np.ndarray]
    cotangents: list[np.ndarray]
    packed: PackedDocuments


def make_sample(documents: Sequence[bytes], length: int, config: AttentionConfig, seed: int) -> Sample:
    """Bytes are tokens: each has a fixed random vector. Noise of half its size tells equal bytes apart.

    Without it a run of one byte would be a run of equal hidden states, which no layer of a model sees, and its
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
    """A layer with random parameters on which mistakes show."""
    layer = CompressedAttention(config, layer_type=layer_type, rngs=nnx.Rngs(seed))
    set_params(layer, random_params(config, layer_type, seed))
    return layer
