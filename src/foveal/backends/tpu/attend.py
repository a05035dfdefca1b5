"""Attention of a batch by the fused kernels, and its derivative rule."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from foveal.backends.once import first_only, reverse_only
from foveal.backends.operands import Operands
from foveal.backends.tpu.backward import backward
from foveal.backends.tpu.forward import forward
from foveal.backends.tpu.plan import FusedSizes
from foveal.typing import Array

_ONCE = "'fused' is once differentiable, in reverse mode; use implementation='dense'"


def attend(sizes: FusedSizes, operands: Operands) -> tuple[Array, Array]:
    """Output [B, S, H, D] in q's dtype and log-sum-exp float32 [B, S, H], of one device."""
    results: Any = _attention(sizes, reverse_only(_ONCE, operands))
    return results


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(sizes: FusedSizes, operands: Operands) -> tuple[Array, Array]:
    plan = sizes.plan(operands)
    # By head, as XLA lays out the queries' projection for it: the kernels' layout then costs no copy.
    out, lse = sequential_vmap(functools.partial(forward, plan))(operands, _by_head(operands.q))
    return _by_head(out), lse


def _forward_rule(sizes: FusedSizes, operands: Operands) -> tuple[tuple[Array, Array], Any]:
    results: Any = _attention(sizes, first_only(_ONCE, operands))
    return results, (operands, *results)


def _backward_rule(sizes: FusedSizes, residuals: Any, cotangents: tuple[Array, Array]) -> tuple[Operands]:
    (operands, out, lse), (d_out, d_lse) = first_only(_ONCE, (residuals, cotangents))
    plan = sizes.plan(operands, backward=True)
    of_call = sequential_vmap(functools.partial(backward, plan))
    grads = of_call(operands, *map(_by_head, (operands.q, out)), lse, _by_head(d_out), d_lse)
    nothing: Any = None  # the cotangent of arguments without gradient, here integers
    return (
        dataclasses.replace(
            operands,
            q=_by_head(grads.q),
            kv=grads.kv,
            entries=grads.entries.astype(operands.entries.dtype),
            sinks=None if operands.sinks is None else grads.sinks,
            visibility=nothing,
            indices=nothing,
            tainted=nothing,
        ),
    )


_attention.defvjp(_forward_rule, _backward_rule)


def _by_head(array: Array) -> Array:
    """[B, S, H, D] to [B, H, S, D], and back."""
    return jnp.swapaxes(array, 1, 2)
