"""The chunked backend and its derivative rule."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from foveal.backends.chunked.backward import backward
from foveal.backends.chunked.forward import forward
from foveal.backends.chunked.plan import ChunkedPlan
from foveal.backends.once import first_only, reverse_only
from foveal.backends.operands import Backend, Operands
from foveal.program import planned, row_major, varying
from foveal.typing import Array

_ONCE = "'chunked' is once differentiable, in reverse mode; use implementation='dense'"


class Chunked(Backend):
    """Attention of tiles of queries to the keys they see. Saves output and log-sum-exp, recomputes the rest."""

    name = "chunked"
    quadratic = False

    def refusal(self, operands: Operands) -> str | None:
        """Return None: it can run any call."""
        del operands
        return None

    def __call__(self, operands: Operands) -> tuple[Array, Array]:
        """See `Backend`."""
        q = operands.q
        if q.size == 0:
            return jnp.zeros(q.shape, q.dtype), jnp.zeros(q.shape[:3], operands.accumulation_dtype)
        arrays, structure = jax.tree.flatten(operands)
        plan = ChunkedPlan.for_operands(operands)
        # Row-major: tiles take whole rows, and the backward pass takes the same queries again.
        arrays[0] = row_major(planned(q))
        # Cast outside of the derivative rule: the transpose sums the gradients of what devices of a mesh axis share.
        arrays = reverse_only(_ONCE, varying(arrays, arrays))
        return _attention(plan, structure, arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(plan: ChunkedPlan, structure: Any, arrays: list[Array]) -> tuple[Array, Array]:
    return forward(plan, jax.tree.unflatten(structure, arrays))


def _forward_rule(
    plan: ChunkedPlan, structure: Any, arrays: list[Array]
) -> tuple[tuple[Array, Array], tuple[list[Array], Array, Array]]:
    out, lse = forward(plan, jax.tree.unflatten(structure, first_only(_ONCE, arrays)))
    return (out, lse), (arrays, out, lse)


def _backward_rule(
    plan: ChunkedPlan,
    structure: Any,
    residuals: tuple[list[Array], Array, Array],
    cotangents: tuple[Array, Array],
) -> tuple[list[Array | None]]:
    (arrays, out, lse), cotangents = first_only(_ONCE, (residuals, cotangents))
    grads = backward(plan, jax.tree.unflatten(structure, arrays), out, lse, *cotangents)
    kv, entries = grads.kv.astype(grads.q.dtype), grads.entries.astype(grads.q.dtype)
    floats = [grads.q, kv, entries] if grads.sinks is None else [grads.q, kv, entries, grads.sinks]
    return ([*floats, *[None] * (len(arrays) - len(floats))],)  # integers, which come last, have no gradient


_attention.defvjp(_forward_rule, _backward_rule)
