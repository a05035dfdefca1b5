"""The attention sink: a logit in the softmax's denominator that has no value."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from foveal.typing import Array, Float


def attention_with_sinks(
    out: Float[Array, "B S H D"], lse: Float[Array, "B S H"], sinks: Float[Array, " H"] | None
) -> Float[Array, "B S H D"]:
    """Adds exp(sink) to the denominator of an attention that was normalised over its keys alone.

    exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse - sink). A sink of -inf is none, of +inf leaves zeros, and where
    nothing was seen (lse = -inf) the output is zero already; none of these makes a NaN, forward or backward.
    """
    if sinks is None:
        return out
    nothing = lse == -jnp.inf
    margin = jnp.where(nothing, 0.0, lse) - sinks[None, None]
    return out * jnp.where(nothing, 0.0, keys_share(margin))[..., None]


@jax.custom_jvp
def keys_share(margin: Float[Array, "..."]) -> Float[Array, "..."]:
    """sigmoid(margin), whose derivative keeps its digits where the keys take nearly all.

    JAX differentiates sigmoid as y (1 - y), which cancels to nothing from a margin of 17 on: over a long context that
    is where every sink's gradient lives.
    """
    return jax.nn.sigmoid(margin)


@keys_share.defjvp
def _keys_share_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (margin,), (tangent,) = primals, tangents
    share = keys_share(margin)
    return share, share * keys_share(-margin) * tangent
