"""The backend and its derivative rule."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from foveal.backends.chunked.backward import backward
from foveal.backends.chunked.forward import forward
from foveal.backends.chunked.plan import Plan
from foveal.backends.chunked.tiles import Operands
from foveal.backends.once import first_only, reverse_only
from foveal.backends.planned import planned
from foveal.backends.program import row_major, varying
from foveal.backends.request import AttentionRequest, Backend
from foveal.typing import Array

_ONCE = "'chunked' is once differentiable, in reverse mode; use implementation='dense'"


class Chunked(Backend):
    """Tiles of queries against the keys they see; saves output and log-sum-exp, recomputes the rest."""

    name = "chunked"
    quadratic = False

    def refusal(self, request: AttentionRequest) -> str | None:
        """It can do everything."""
        del request
        return None

    def __call__(self, request: AttentionRequest) -> tuple[Array, Array]:
        """See `Backend`."""
        q, kv = request.q, request.kv
        if q.size == 0:
            wide = request.accumulation_dtype
            return jnp.zeros(q.shape, q.dtype), jnp.zeros(q.shape[:3], wide)
        entries = kv[:, :0] if request.entries is None else request.entries
        # Tiles are whole rows, and the backward pass takes the same queries again.
        operands = Operands(
            row_major(planned(q)), kv, entries, request.sinks, request.visibility, request.indices, request.tainted
        )
        # Casts here, outside of the derivative rule, sum the gradient of what all devices of a mesh axis share.
        return _attention(Plan.of(request), reverse_only(_ONCE, varying(operands, operands)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(plan: Plan, operands: Operands) -> tuple[Array, Array]:
    return forward(plan, operands)


def _forward_rule(plan: Plan, operands: Operands) -> tuple[tuple[Array, Array], tuple[Operands, Array, Array]]:
    out, lse = forward(plan, first_only(_ONCE, operands))
    return (out, lse), (operands, out, lse)


def _backward_rule(
    plan: Plan, residuals: tuple[Operands, Array, Array], cotangents: tuple[Array, Array]
) -> tuple[Operands]:
    (operands, out, lse), cotangents = first_only(_ONCE, (residuals, cotangents))
    grads = backward(plan, operands, out, lse, *cotangents)
    narrow = operands.kv.dtype
    nothing: Any = None  # for all of an argument, integers here, that has no gradient
    return (
        Operands(
            grads.q,
            grads.kv.astype(narrow),
            grads.entries.astype(narrow),
            grads.sinks,
            nothing,
            nothing,
            nothing,
        ),
    )


_attention.defvjp(_forward_rule, _backward_rule)
