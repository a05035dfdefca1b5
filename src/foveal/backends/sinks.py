"""The attention sink: a logit in the softmax's denominator that has no value."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from foveal.typing import Array, Bool, Float


def share_of_keys(lse: Float[Array, "B S H"], sinks: Float[Array, " H"] | None) -> Float[Array, "B S H"]:
    """What remains for the keys of a softmax whose denominator has the sink in it too.

    exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse - sink): the factor for an attention that was normalised over its
    keys alone. 1 for a sink of -inf, 0 for +inf; neither makes a NaN, forward or backward, as long as lse is finite.
    """
    return jnp.ones_like(lse) if sinks is None else keys_share(lse - sinks[None, None])


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
    sum_j p_j k_j. The gradient of logit j is p_j (f d_out . k_j + offset), that of k_j has a part f p_j d_out, and that
    of the sink is -(1 - f) d_out . out.

    Attributes:
        share: f.
        lse: to compute p with; of queries that give no gradient so large that p = 0.
        offset: d_lse - f d_out . out.
        inner: d_out . out; 0 for queries that give no gradient.
        sink_share: 1 - f, with all its digits; None without sinks.
    """

    share: Array
    lse: Array
    offset: Array
    inner: Array
    sink_share: Array | None


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
    weights_lse = jnp.where(silent, jnp.finfo(lse.dtype).max, lse)
    lse = jnp.where(silent, 0.0, lse)
    inner = jnp.where(silent, 0.0, inner)
    share, sink_share = jnp.ones_like(lse), None
    if sinks is not None:
        share, sink_share = keys_share(lse - sinks), keys_share(sinks - lse)
    return RowGradients(share, weights_lse, jnp.where(silent, 0.0, d_lse) - share * inner, inner, sink_share)
