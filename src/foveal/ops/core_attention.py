"""Core attention: one softmax over a window of raw keys, compressed entries and a sink."""

from __future__ import annotations

import dataclasses
from typing import Literal, overload

import jax.numpy as jnp

from foveal.backends import registry
from foveal.backends.operands import Backend, Operands
from foveal.backends.registry import Explanation
from foveal.checks import as_array, as_bool, as_indices, as_precision, as_scale, same_dtype
from foveal.geometry import EntryRange, Visibility, as_visibility
from foveal.meshes import any_mesh
from foveal.typing import Array, Bool, Float, Int, Precision


@overload
def core_attention(
    q: Float[Array, "B S H D"],
    kv: Float[Array, "B N D"],
    entries: Float[Array, "B C D"] | None = None,
    *,
    visibility: Visibility,
    indices: Int[Array, "B S K"] | None = None,
    sinks: Float[Array, " H"] | None = None,
    scale: float | int | None = None,
    precision: Precision = None,
    return_lse: Literal[False] = False,
    implementation: str | Backend | None = None,
) -> Float[Array, "B S H D"]: ...


@overload
def core_attention(
    q: Float[Array, "B S H D"],
    kv: Float[Array, "B N D"],
    entries: Float[Array, "B C D"] | None = None,
    *,
    visibility: Visibility,
    indices: Int[Array, "B S K"] | None = None,
    sinks: Float[Array, " H"] | None = None,
    scale: float | int | None = None,
    precision: Precision = None,
    return_lse: Literal[True],
    implementation: str | Backend | None = None,
) -> tuple[Float[Array, "B S H D"], Float[Array, "B S H"]]: ...


@any_mesh(like="q")
def core_attention(
    q: Float[Array, "B S H D"],
    kv: Float[Array, "B N D"],
    entries: Float[Array, "B C D"] | None = None,
    *,
    visibility: Visibility,
    indices: Int[Array, "B S K"] | None = None,
    sinks: Float[Array, " H"] | None = None,
    scale: float | int | None = None,
    precision: Precision = None,
    return_lse: bool = False,
    implementation: str | Backend | None = None,
) -> Float[Array, "B S H D"] | tuple[Float[Array, "B S H D"], Float[Array, "B S H"]]:
    """DeepSeek-V4's attention over the sliding window and the compressed entries (arXiv 2606.19348, section 2.3).

    out[t, h] = sum_j exp(l_j) k_j / (sum_j exp(l_j) + exp(sink_h)), l_j = scale * q[t, h] . k_j, over the raw keys and
    entries k_j that t sees. Each key is also the value; all heads share them.

    Logits, softmax and sums are float32 (float64 for float64 inputs); for bfloat16 inputs an implementation may round
    the softmax weights to bfloat16 before multiplying them with the keys. A query that sees nothing gives exact zeros.
    A sink of -inf acts as no sink; one of +inf gives zeros. NaN or infinity in a key reaches only the queries that see
    it; in a query, only that query. Such queries give NaN and pass no gradient on. Finite arguments produce no infinity
    except in the returned log-sum-exp, so `jax_debug_infs` can stay on. Differentiable in q, kv, entries and sinks:
    once and in reverse mode; `dense` has all derivatives.

    Args:
        q: queries, [B, S, H, D].
        kv: raw keys = values, [B, N, D], in q's dtype; N = `visibility.raw_keys`: S, plus the history in a cache.
        entries: compressed keys = values, one per slot, [B, C, D], in q's dtype; None only if `visibility` has no
            slots.
        visibility: who sees what.
        indices: integers [B, S, K], the slots each query may use, shared by all heads, in any order. -1, slots out of
            range and slots that the query does not see are ignored; a duplicate counts once. None: all visible slots.
        sinks: [H], logits in the denominator only, unscaled; None for none.
        scale: factor on the logits, D ** -0.5 by default.
        precision: matmul precision, as in `jax.lax.dot_general`.
        return_lse: also return the log-sum-exp of the logits.
        implementation: a name, a configured implementation (`foveal.Splash`), or None for the best one that can run the
            call; `explain` says which.

    Returns:
        [B, S, H, D] in q's dtype. With `return_lse` also [B, S, H] in float32 (float64): the log-sum-exp over the keys
        alone, the sink excluded, -inf where nothing is visible; differentiable, so that results over disjoint keys can
        be merged.

    Raises:
        ValueError: arguments that do not fit each other, or an unknown implementation.
        NotImplementedError: the named implementation, or every one, cannot run this call; the message says why.
    """
    as_bool("return_lse", return_lse)
    operands = _checked(q, kv, entries, visibility, indices, sinks, scale, precision)
    if operands.indices is not None:
        operands = dataclasses.replace(operands, indices=visibility.seen_slots(operands.indices))
    if operands.sinks is not None:
        operands = dataclasses.replace(operands, sinks=operands.sinks.astype(operands.accumulation_dtype))
    out, lse = attend(operands, implementation)
    if not return_lse:
        return out
    return out, jnp.where(visibility.documents.is_padding[:, :, None], -jnp.inf, lse)


def attend(
    operands: Operands, implementation: str | Backend | None
) -> tuple[Float[Array, "B S H D"], Float[Array, "B S H"]]:
    """Output and log-sum-exp of `core_attention` for checked operands: choose a backend, prepare the operands, run.

    The log-sum-exp is finite in padding, where nothing is visible: an infinity that the user did not ask for would
    abort a run under `jax_debug_infs`.
    """
    backend = registry.choose(operands, implementation)
    return backend(_isolate_non_finite(_gather_selected(operands)))


@any_mesh()
def explain(
    q: Float[Array, "B S H D"],
    kv: Float[Array, "B N D"],
    entries: Float[Array, "B C D"] | None = None,
    *,
    visibility: Visibility,
    indices: Int[Array, "B S K"] | None = None,
    sinks: Float[Array, " H"] | None = None,
    scale: float | int | None = None,
    precision: Precision = None,
    implementation: str | Backend | None = None,
) -> Explanation:
    """Explain which implementation `core_attention` would run for these arguments, and why not the others.

    Takes the arguments of `core_attention`, except `return_lse`, and computes nothing.

    Raises:
        ValueError: as `core_attention`.
    """
    operands = _checked(q, kv, entries, visibility, indices, sinks, scale, precision)
    return registry.explain(operands, implementation)


def _checked(
    q: Array,
    kv: Array,
    entries: Array | None,
    visibility: Visibility,
    indices: Array | None,
    sinks: Array | None,
    scale: float | int | None,
    precision: Precision,
) -> Operands:
    """Check the arguments and fill in defaults. No values are checked except those of concrete documents."""
    visibility = as_visibility(visibility)
    q = as_array("q", q, "B S H D", visibility.documents.shape)
    batch, length, heads, dim = q.shape
    if dim < 1:
        raise ValueError(f"q: expected [B, S, H, D] with D >= 1, got shape {q.shape}")
    kv = as_array("kv", kv, "B N D", (batch, visibility.raw_keys, dim))
    same_dtype("kv", kv, "q", q)
    if entries is not None or visibility.slots:
        entries = as_array("entries", entries, "B C D", (batch, visibility.slots, dim))
        same_dtype("entries", entries, "q", q)
    if indices is not None:
        indices = as_indices("indices", indices, (batch, length))
    if sinks is not None:
        sinks = as_array("sinks", sinks, "H", (heads,))
    if entries is None or not visibility.slots:
        entries, indices = jnp.zeros((batch, 0, dim), kv.dtype), None
    scale, precision = as_scale(scale, dim), as_precision(precision)
    return Operands(q, kv, entries, sinks, visibility, indices, None, scale, precision)


def _gather_selected(operands: Operands) -> Operands:
    """Gather the selected entries where few queries select from many entries, as in decoding.

    Every later step reads all entries, if only to check that they are finite.
    """
    indices, entries = operands.indices, operands.entries
    if indices is None or indices.shape[1] * indices.shape[2] >= entries.shape[1]:
        return operands
    batch, length, count = indices.shape
    slots = jnp.maximum(indices, 0).reshape(batch, length * count, 1)
    place = jnp.arange(length * count, dtype=jnp.int32).reshape(1, length, count)
    visibility = operands.visibility
    return dataclasses.replace(
        operands,
        entries=jnp.take_along_axis(entries, slots, axis=1, mode="promise_in_bounds"),
        indices=jnp.where(indices >= 0, place, -1),
        # The indices alone are the mask: every selected slot is visible to its query.
        visibility=visibility.with_entries(EntryRange(0, length * count)),
    )


def _isolate_non_finite(operands: Operands) -> Operands:
    """Replace non-finite keys by zeros, and mark the queries that see one in `tainted`.

    A matmul spreads one NaN over all its rows, since 0 * NaN is NaN, and so do its gradients. Keys are therefore
    cleaned before any implementation reads them, at the cost of one pass over keys that all heads share.
    """
    indices, entries, ranges = operands.indices, operands.entries, operands.visibility.ranges
    kv_bad = ~jnp.isfinite(operands.kv).all(axis=-1)
    tainted = _any_in_range(kv_bad, ranges.window_first, ranges.window_end)
    if entries.shape[1]:
        bad = ~jnp.isfinite(entries).all(axis=-1)
        if indices is None:
            tainted |= _any_in_range(bad, ranges.entry_first, ranges.entry_end)
        else:
            batch, length, count = indices.shape
            slot = jnp.maximum(indices, 0).reshape(batch, length * count)
            selected_bad = jnp.take_along_axis(bad, slot, axis=1).reshape(batch, length, count)
            tainted |= (selected_bad & (indices >= 0)).any(axis=-1)
        entries = jnp.where(bad[:, :, None], 0.0, entries)
    kv = jnp.where(kv_bad[:, :, None], 0.0, operands.kv)
    return dataclasses.replace(operands, kv=kv, entries=entries, tainted=tainted)


def _any_in_range(flags: Bool[Array, "B columns"], *bounds: Array) -> Bool[Array, "B S"]:
    """Whether any flag in [first, end) is set, from running counts."""
    before = jnp.pad(jnp.cumsum(flags, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    first, end = (jnp.take_along_axis(before, bound, axis=1) for bound in bounds)
    return end > first
