"""The attention sink: a logit in the softmax's denominator that has no value."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from foveal.typing import Array, Bool, Float


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


class RowGradients(NamedTuple):
    """What of a query's output and log-sum-exp the gradients of its logits take.

    With p = exp(logit - lse) the weight of a key among the keys and f = sigmoid(lse - sink) the keys' share, out = f
    sum_j p_j k_j. With g = f d_out the gradient of logit j is p_j (g . k_j + offset), and that of k_j has a part p_j g.

    Attributes:
        share: f.
        lse: to compute p with: +inf, so that p = 0, for queries that give no gradient.
        offset: d_lse - g . out.
        sinks: each query's part of the sinks' gradient; None without sinks.
    """

    share: Array
    lse: Array
    offset: Array
    sinks: Array | None


def row_gradients(
    inner: Float[Array, "*rows"],
    lse: Float[Array, "*rows"],
    d_lse: Float[Array, "*rows"],
    sinks: Float[Array, "..."] | None,
    silent: Bool[Array, "..."],
) -> RowGradients:
    """See `RowGradients`; all of one shape, or broadcasting to it.

    Args:
        inner: d_out . out.
        lse: over the keys alone.
        d_lse: its cotangent.
        sinks: logits, or None.
        silent: queries that give no gradient: they saw nothing, or something that is not finite.
    """
    weights_lse = jnp.where(silent, jnp.inf, lse)
    lse = jnp.where(silent, 0.0, lse)
    inner = jnp.where(silent, 0.0, inner)
    share, d_sinks = jnp.ones_like(lse), None
    if sinks is not None:
        margin = lse - sinks
        share = keys_share(margin)
        d_sinks = -keys_share(-margin) * inner  # keys_share(-margin) is 1 - share without the cancellation
    return RowGradients(share, weights_lse, jnp.where(silent, 0.0, d_lse) - share * inner, d_sinks)
