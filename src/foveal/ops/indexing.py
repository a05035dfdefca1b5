"""The lightning indexer's scores and the exact choice of the best entries."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from foveal.geometry import Visibility
from foveal.typing import Array, Float, Int32, Precision

_BLOCK_ELEMENTS = 1 << 22  # float32 elements of one block's per-head scores: 16 MiB


def select_entries(
    q: Float[Array, "B S I J"],
    weights: Float[Array, "B S I"],
    keys: Float[Array, "B C J"],
    *,
    visibility: Visibility,
    top_k: int,
    block_size: int | None = None,
    precision: Precision = None,
) -> Int32[Array, "B S K"]:
    """For every query the slots of the `top_k` visible entries with the highest index scores.

    score[t, c] = sum_i weights[t, i] * relu(q[t, i] . keys[c]), in float32; the weights may be negative. Technical
    report, arXiv 2606.19348, equations 15-17. The same slots serve all attention heads.

    Exact and deterministic: of equal scores the lower slot wins, -0.0 equals 0.0, an entry whose score is NaN is
    never chosen, nor is one that the query does not see. Where fewer than `top_k` remain, all of them are chosen.
    Scores exist for one block of queries at a time, so memory is linear in S. No gradient flows through the choice.

    Args:
        q: indexer queries after RoPE, [B, S, I, J].
        weights: per query and indexer head, any scaling included, [B, S, I].
        keys: the indexer's own entries after RoPE, [B, C, J].
        visibility: who sees what; its `slots` must be C.
        top_k: how many to choose, >= 1; may exceed C.
        block_size: queries scored at a time; the result does not depend on it. By default as many as keep a block's
            scores within 16 MiB, but 8 at least.
        precision: of the matmul.

    Returns:
        int32 [B, S, K], K = min(top_k, C): chosen slots in ascending order, then -1 for none.

    Raises:
        ValueError: shapes that do not fit each other, or `top_k` or `block_size` below 1.
    """
    _check(q, weights, keys, visibility, top_k, block_size)
    batch, length, heads, _ = q.shape
    slots = keys.shape[1]
    chosen = min(top_k, slots)
    if chosen == 0 or batch * length == 0:
        return jnp.zeros((batch, length, chosen), jnp.int32)
    if block_size is None:
        block_size = max(8, _BLOCK_ELEMENTS // (batch * heads * slots))
    block_size = min(block_size, length)
    q, weights, keys = jax.lax.stop_gradient((q, weights, keys))

    def choose(block: tuple[Array, Array, Array, Array]) -> Array:
        scores = _scores(*block[:2], keys, precision)
        return _best_slots(scores, *block[2:], chosen)

    per_query = (q, weights, *visibility.entry_range)
    whole = length // block_size * block_size
    blocks = jax.tree.map(lambda a: _split(a[:, :whole], block_size), per_query)
    picked = jax.lax.map(choose, blocks)
    picked = jnp.moveaxis(picked, 0, 1).reshape(batch, whole, chosen)
    if whole == length:
        return picked
    rest = choose(jax.tree.map(lambda a: a[:, whole:], per_query))
    return jnp.concatenate([picked, rest], axis=1)


def _scores(q: Array, weights: Array, keys: Array, precision: Precision) -> Array:
    """float32 [B, T, C] for T queries."""
    dots = jnp.einsum("btij,bcj->btic", q, keys, precision=precision, preferred_element_type=jnp.float32)
    return jnp.sum(jax.nn.relu(dots) * weights.astype(jnp.float32)[..., None], axis=2)


def _best_slots(scores: Array, first: Array, end: Array, count: int) -> Array:
    """int32 [B, T, count]: the slots of the highest scores within [first, end), ascending, then -1."""
    slots = scores.shape[-1]
    slot = jnp.arange(slots, dtype=jnp.int32)[None, None]
    eligible = (slot >= first[..., None]) & (slot < end[..., None]) & ~jnp.isnan(scores)
    # -0.0 must tie with 0.0, which a total order does not do; -inf is kept for "not eligible".
    key = jnp.where(scores == 0.0, 0.0, jnp.maximum(scores, jnp.finfo(jnp.float32).min))
    best, index = jax.lax.top_k(jnp.where(eligible, key, -jnp.inf), count)  # ties: the lower index first
    ascending = jnp.sort(jnp.where(best > -jnp.inf, index, slots), axis=-1)
    return jnp.where(ascending < slots, ascending, -1)


def _split(array: Array, block_size: int) -> Array:
    """[B, n T, ...] -> [n, B, T, ...]."""
    batch, length, *rest = array.shape
    return jnp.moveaxis(array.reshape(batch, length // block_size, block_size, *rest), 1, 0)


def _check(q: Array, weights: Array, keys: Array, visibility: Visibility, top_k: int, block_size: int | None) -> None:
    if q.ndim != 4 or q.shape[:2] != visibility.documents.shape:
        raise ValueError(f"q: expected [B, S, I, J] with (B, S) = {visibility.documents.shape}, got shape {q.shape}")
    if weights.shape != q.shape[:3]:
        raise ValueError(f"weights: expected {q.shape[:3]}, got shape {weights.shape}")
    expected = (q.shape[0], visibility.slots, q.shape[3])
    if keys.shape != expected:
        raise ValueError(f"keys: expected [B, C, J] = {expected}, got shape {keys.shape}")
    for name, value in (("top_k", top_k), ("block_size", block_size)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}: expected an int >= 1, got {value!r}")
