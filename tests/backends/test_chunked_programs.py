"""`chunked` within programs of all kinds: with constants of theirs, and within `jax.shard_map`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from foveal.geometry import Documents, Visibility
from foveal.ops import core_attention
from foveal.testing.numerics import assert_close, assert_gradients_close
from tests.support.core_attention import both_ways, program_for_a_tpu, shapes
from tests.support.programs import equations

HEADS, DIM, RATIO, WINDOW = 4, 8, 4, 20
# rows and selected entries, for each way over the entries
WAYS = {"few": (130, None), "streamed": (600, None), "gathered": (600, 20), "masked": (600, 110), "both": (600, 60)}
every_way = pytest.mark.parametrize("way", WAYS)


def problem(way, batch, dtype):
    length, count = WAYS[way]
    rng = np.random.default_rng(length)
    shapes = (batch, length, HEADS, DIM), (batch, length, DIM), (batch, length // RATIO, DIM)
    arrays = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    if count is None:
        return arrays, None
    return arrays, jnp.asarray(rng.integers(-1, length // RATIO, (batch, length, count)), jnp.int32)


def attend(implementation, q, kv, entries, indices, sinks=None):
    visibility = Visibility(Documents.unpacked(q.shape[0], q.shape[1]), WINDOW, RATIO)
    return core_attention(
        q, kv, entries, visibility=visibility, indices=indices, sinks=sinks, return_lse=True,
        implementation=implementation,
    )  # fmt: skip


@every_way
@pytest.mark.parametrize("constant", [(1, 2), (0,)], ids=["keys", "queries"])
def test_bfloat16_arrays_may_be_constants_of_a_program(way, constant):
    """As a function that closes over them makes them: the compiler then works out ahead of time what it can."""
    arrays, indices = problem(way, 1, jnp.bfloat16)
    free = [array for n, array in enumerate(arrays) if n not in constant]

    def both(implementation, *free):
        def run(*free):
            rest = iter(free)
            q, kv, entries = (array if n in constant else next(rest) for n, array in enumerate(arrays))
            return attend(implementation, q, kv, entries, indices)[0]

        out, pull = jax.vjp(run, *free)
        return out, pull(jnp.ones_like(out))

    out, gradients = jax.jit(lambda *free: both("chunked", *free))(*free)
    want, want_gradients = jax.jit(lambda *free: both("dense", *free))(*free)
    assert_close(out, want, jnp.bfloat16)
    got, expected = ({str(n): g for n, g in enumerate(group)} for group in (gradients, want_gradients))
    assert_gradients_close(got, expected, jnp.bfloat16)


@every_way
def test_within_shard_map(way):
    """Batch and heads apart: the gradient of the keys, which all heads share, is summed over the devices."""
    (q, kv, entries), indices = problem(way, 2, jnp.float32)
    sinks = jnp.linspace(-1.0, 1.0, HEADS)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    heads, rows, sink = (PartitionSpec(*axes) for axes in (("data", None, "tensor"), ("data",), ("tensor",)))

    def both(run, q, kv, entries, sinks):
        results, pull = jax.vjp(lambda *args: run(*args[:3], indices, args[3]), q, kv, entries, sinks)
        return results, dict(zip(("q", "kv", "entries", "sinks"), pull(results), strict=True))

    apart = jax.shard_map(
        lambda *args: attend("chunked", *args),
        mesh=mesh,
        in_specs=(heads, rows, rows, PartitionSpec() if indices is None else rows, sink),
        out_specs=(heads, heads),
    )
    args = q, kv, entries, sinks
    (out, lse), gradients = jax.tree.map(np.asarray, jax.jit(lambda *a: both(apart, *a))(*args))
    (want, want_lse), want_gradients = jax.jit(lambda *a: both(lambda *b: attend("dense", *b), *a))(*args)
    assert_close(out, want, np.float32)
    assert_close(lse, want_lse, np.float32)
    assert_gradients_close(gradients, want_gradients, np.float32)


def test_queries_have_one_layout_on_tpus():
    """XLA would keep them in two, one for each pass: at 65536 rows of Flash's layer 4 GiB more."""
    args, visibility, _, cotangents = shapes(256, 2, 4, window=WINDOW, with_documents=False)
    run, args = functools.partial(both_ways, implementation="chunked"), (args, visibility, None, cotangents)
    on_a_tpu, here = program_for_a_tpu(run, *args), jax.make_jaxpr(run)(*args)
    assert "layout_constraint" in {e.primitive.name for e in equations(on_a_tpu.jaxpr)}
    assert "layout_constraint" not in {e.primitive.name for e in equations(here.jaxpr)}
