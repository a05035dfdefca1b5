"""Core attention with every score materialised: the plain implementation, to read and to compare with."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from foveal.backends.operands import Backend, Operands, settled
from foveal.backends.sinks import share_of_keys
from foveal.typing import Array, Precision, lowest


class Dense(Backend):
    """Attention by [B, S, H, S] and [B, S, H, C] scores, in the accumulation dtype throughout."""

    name = "dense"
    quadratic = True

    def refusal(self, operands: Operands) -> str | None:
        """Return None: it can run any call, at a cost in memory."""
        del operands
        return None

    def __call__(self, operands: Operands) -> tuple[Array, Array]:
        """One softmax over raw keys and entries together."""
        dtype, visibility, precision = operands.accumulation_dtype, operands.visibility, operands.precision
        padding = visibility.documents.is_padding[:, :, None]
        broken = ~jnp.isfinite(operands.q).all(axis=-1)  # zeroed: as NaN they would reach every key's gradient
        q = jnp.where((padding | broken)[..., None], 0.0, operands.q.astype(dtype)) * operands.scale
        groups = [(operands.kv.astype(dtype), visibility.window_mask())]
        if operands.slots:
            groups.append((operands.entries.astype(dtype), visibility.entry_mask(operands.indices)))

        logits = [_masked_logits(q, keys, mask, precision) for keys, mask in groups]
        peaks = jnp.stack([x.max(axis=-1, initial=lowest(dtype)) for x in logits])
        peak = jax.lax.stop_gradient(jnp.where(padding, 0.0, jnp.max(peaks, axis=0)))  # every other query sees a key
        weights = [jnp.exp(x - peak[..., None]) for x in logits]
        total = sum((w.sum(axis=-1) for w in weights), start=jnp.zeros_like(peak))
        total = jnp.where(padding, 1.0, total)
        out = sum(
            (_values(w, keys, precision) for w, (keys, _) in zip(weights, groups, strict=True)),
            start=jnp.zeros_like(q),
        )
        out = out / total[..., None]
        lse = peak + jnp.log(total)
        lost = broken if operands.tainted is None else broken | operands.tainted[:, :, None]
        out = settled(out * share_of_keys(lse, operands.sinks)[..., None], padding[..., None], lost[..., None])
        return out.astype(operands.q.dtype), settled(lse, padding, lost)


def _masked_logits(q: Array, keys: Array, mask: Array, precision: Precision) -> Array:
    """Logits [B, S, H, N]: all heads in one matmul of S * H rows, which CPUs run twice as fast as one per head."""
    batch, length, heads, dim = q.shape
    rows = q.reshape(batch, length * heads, dim)
    logits = jnp.einsum("brd,bnd->brn", rows, keys, precision=precision)
    logits = logits.reshape(batch, length, heads, keys.shape[1])
    return jnp.where(mask[:, :, None, :], logits, lowest(logits.dtype))


def _values(weights: Array, keys: Array, precision: Precision) -> Array:
    batch, length, heads, count = weights.shape
    rows = weights.reshape(batch, length * heads, count)
    return jnp.einsum("brn,bnd->brd", rows, keys, precision=precision).reshape(batch, length, heads, keys.shape[2])
