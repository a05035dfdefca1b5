"""Seeded inputs for tests: parameters, hidden states, packed rows, and arrays of distinct values.

Plain NumPy, so that the numbers are the same whatever JAX's settings are. The parameters are scaled to make mistakes
visible: outputs are of magnitude around 1, attention is far from uniform, sinks take a real share of the softmax, and
no scale or bias is left at the neutral value of its initialisation.
"""

import numpy as np
from numpy.typing import DTypeLike

from foveal.config import AttentionConfig
from foveal.layers import LayerSpec, LayerType


def _kernel(rng: np.random.Generator, *shape: int, gain: float = 1.0) -> np.ndarray:
    """Normal values such that a unit input gives outputs of magnitude `gain`; the fan-in is the second-to-last axis."""
    return rng.normal(size=shape) * (gain * shape[-2] ** -0.5)


def _scale(rng: np.random.Generator, size: int, centre: float = 1.0) -> np.ndarray:
    return centre * rng.uniform(0.6, 1.4, size=size)


def _compressor(
    rng: np.random.Generator, prefix: str, config: AttentionConfig, layer: LayerSpec, dim: int
) -> dict[str, np.ndarray]:
    width = layer.projections * dim
    return {
        f"{prefix}.kv_proj.kernel": _kernel(rng, config.hidden_size, width),
        f"{prefix}.gate_proj.kernel": _kernel(rng, config.hidden_size, width),
        f"{prefix}.position_bias": rng.normal(size=(layer.compress_ratio, width)),
        f"{prefix}.kv_norm.scale": _scale(rng, dim, centre=1.5),
    }


def random_params(
    config: AttentionConfig, layer_type: LayerType, seed: int, dtype: DTypeLike = np.float32
) -> dict[str, np.ndarray]:
    """Random parameters of one attention layer, as a flat dictionary by name.

    Args:
        config: the layer's configuration.
        layer_type: type of the layer.
        seed: random seed; each layer type draws different numbers from it.
        dtype: of kernels and norm scales; sinks and position biases are never narrower than float32.

    Returns:
        A dict of numpy arrays. Linear kernels are [in, out], `o_a_proj.kernel` is [groups, in, out]. All layers have
        q_a_proj.kernel, q_a_norm.scale, q_b_proj.kernel, kv_proj.kernel, kv_norm.scale, sinks, o_a_proj.kernel and
        o_b_proj.kernel; CSA and HCA add compressor.{kv_proj.kernel, gate_proj.kernel, position_bias, kv_norm.scale};
        CSA adds the same four under compressor.indexer, and compressor.indexer.{q_b_proj.kernel,
        scorer.weights_proj.kernel}.
    """
    layer_type = LayerType(layer_type)
    rng = np.random.default_rng([seed, list(LayerType).index(layer_type)])
    hidden, heads, dim, rank = config.hidden_size, config.num_attention_heads, config.head_dim, config.q_lora_rank
    group_in = heads // config.o_groups * dim
    params = {
        "q_a_proj.kernel": _kernel(rng, hidden, rank),
        "q_a_norm.scale": _scale(rng, rank),
        "q_b_proj.kernel": _kernel(rng, rank, heads * dim),
        "kv_proj.kernel": _kernel(rng, hidden, dim),
        # Queries have unit rms, so this is also the spread of the attention logits.
        "kv_norm.scale": _scale(rng, dim, centre=1.5),
        "sinks": rng.normal(size=heads),
        "o_a_proj.kernel": _kernel(rng, config.o_groups, group_in, config.o_lora_rank, gain=1.4),
        "o_b_proj.kernel": _kernel(rng, config.o_groups * config.o_lora_rank, hidden),
    }
    layer = config.layer(layer_type)
    if layer.has_entries:
        params |= _compressor(rng, "compressor", config, layer, dim)
    if layer.has_indexer:
        index_heads, index_dim = config.index_n_heads, config.index_head_dim
        params |= _compressor(rng, "compressor.indexer", config, layer, index_dim)
        params["compressor.indexer.q_b_proj.kernel"] = _kernel(rng, rank, index_heads * index_dim)
        params["compressor.indexer.scorer.weights_proj.kernel"] = _kernel(rng, hidden, index_heads)
    wide = np.promote_types(dtype, np.float32)
    keep_wide = ("sinks", "position_bias")
    return {name: value.astype(wide if name.endswith(keep_wide) else dtype) for name, value in params.items()}


def random_hidden(seed: int, batch: int, length: int, hidden: int, dtype: DTypeLike = np.float32) -> np.ndarray:
    """Standard normal hidden states [batch, length, hidden] in `dtype`."""
    return np.random.default_rng([seed, 101]).normal(size=(batch, length, hidden)).astype(dtype)


def random_segment_ids(seed: int, batch: int, length: int, *, max_document: int, padding: bool = True) -> np.ndarray:
    """Rows packed with documents of 1 to `max_document` tokens, at unaligned starts.

    Ids are neither consecutive nor ascending, and they recur later in a row: only a maximal run of one nonzero id is a
    document, and code that relies on anything else should fail.

    Args:
        seed: random seed.
        batch: rows.
        length: tokens per row.
        max_document: length of the longest document.
        padding: insert runs of padding (id 0) at random: at the left, at the right and in between.

    Returns:
        int32 [batch, length].

    Raises:
        ValueError: max_document is below 1.
    """
    if max_document < 1:
        raise ValueError(f"max_document: expected at least 1, got {max_document}")
    rng = np.random.default_rng([seed, 202])
    ids = np.zeros((batch, length), dtype=np.int32)
    for b in range(batch):
        right = int(rng.integers(1, length // 4 + 2)) if padding and rng.random() < 0.5 else 0
        row, previous = 0, 0
        while row < length - right:
            gap = 0.5 if row == 0 else 0.25 if previous != 0 else 0.0
            if padding and rng.random() < gap:
                row, previous = row + int(rng.integers(1, max(2, max_document // 2))), 0
                continue
            stop = min(row + int(rng.integers(1, max_document + 1)), length - right)
            # Adjacent documents must differ; across padding even the same id starts a new one.
            previous = int(rng.choice([i for i in range(1, 6) if i != previous]))
            ids[b, row:stop] = previous
            row = stop
    return ids


def distinct_values(shape: tuple[int, ...], seed: int, dtype: DTypeLike = np.float32) -> np.ndarray:
    """A shuffled ramp over (-1, 1) of distinct values, which reveals a gather from the wrong place.

    Args:
        shape: of the result.
        seed: random seed of the shuffle.
        dtype: of the result; float32 keeps up to 2^24 values distinct, bfloat16 only about 2^8.

    Returns:
        An array of `shape` in `dtype`.
    """
    size = int(np.prod(shape))
    ramp = (np.arange(size) + 0.5) * (2.0 / max(size, 1)) - 1.0
    return np.random.default_rng([seed, 303]).permutation(ramp).reshape(shape).astype(dtype)
