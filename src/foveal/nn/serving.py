"""A layer on tokens that continue what a cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from foveal.backends.request import Backend
from foveal.cache import AttentionCache, CompressorState, completing, extended_state
from foveal.checks import as_lengths, on_host, require
from foveal.geometry import Documents, Visibility
from foveal.nn.compressor import Compressor
from foveal.nn.indexer import IndexedCompressor
from foveal.ops.core_attention import core_attention
from foveal.ops.rope import rope_table
from foveal.typing import Array, Float, Int, Int32, narrowed

if TYPE_CHECKING:
    from foveal.nn.attention import CompressedAttention


def append_tokens(
    layer: CompressedAttention,
    cache: AttentionCache,
    x: Float[Array, "B T E"],
    lengths: Int[Array, " B"] | np.ndarray | Sequence[int] | None,
    implementation: str | Backend | None,
) -> tuple[Float[Array, "B T E"], AttentionCache]:
    """See `CompressedAttention.prefill`.

    The raw keys that the new tokens see are the last W - 1 of the window and their own: row p of the sequence becomes
    row p - length of the call, which alone tells positions, windows and who sees what (`Documents.continuing`).
    """
    layer.check_hidden_states(x)
    _check_cache(layer, cache, x)
    counts = _counts(cache, x, lengths)
    config, ratio = layer.config, layer.config.compress_ratio(layer.layer_type)
    documents = Documents.continuing(cache.lengths, counts, x.shape[1])
    x, q_residual, q, kv, table = layer.project(x, documents)

    compressor, compressed, indexer, indices, entries = layer.compressor, None, None, None, None
    slots = cache.capacity // ratio if ratio else None  # arrays have one too many where this is 0
    visibility = Visibility.continuing(documents, config.sliding_window, ratio, slots)
    if compressor is not None and cache.compressor is not None:
        compressed = _compressed(layer, compressor, cache.compressor, cache.lengths, counts, x)
        entries = compressed.entries[:, :slots]
        if isinstance(compressor, IndexedCompressor) and cache.indexer is not None:
            indexer = _compressed(layer, compressor.indexer, cache.indexer, cache.lengths, counts, x)
            queries, weights = compressor.indexer.queries(x, q_residual, table)
            indices = compressor.indexer.select(queries, weights, indexer.entries[:, :slots], visibility)
    attended = core_attention(
        q,
        jnp.concatenate([cache.recent_keys(visibility.history), kv], axis=1),
        entries,
        visibility=visibility,
        indices=indices,
        sinks=layer.sinks[...],
        precision=layer.precision,
        implementation=implementation,
    )
    return layer.output(attended, table), cache.extended(counts, kv, compressed, indexer)


def _compressed(
    layer: CompressedAttention,
    compressor: Compressor,
    state: CompressorState,
    lengths: Int32[Array, " B"],
    counts: Int32[Array, " B"],
    x: Float[Array, "B T E"],
) -> CompressorState:
    """The compressor's state with the new tokens, and with the entries that they complete."""
    config, (kv, gate) = layer.config, compressor.project(x)
    ratio = config.compress_ratio(layer.layer_type)
    rows = completing(state, lengths, counts, kv, gate, ratio=ratio, overlap=compressor.overlap)
    table = rope_table(rows.layout.positions, config.rope_for(layer.layer_type), config.qk_rope_head_dim)
    entries = compressor.pool(*rows, table)
    return extended_state(state, lengths, counts, kv, gate, rows.layout, entries)


def _counts(
    cache: AttentionCache, x: Float[Array, "B T E"], lengths: Int[Array, " B"] | np.ndarray | Sequence[int] | None
) -> Int32[Array, " B"]:
    """How many of the T tokens each row gets, int32 [B]; checked where known, else no more than fit."""
    batch, size, _ = x.shape
    if lengths is None:  # of a symbolic batch there are no values to look at
        lengths = (np if isinstance(batch, int) else jnp).full((batch,), size, np.int32)
    counts, values = as_lengths("lengths", lengths, batch)
    require("lengths", values, lambda a: (a >= 0) & (a <= size), f"0 to {size}, the tokens of x")
    held = None if values is None else on_host(cache.lengths)
    if values is not None and held is not None:
        room = cache.capacity - held
        most = f"{room[int((values > room).argmax())]} of {cache.capacity}" if room.size else "none"
        require("lengths", values, lambda a: a <= room, f"at most what the cache has room for, {most}")
    return jnp.minimum(narrowed(counts, 0, size), cache.capacity - cache.lengths)


def _check_cache(layer: CompressedAttention, cache: AttentionCache, x: Array) -> None:
    """Raises ValueError unless the cache is one of this layer, for as many rows as x has."""
    if not isinstance(cache, AttentionCache):
        raise ValueError(f"cache: expected an AttentionCache, got {type(cache).__name__}")
    expected = jax.eval_shape(lambda: layer.init_cache(x.shape[0], cache.capacity, max_rollback=cache.max_rollback))
    for part in ("compressor", "indexer"):
        if (getattr(cache, part) is None) != (getattr(expected, part) is None):
            has = "none" if getattr(cache, part) is None else "one"
            raise ValueError(
                f"cache: expected one that this {layer.layer_type.value} layer's init_cache makes, got one of another "
                f"layer type: it has {has} of a {part}'s states"
            )
    leaves = jax.tree_util.tree_leaves_with_path
    wanted, got = (
        [(jax.tree_util.keystr(path), leaf.shape, leaf.dtype) for path, leaf in leaves(tree)]
        for tree in (expected, cache)
    )
    if wanted != got:
        differing = next(pair for pair in zip(wanted, got, strict=True) if pair[0] != pair[1])
        raise ValueError(
            f"cache: expected one that this {layer.layer_type.value} layer's init_cache makes for {x.shape[0]} rows, "
            f"{differing[0]}, got {differing[1]}"
        )
