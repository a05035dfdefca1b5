"""Attention of a batch by the Splash kernels, and its derivative rule.

The kernels take some heads at a time, and only for those does memory hold what they write besides their results:
log-sum-exps repeated 128 times, and partial sums of gradients. Sinks, padding and NaN are handled along the way: the
only arrays of the queries' size are the queries, the output and their gradients.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from foveal.backends.once import first_only, reverse_only
from foveal.backends.operands import Operands, settled, silent
from foveal.backends.sharded import run_sharded
from foveal.backends.sinks import row_gradients, share_of_keys
from foveal.backends.splash import kernel
from foveal.backends.splash.heads import SomeHeads, backward_heads, forward_heads
from foveal.backends.splash.kernel import Masks, RowOperands
from foveal.backends.splash.operands import (
    SplashPlan,
    dynamic_mask,
    key_arrays,
    key_gradients,
    segments,
    static_masks_of,
)
from foveal.typing import Array, lowest


def attend(plan: SplashPlan, operands: Operands) -> tuple[Array, Array]:
    """Output [B, S, H, D] in q's dtype and log-sum-exp float32 [B, S, H]; each device computes its rows and heads."""
    return run_sharded(functools.partial(_attend, plan), operands, plan.sharding)


_ONCE = "Splash Attention is once differentiable, in reverse mode; use implementation='dense'"


def _attend(plan: SplashPlan, operands: Operands) -> tuple[Array, Array]:
    results: Any = _attention(plan, reverse_only(_ONCE, operands))
    return results


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(plan: SplashPlan, operands: Operands) -> tuple[Array, Array]:
    some_heads = forward_heads(plan.layout, plan.call.blocks, operands.q)
    out, lse = _over_rows(plan, operands, _forward_row, some_heads, jnp.swapaxes(operands.q, 1, 2))
    return jnp.swapaxes(out, 1, 2), jnp.swapaxes(lse, 1, 2)


def _forward_rule(plan: SplashPlan, operands: Operands) -> tuple[tuple[Array, Array], Any]:
    results: Any = _attention(plan, first_only(_ONCE, operands))
    return results, (operands, *results)


def _backward_rule(plan: SplashPlan, residuals: Any, cotangents: tuple[Array, Array]) -> tuple[Operands]:
    (operands, out, lse), cotangents = first_only(_ONCE, (residuals, cotangents))
    by_head = jax.tree.map(lambda a: jnp.swapaxes(a, 1, 2), (operands.q, out, lse, *cotangents))
    some_heads = backward_heads(plan.layout, operands.q)
    d_q, d_sinks, d_keys, d_values = _over_rows(plan, operands, _backward_row, some_heads, *by_head)
    d_kv, d_entries = key_gradients(plan, operands, d_keys, d_values)
    nothing: Any = None  # the cotangent of arguments without gradient, here integers
    return (
        dataclasses.replace(
            operands,
            q=jnp.swapaxes(d_q, 1, 2),
            kv=d_kv,
            entries=d_entries,
            sinks=None if operands.sinks is None else d_sinks.sum(axis=0),
            visibility=nothing,
            indices=nothing,
            tainted=nothing,
        ),
    )


_attention.defvjp(_forward_rule, _backward_rule)


class _BatchRow(NamedTuple):
    """Operands that all heads of a batch row share."""

    keys: Array
    values: Array
    segments: Any
    mask: Array | None  # bool [rows, columns], None if static
    padding: Array  # bool [S]
    tainted: Array  # bool [S]: queries that see a non-finite key


def _over_rows(
    plan: SplashPlan, operands: Operands, function: Callable[..., Any], some_heads: SomeHeads, *by_head: Array
) -> Any:
    """Map `function(plan, masks, row, sinks, heads_per_call, *by_head)` over the batch rows."""
    keys, values = key_arrays(plan, operands)
    padding = operands.visibility.documents.is_padding
    tainted = jnp.zeros_like(padding) if operands.tainted is None else operands.tainted
    mask = dynamic_mask(plan, operands) if plan.dynamic else None
    ids = None if plan.dynamic else segments(plan, operands.visibility)
    shared = _BatchRow(keys, values, ids, mask, padding, tainted)
    static = None if plan.dynamic else static_masks_of(plan.layout, operands.visibility, plan.call.blocks)
    batch, heads = by_head[0].shape[:2]
    heads_per_call = some_heads.heads_per_call(heads)

    def of_row(both: tuple[_BatchRow, tuple[Array, ...]]) -> Any:
        row, by_head = both
        masks = static if row.mask is None else kernel.dynamic_masks(row.mask, plan.call.blocks)
        return function(plan, masks, row, operands.sinks, heads_per_call, *by_head)

    # Kernels cannot be batched in JAX's emulator of TPUs, nor with lists of tiles that are data.
    if plan.dynamic or plan.call.interpret or not some_heads.fit(batch * heads):
        return jax.lax.map(of_row, (shared, by_head))
    return jax.vmap(of_row)((shared, by_head))


def _by_heads(function: Callable[..., Any], start: Any, heads_per_call: int, *arrays: Any) -> Any:
    """Scan `function(carry, *parts)` over groups of heads: the last carry, and the results by head."""
    heads = arrays[0].shape[0]
    parts = jax.tree.map(lambda a: a.reshape(heads // heads_per_call, heads_per_call, *a.shape[1:]), arrays)
    carry, results = jax.lax.scan(lambda carry, part: function(carry, *part), start, parts)
    return carry, jax.tree.map(lambda a: a.reshape(heads, *a.shape[2:]), results)


def _padded(plan: SplashPlan, array: Array, value: float = 0.0) -> Array:
    """Pad rows to those of the kernels: [H, S, ...] -> [H, padded rows, ...]."""
    more = plan.layout.padded_rows - plan.layout.rows
    return jnp.pad(array, ((0, 0), (0, more), *[(0, 0)] * (array.ndim - 2)), constant_values=value)


def _forward_row(
    plan: SplashPlan, masks: Masks, row: _BatchRow, sinks: Array | None, heads_per_call: int, q: Array
) -> tuple[Array, Array]:
    """Output [H, S, D] and log-sum-exp [H, S]; zeros for padding, NaN for what is not finite."""

    def group(carry: None, q: Array, sinks: Array | None) -> tuple[None, tuple[Array, Array]]:
        operands = RowOperands(_padded(plan, q), row.keys, row.values, row.segments)
        out, lse = kernel.forward(plan.call, masks.forward, operands)
        out, lse = out[:, : plan.layout.rows], lse[:, : plan.layout.rows]
        lost = row.tainted[None] | ~jnp.isfinite(q).all(axis=-1)
        lse = settled(lse, row.padding[None], lost)
        out = out.astype(jnp.float32) * share_of_keys(lse.T[None], sinks)[0].T[..., None]
        return carry, (settled(out, row.padding[None, :, None], lost[..., None]).astype(q.dtype), lse)

    return _by_heads(group, None, heads_per_call, q, sinks)[1]


def _backward_row(
    plan: SplashPlan,
    masks: Masks,
    row: _BatchRow,
    sinks: Array | None,
    heads_per_call: int,
    q: Array,
    out: Array,
    lse: Array,
    d_out: Array,
    d_lse: Array,
) -> tuple[Array, Array, Array, Array]:
    """Gradients of queries [H, S, D] and sinks [H], and of keys and values [columns, D] in float32."""
    group = functools.partial(_backward_group, plan, masks, row)
    start = jnp.zeros(row.keys.shape, jnp.float32), jnp.zeros(row.keys.shape, jnp.float32)
    (d_keys, d_values), (d_q, d_sinks) = _by_heads(group, start, heads_per_call, q, out, lse, d_out, d_lse, sinks)
    return d_q, d_sinks, d_keys, d_values


def _backward_group(
    plan: SplashPlan, masks: Masks, row: _BatchRow, sums: tuple[Array, Array], *parts: Any
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Gradients of some heads' queries and sinks; those of the keys are added to `sums`."""
    q, out, lse, d_out, d_lse, sinks = parts
    inner = jnp.einsum("hsd,hsd->hs", out.astype(jnp.float32), d_out.astype(jnp.float32), precision="highest")
    quiet = silent(lse, row.padding[None])
    of_rows = row_gradients(inner, lse, d_lse, None if sinks is None else sinks[:, None], quiet)
    g = jnp.where(quiet[..., None], 0.0, d_out.astype(jnp.float32) * of_rows.share[..., None]).astype(q.dtype)
    # A silent query's weights are zero, but 0 x NaN is NaN.
    sound = jnp.where(quiet[..., None], 0.0, q)
    operands = RowOperands(_padded(plan, sound), row.keys, row.values, row.segments)
    d_q, d_k, d_v = kernel.backward(
        plan.call,
        masks.backward,
        operands,
        _padded(plan, of_rows.lse, -lowest(of_rows.lse.dtype)),
        _padded(plan, g),
        _padded(plan, of_rows.offset),
    )
    sums = sums[0] + d_k.astype(jnp.float32), sums[1] + d_v.astype(jnp.float32)
    d_sinks = jnp.zeros(q.shape[:1], jnp.float32)
    if of_rows.sink_share is not None:
        d_sinks = -(of_rows.sink_share * of_rows.inner).sum(axis=1)
    return sums, (d_q[:, : plan.layout.rows], d_sinks)
