"""Traced programs, equation by equation."""

import math
from collections.abc import Iterator

import jax
from jax.extend import core as jex


def _is_jaxpr(value: object) -> bool:
    return isinstance(value, jex.Jaxpr | jex.ClosedJaxpr)


def equations(jaxpr: jex.Jaxpr) -> Iterator[jex.JaxprEqn]:
    """Every equation of a program, those of loops, calls and kernels included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from equations(getattr(inner, "jaxpr", inner))


def array_sizes(jaxpr: jex.Jaxpr) -> list[int]:
    """Elements of every array that a program computes."""
    return [math.prod(getattr(v.aval, "shape", ())) for e in equations(jaxpr) for v in e.outvars]


def largest_in(program: jex.ClosedJaxpr) -> int:
    """Elements of the largest array that a program computes or carries along."""
    return max([*array_sizes(program.jaxpr), *(math.prod(getattr(c, "shape", ())) for c in program.consts)])


def largest_array(function, *args) -> int:
    """`largest_in` of a function's program."""
    return largest_in(jax.make_jaxpr(function)(*args))
