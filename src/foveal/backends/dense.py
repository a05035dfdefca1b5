"""Core attention by the book: every score is materialised. The obvious one, to be read and compared with."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from foveal.backends.request import AttentionRequest, Backend, membership
from foveal.backends.sinks import share_of_keys
from foveal.geometry import Visibility
from foveal.typing import Array, Precision, lowest


class Dense(Backend):
    """Builds [B, S, H, S] and [B, S, H, C] scores; computes in the accumulation dtype throughout."""

    name = "dense"
    quadratic = True

    def refusal(self, request: AttentionRequest) -> str | None:
        """It can do everything, at a price in memory."""
        del request
        return None

    def __call__(self, request: AttentionRequest) -> tuple[Array, Array]:
        """One softmax over raw keys and entries together."""
        dtype = request.accumulation_dtype
        padding = request.visibility.documents.is_padding[:, :, None]
        broken = ~jnp.isfinite(request.q).all(axis=-1)  # zeroed: as NaN they would reach every key's gradient
        q = jnp.where((padding | broken)[..., None], 0.0, request.q.astype(dtype)) * request.scale
        groups = [(request.kv.astype(dtype), request.visibility.window_mask())]
        if request.entries is not None:
            groups.append((request.entries.astype(dtype), entry_mask(request.visibility, request.indices)))

        logits = [_masked_logits(q, keys, mask, request.precision) for keys, mask in groups]
        peaks = jnp.stack([x.max(axis=-1, initial=lowest(dtype)) for x in logits])
        peak = jax.lax.stop_gradient(jnp.where(padding, 0.0, jnp.max(peaks, axis=0)))  # all others see a key
        weights = [jnp.exp(x - peak[..., None]) for x in logits]
        total = sum((w.sum(axis=-1) for w in weights), start=jnp.zeros_like(peak))
        total = jnp.where(padding, 1.0, total)
        out = sum(
            (_values(w, keys, request.precision) for w, (keys, _) in zip(weights, groups, strict=True)),
            start=jnp.zeros_like(q),
        )
        out = out / total[..., None]
        lse = peak + jnp.log(total)
        out = out * share_of_keys(lse, request.sinks)[..., None]
        lost = broken & ~padding
        if request.tainted is not None:
            lost = lost | request.tainted[:, :, None]
        out, lse = jnp.where(lost[..., None], jnp.nan, out), jnp.where(lost, jnp.nan, lse)
        return out.astype(request.q.dtype), lse


def entry_mask(visibility: Visibility, indices: Array | None) -> Array:
    """bool [B, S, C]: visible and, where there are indices [B, S, K], selected."""
    mask = visibility.entry_mask()
    if indices is None:
        return mask
    return mask & membership(indices, mask.shape[2])


def _masked_logits(q: Array, keys: Array, mask: Array, precision: Precision) -> Array:
    """[B, S, H, N]; all heads in one matmul of S * H rows, which CPUs run twice as fast as one per head."""
    batch, length, heads, dim = q.shape
    rows = q.reshape(batch, length * heads, dim)
    logits = jnp.einsum("brd,bnd->brn", rows, keys, precision=precision)
    logits = logits.reshape(batch, length, heads, keys.shape[1])
    return jnp.where(mask[:, :, None, :], logits, lowest(logits.dtype))


def _values(weights: Array, keys: Array, precision: Precision) -> Array:
    batch, length, heads, count = weights.shape
    rows = weights.reshape(batch, length * heads, count)
    return jnp.einsum("brn,bnd->brd", rows, keys, precision=precision).reshape(batch, length, heads, keys.shape[2])
