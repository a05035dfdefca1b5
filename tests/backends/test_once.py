"""Derivatives that there are not say so, and those that there are stay as they were."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from foveal.backends import once
from foveal.geometry import Documents, Visibility
from foveal.ops import core_attention, indexer_loss
from foveal.testing.numerics import assert_gradients_close
from tests.backends.splash_problem import STATIC

ADVICE = "once differentiable, in reverse mode; use implementation='dense'"


def attention(implementation, length=40, ratio=4):
    """A number from arrays of one shape each, and the arrays."""
    rng = np.random.default_rng(0)
    shapes = {"q": (1, length, 2, 4), "kv": (1, length, 4), "entries": (1, length // ratio, 4), "sinks": (2,)}
    arrays = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    visibility = Visibility(Documents.unpacked(1, length), 8, ratio)

    def run(arrays):
        out = core_attention(**arrays, visibility=visibility, return_lse=True, implementation=implementation)
        return sum(jnp.sum(jnp.sin(o)) for o in out)

    return run, arrays


def loss(length=40, ratio=4):
    """The same; the gradients of what the teacher looks at are zero."""
    _, arrays = attention("chunked", length, ratio)
    visibility = Visibility(Documents.unpacked(1, length), 8, ratio)
    rng = np.random.default_rng(1)
    shapes = {"index_q": (1, length, 2, 4), "index_weights": (1, length, 2), "index_keys": (1, length // ratio, 4)}
    shapes["lse"] = 1, length, 2
    arrays |= {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    del arrays["kv"]
    return lambda arrays: indexer_loss(**arrays, visibility=visibility).mean, arrays


PROBLEMS = {
    "chunked": (functools.partial(attention, "chunked"), f"^'chunked' is {ADVICE}"),
    "splash": (functools.partial(attention, STATIC), f"^Splash Attention is {ADVICE}"),
    "indexer_loss": (loss, "^indexer_loss is once differentiable, in reverse mode"),
}
every_problem = pytest.mark.parametrize(("problem", "sentence"), PROBLEMS.values(), ids=PROBLEMS)


def squared(tree):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))


SECOND = {
    "grad of grad": lambda f, a: jax.grad(lambda a: squared(jax.grad(f)(a)))(a),
    "hessian": lambda f, a: jax.hessian(f)(a),
    "jvp of grad": lambda f, a: jax.jvp(jax.grad(f), (a,), (a,)),
    "grad of jvp": lambda f, a: jax.grad(lambda t: jax.jvp(f, (a,), (t,))[1])(a),
    "cotangent of the gradient": lambda f, a: jax.grad(lambda c: squared(jax.vjp(f, a)[1](c)))(jnp.float32(1)),
}
FORWARD = {
    "jvp": lambda f, a: jax.jvp(f, (a,), (a,)),
    "jacfwd": lambda f, a: jax.jacfwd(f)(a),
    "linearize": lambda f, a: jax.linearize(f, a)[1](a),
}


@every_problem
@pytest.mark.parametrize("way", SECOND)
def test_second_derivatives_say_what_to_use(way, problem, sentence):
    """While the program is traced: under `jax.jit` too."""
    run, arrays = problem()
    with pytest.raises(NotImplementedError, match=sentence):
        jax.jit(functools.partial(SECOND[way], run)).trace(arrays) if way != "grad of jvp" else SECOND[way](run, arrays)


@every_problem
@pytest.mark.parametrize("way", FORWARD)
def test_forward_mode_says_what_to_use(way, problem, sentence):
    run, arrays = problem()
    with pytest.raises(NotImplementedError, match=sentence):
        FORWARD[way](run, arrays)
    if way != "jacfwd":  # there JAX itself is the first to refuse
        with pytest.raises(NotImplementedError, match=sentence):
            jax.jit(functools.partial(FORWARD[way], run)).lower(arrays)


def test_dense_has_them():
    run, arrays = attention("dense")
    curvature = jax.jit(jax.hessian(lambda s: run(arrays | {"sinks": s})))(arrays["sinks"])
    assert np.abs(curvature).max() > 1e-3
    assert np.isfinite(jax.jit(lambda a: jax.jvp(run, (a,), (a,))[1])(arrays))


def test_what_depends_on_a_gradient_once_is_no_second_derivative():
    """By a learning rate: the gradient it multiplies does not depend on it."""

    def after_a_step(implementation, rate):
        run, arrays = attention(implementation)
        step = jax.grad(run)(arrays)
        return run(jax.tree.map(lambda a, g: a - rate * g, arrays, step))

    got, want = (jax.jit(jax.grad(functools.partial(after_a_step, name)))(0.1) for name in ("chunked", "dense"))
    assert_gradients_close({"rate": got[None]}, {"rate": want[None]}, np.float32)


# -------------------------------------------------------------------------------------------------- first derivatives


def over_layers(remat):
    def of(run, arrays):
        def layer(arrays, _):
            return jax.tree.map(lambda a, g: a + 0.1 * jnp.tanh(run(arrays)) * g, arrays, arrays), None

        return squared(jax.lax.scan(jax.checkpoint(layer) if remat else layer, arrays, None, length=2)[0])

    return of


def three(arrays):
    return jax.tree.map(lambda a: jnp.stack([a, 2 * a, -a]), arrays)


def on_devices(run, arrays):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    both = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), arrays)

    def of(both):
        return jax.lax.psum(run(jax.tree.map(lambda a: a[0], both)), "data")

    return jax.grad(jax.shard_map(of, mesh=mesh, in_specs=P("data"), out_specs=P()))(both)


FIRST = {
    "grad": lambda run, a: jax.grad(run)(a),
    "grad of remat": lambda run, a: jax.grad(jax.checkpoint(run))(a),
    "vmap of grad": lambda run, a: jax.vmap(jax.grad(run))(three(a)),
    "grad of vmap": lambda run, a: jax.grad(lambda a: squared(jax.vmap(run)(a)))(three(a)),
    "grad of scan": lambda run, a: jax.grad(functools.partial(over_layers(remat=False), run))(a),
    "grad of scan of remat": lambda run, a: jax.grad(functools.partial(over_layers(remat=True), run))(a),
    "grad of one": lambda run, a: jax.grad(lambda q: run(a | {"q": q}))(a["q"]),
    "grad in shard_map": on_devices,
}


@pytest.mark.parametrize(
    ("way", "problem"),
    [(way, "chunked") for way in FIRST if "remat" not in way or "scan" in way] + [("grad of remat", "indexer_loss")],
)
def test_programs_of_first_derivatives_are_what_they_were(way, problem, monkeypatch):
    """The same before they are compiled; or as many instructions of each kind are left when they are."""
    run, arrays = PROBLEMS[problem][0]()

    def lowered():
        return jax.jit(functools.partial(FIRST[way], lambda arrays: run(arrays))).lower(arrays)

    def instructions(program):
        text = program.compile().as_text() or ""
        return collections.Counter(re.findall(r"^ .* = .*?\s([a-z-]+)\(", text, re.MULTILINE))

    with_it = lowered()
    monkeypatch.setattr(once, "_through", lambda function, operands: operands)
    without = lowered()
    assert "dot_general" in without.as_text()
    if with_it.as_text() != without.as_text():
        assert instructions(with_it) == instructions(without)
