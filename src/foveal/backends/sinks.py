"""The attention sink: a logit in the softmax's denominator that has no value."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from foveal.typing import Array, Bool, Float


def share_of_keys(lse: Float[Array, "B S H"], sinks: Float[Array, " H"] | None) -> Float[Array, "B S H"]:
    """Share of the keys in a softmax whose denominator includes the sink.

    exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse - sink): the factor for attention that was normalised over its keys
    alone. 1 for a sink of -inf, 0 for +inf; neither produces NaN, forward or backward, as long as lse is finite.
    """
    return jnp.ones_like(lse) if sinks is None else keys_share(lse - sinks[None, None])


@jax.custom_jvp
def keys_share(margin: Float[Array, "..."]) -> Float[Array, "..."]:
    """sigmoid(margin), with a derivative that stays accurate where the keys take nearly all of the softmax.

    JAX differentiates sigmoid as y (1 - y), which cancels to zero from a margin of 17 on. Over a long context, every
    sink's gradient comes from such margins.
    """
    return jax.nn.sigmoid(margin)


@keys_share.defjvp
def _keys_share_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (margin,), (tangent,) = primals, tangents
    share = keys_share(margin)
    return share, share * keys_share(-margin) * tangent


class RowGradients(NamedTuple):
    """Terms of a query's output and log-sum-exp in the gradients of its logits.

    Let p_j = exp(logit_j - lse) be the weight of key j among the keys, and f = sigmoid(lse - sink) the keys' share. The
    output is f sum_j p_j k_j. The gradient of logit j is p_j (f d_out . k_j + offset), that of k_j has a part f p_j
    d_out, and that of the sink is -(1 - f) d_out . out.

    Attributes:
        share: f.
        lse: for computing p_j; so large that p_j = 0 for queries that pass no gradient on.
        offset: d_lse - f d_out . out.
        inner: d_out . out; 0 for queries that pass no gradient on.
        sink_share: 1 - f, without cancellation; None without sinks.
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
    """Compute `RowGradients`. All arguments have one shape, or broadcast to it.

    Args:
        inner: d_out . out.
        lse: log-sum-exp over the keys alone.
        d_lse: its cotangent.
        sinks: logits, or None.
        silent: queries that pass no gradient on: they saw nothing, or something non-finite.
    """
    weights_lse = jnp.where(silent, jnp.finfo(lse.dtype).max, lse)
    lse = jnp.where(silent, 0.0, lse)
    inner = jnp.where(silent, 0.0, inner)
    share, sink_share = jnp.ones_like(lse), None
    if sinks is not None:
        share, sink_share = keys_share(lse - sinks), keys_share(sinks - lse)
    return RowGradients(share, weights_lse, jnp.where(silent, 0.0, d_lse) - share * inner, inner, sink_share)
