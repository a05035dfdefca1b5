"""The attention sink: a logit in the softmax's denominator that has no value."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from foveal.typing import Array, Float


def share_of_keys(lse: Float[Array, "B S H"], sinks: Float[Array, " H"] | None) -> Float[Array, "B S H"]:
    """What remains for the keys of a softmax whose denominator has the sink in it too.

    exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse - sink): the factor for an attention that was normalised over its
    keys alone. 1 for a sink of -inf, 0 for +inf and where nothing was seen (lse = -inf); none of these makes a NaN,
    forward or backward.
    """
    nothing = lse == -jnp.inf
    if sinks is None:
        return jnp.where(nothing, 0.0, jnp.ones_like(lse))
    return jnp.where(nothing, 0.0, keys_share(jnp.where(nothing, 0.0, lse) - sinks[None, None]))


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
