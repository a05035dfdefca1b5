"""The backend and its derivative rule."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from foveal.backends.chunked.backward import backward
from foveal.backends.chunked.forward import forward
from foveal.backends.chunked.plan import Plan
from foveal.backends.once import first_only, reverse_only
from foveal.backends.operands import Backend, Operands
from foveal.program import planned, row_major, varying
from foveal.typing import Array

_ONCE = "'chunked' is once differentiable, in reverse mode; use implementation='dense'"


class Chunked(Backend):
    """Tiles of queries against the keys they see; saves output and log-sum-exp, recomputes the rest."""

    name = "chunked"
    quadratic = False

    def refusal(self, operands: Operands) -> str | None:
        """It can do everything."""
        del operands
        return None

    def __call__(self, operands: Operands) -> tuple[Array, Array]:
        """See `Backend`."""
        q = operands.q
        if q.size == 0:
            return jnp.zeros(q.shape, q.dtype), jnp.zeros(q.shape[:3], operands.accumulation_dtype)
        plan = Plan.of(operands)
        # Tiles are whole rows, and the backward pass takes the same queries again.
        arrays, structure = jax.tree.flatten(dataclasses.replace(operands, q=row_major(planned(q))))
        # Casts here, outside of the derivative rule, sum the gradient of what all devices of a mesh axis share.
        arrays = reverse_only(_ONCE, varying(arrays, arrays))
        return _attention(plan, jax.tree.unflatten(structure, arrays))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(plan: Plan, operands: Operands) -> tuple[Array, Array]:
    return forward(plan, operands)


def _forward_rule(plan: Plan, operands: Operands) -> tuple[tuple[Array, Array], tuple[Operands, Array, Array]]:
    out, lse = forward(plan, _first_only(operands))
    return (out, lse), (operands, out, lse)


def _first_only(operands: Operands) -> Operands:
    """See `first_only`; only floats have derivatives."""
    floats = (operands.q, operands.kv, operands.entries, operands.sinks)
    q, kv, entries, sinks = first_only(_ONCE, floats)
    return dataclasses.replace(operands, q=q, kv=kv, entries=entries, sinks=sinks)


def _backward_rule(
    plan: Plan, residuals: tuple[Operands, Array, Array], cotangents: tuple[Array, Array]
) -> tuple[Operands]:
    operands, out, lse = residuals
    (out, lse), cotangents = first_only(_ONCE, ((out, lse), cotangents))
    grads = backward(plan, _first_only(operands), out, lse, *cotangents)
    narrow = operands.kv.dtype
    nothing: Any = None  # for all of an argument, integers here, that has no gradient
    return (
        dataclasses.replace(
            operands,
            q=grads.q,
            kv=grads.kv.astype(narrow),
            entries=grads.entries.astype(narrow),
            sinks=grads.sinks,
            visibility=nothing,
            indices=nothing,
            tainted=nothing,
        ),
    )


_attention.defvjp(_forward_rule, _backward_rule)
