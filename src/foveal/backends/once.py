"""Guards of derivative rules that hold for one derivative, in reverse mode: anything else raises.

A `jax.custom_vjp` function passes its operands through `reverse_only`, and its rules compute with what `first_only`
returns. Both return their operands; compiled programs do not contain them. A forward rule must save its own operands,
not what `first_only` returns: JAX recognises only the former as arrays that it holds anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from foveal.typing import Array

T = TypeVar("T")


def reverse_only(sentence: str, operands: T) -> T:
    """Return the operands; forward-mode differentiation raises NotImplementedError with the sentence.

    Reverse mode transposes the tangents away: under `jax.jit` the modes are told apart when the program is lowered.
    """
    return _through(functools.partial(_reverse_only, sentence), operands)


def first_only(sentence: str, operands: T) -> T:
    """Return the operands; differentiating what depends on them raises NotImplementedError with the sentence."""
    return _through(functools.partial(_first_only, sentence), operands)


def _through(function: Any, operands: T) -> T:
    """Apply `function` to all floats at once: alone, one whose tangent is a known zero would look like forward mode."""
    leaves, structure = jax.tree.flatten(operands)
    floats = [n for n, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    for n, leaf in zip(floats, function([leaves[n] for n in floats]), strict=True):
        leaves[n] = leaf
    return jax.tree.unflatten(structure, leaves)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _first_only(sentence: str, arrays: list[Array]) -> list[Array]:
    del sentence
    return arrays


@_first_only.defjvp
def _first_only_jvp(sentence: str, primals: Any, tangents: Any) -> NoReturn:
    del primals, tangents
    raise NotImplementedError(sentence)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _reverse_only(sentence: str, arrays: list[Array]) -> list[Array]:
    del sentence
    return arrays


@_reverse_only.defjvp
def _reverse_only_jvp(
    sentence: str, primals: tuple[list[Array]], tangents: tuple[list[Array]]
) -> tuple[list[Array], list[Array]]:
    return primals[0], _TANGENTS.bind(*tangents[0], sentence=sentence)


def _raise(*_: Any, sentence: str) -> NoReturn:
    raise NotImplementedError(sentence)


def _transposed(cotangents: Sequence[Any], *_: Any, sentence: str) -> list[Any]:
    del sentence
    return list(cotangents)


def _batched(arrays: Sequence[Array], axes: Sequence[Any], *, sentence: str) -> tuple[list[Array], Sequence[Any]]:
    return _TANGENTS.bind(*arrays, sentence=sentence), axes


_TANGENTS = Primitive("reverse_only")
"""Linear: the identity, which raises when it is evaluated or lowered."""
_TANGENTS.multiple_results = True
_TANGENTS.def_impl(_raise)
_TANGENTS.def_abstract_eval(lambda *avals, sentence: list(avals))
ad.deflinear2(_TANGENTS, _transposed)
batching.primitive_batchers[_TANGENTS] = _batched
mlir.register_lowering(_TANGENTS, lambda _, *args, sentence: _raise(sentence=sentence))
