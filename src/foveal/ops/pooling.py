"""Softmax-gated pooling of windows into entries."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from foveal.checks import as_array, as_bool
from foveal.geometry import WindowLayout, as_layout
from foveal.meshes import any_mesh
from foveal.typing import Array, Float, Float32, lowest

_LOWEST = lowest(jnp.float32)


@any_mesh(like="kv", dims=1)
def pool_windows(
    kv: Float[Array, "B S F"],
    gate: Float[Array, "B S F"],
    position_bias: Float[Array, "m F"],
    layout: WindowLayout,
    *,
    overlap: bool,
) -> Float32[Array, "B C D"]:
    """Pool each window's tokens into one entry, weighted per feature by a softmax over their gates.

    Plain (HCA): entry = sum_j softmax_j(gate[j] + position_bias[j]) * kv[j] over the window's m tokens; D = F.
    Overlapped (CSA and its indexer): the projections are twice as wide, F = 2 D. A token's first half (the previous
    half) takes part in the entry of the *next* window, its second half (the current half) in that of its own. Each
    entry thus has 2 m terms, m of which are absent in a document's first window. The bias enters the gate only.

    Technical report, arXiv 2606.19348, equations 9-12 and 20-23.

    Args:
        kv: values per token, [B, S, F].
        gate: gate logits per token, [B, S, F].
        position_bias: [m, F], by position within the window.
        layout: which rows form which entry.
        overlap: whether windows overlap.

    Returns:
        float32 [B, C, D], zeros in slots that hold no window. The rows of such a slot contribute to no value or
        gradient, even if they are NaN.

    Raises:
        ValueError: arguments that do not fit each other or the layout.
    """
    layout, overlap = as_layout(layout), as_bool("overlap", overlap)
    kv = as_array("kv", kv, "B S F", (layout.start.shape[0], layout.rows))
    gate = as_array("gate", gate, "B S F", kv.shape)
    position_bias = as_array("position_bias", position_bias, "m F", (layout.ratio, kv.shape[2]))
    if overlap and kv.shape[2] % 2:
        raise ValueError(f"kv: expected an even width where windows overlap, got shape {kv.shape}")
    return pool(kv, gate, position_bias, layout, overlap=overlap)


def pool(kv: Array, gate: Array, position_bias: Array, layout: WindowLayout, *, overlap: bool) -> Array:
    """`pool_windows` for checked arguments."""
    width = kv.shape[-1] // 2 if overlap else kv.shape[-1]
    current = slice(kv.shape[-1] - width, None)
    parts = [(current, 0, None if layout.complete else layout.valid)]
    if overlap:
        parts.insert(0, (slice(0, width), -1, layout.has_previous))

    values, logits = [], []
    for half, shift, present in parts:
        value, logit = layout.gather_all(kv[..., half], gate[..., half], shift=shift)
        value, logit = value.astype(jnp.float32), logit.astype(jnp.float32)
        logit = logit + position_bias[:, half].astype(jnp.float32)[None, None]
        if present is not None:  # replace absent rows before use: 0 x NaN must not arise, forward or backward
            present = present[:, :, None, None]
            value = jnp.where(present, value, 0.0)
            logit = jnp.where(present, logit, _LOWEST)
        values.append(value)
        logits.append(logit)
    pooled = _softmax_weighted_sum(jnp.concatenate(values, axis=2), jnp.concatenate(logits, axis=2))
    return pooled if layout.complete else jnp.where(layout.valid[:, :, None], pooled, 0.0)


def _softmax_weighted_sum(value: Array, logit: Array) -> Array:
    """sum_j softmax_j(logit) * value over axis 2; 0 where every logit is `lowest` or -inf."""
    peak = jax.lax.stop_gradient(jnp.max(logit, axis=2, keepdims=True))
    weight = jnp.exp(logit - jnp.where(peak <= _LOWEST, 0.0, peak))
    total = jnp.sum(weight, axis=2)
    return jnp.sum(weight * value, axis=2) / jnp.where(total == 0.0, 1.0, total)
