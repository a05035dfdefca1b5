"""Heads over one mesh axis, the batch over another: the same numbers, and no operand of attention gathered."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core.spmd import logical_axis_rules
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from foveal import Documents
from foveal.geometry import Visibility
from foveal.ops import core_attention
from foveal.testing.generators import random_segment_ids
from foveal.testing.numerics import assert_close, assert_gradients_close
from foveal.testing.parameters import get_params
from tests.nn.layers import AXES, CONFIG, arrays, build, every_layer_type, problem, pure_layer

CHANGES: dict[str, Any] = {"num_attention_heads": 8, "o_groups": 4, "index_n_heads": 4}
RULES = dict.fromkeys(AXES) | dict.fromkeys(["heads", "o_groups", "index_heads"], "tensor")


# Explicit axes are what `jax.make_mesh` makes unless told otherwise.
on_each_kind_of_mesh = pytest.mark.parametrize("axis_type", ["Explicit", "Auto"])


@functools.cache
def mesh_of(axis_type: str) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType[axis_type],) * 2)


def collectives(hlo: str, kind: str) -> list[str]:
    """The lines of a compiled program that start such an operation."""
    return [line.strip() for line in hlo.splitlines() if re.search(rf"\s{kind}(-start)?\(", line)]


# --------------------------------------------------------------------------------------------------------------- layer


@functools.cache
def sharded(layer_type, axis_type):
    """A layer on a mesh, its parameters placed by their axes' names, and a problem for it."""
    params, x, cotangent = problem(layer_type, 1, **CHANGES)
    layer = build(layer_type, params, dataclasses.replace(CONFIG, **CHANGES))
    state = nnx.state(layer, nnx.Param)
    with logical_axis_rules(tuple(RULES.items())):
        shardings = nnx.get_named_sharding(state, mesh_of(axis_type))
    nnx.update(layer, jax.device_put(state, shardings))
    return layer, params, x, random_segment_ids(1, *x.shape[:2], max_document=30), cotangent


def over_data(axis_type, *values) -> Any:
    return jax.device_put(values, NamedSharding(mesh_of(axis_type), P("data")))


@on_each_kind_of_mesh
@every_layer_type
def test_the_layer_computes_what_it_does_on_one_device(layer_type, axis_type):
    """And gathers neither queries nor keys, whatever the projections around attention make XLA gather."""
    layer, params, x, ids, cotangent = sharded(layer_type, axis_type)
    placed = {name: value.sharding.shard_shape(value.shape) for name, value in get_params(layer).items()}
    assert placed["q_b_proj.kernel"] == (32, 8 * 32 // 4)
    assert placed["o_a_proj.kernel"] == (1, 2 * 32, 16)
    assert placed["sinks"] == (2,)
    assert placed["kv_proj.kernel"] == params["kv_proj.kernel"].shape

    def loss(layer, x, ids, cotangent):
        output = layer(x, ids)
        return jnp.sum(output * cotangent), output

    step = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    with jax.set_mesh(mesh_of(axis_type)):
        arguments = layer, *over_data(axis_type, x, ids, cotangent)
        compiled = step.lower(*arguments).compile()
        (_, got), (gradients, x_gradient) = compiled(*arguments)
    want, want_gradients = pure_layer(layer_type, **CHANGES).vjp(params, x, ids, cotangent)
    assert_close(got, want, np.float32)
    assert_gradients_close({**arrays(gradients), "x": x_gradient}, want_gradients, np.float32)

    batch, heads, dim = x.shape[0], layer.config.num_attention_heads, layer.config.head_dim
    for line in collectives(compiled.as_text() or "", "all-gather"):
        for shape in result_shapes(line):
            # Of all batch rows or of all heads, at full length or a tile's. An index key is as wide as a key here.
            assert (shape[0], shape[-1]) != (batch, dim), line
            assert shape[-2:] != (heads, dim), line
            assert len(shape) < 3 or shape[-1] != heads * dim, line


@pytest.mark.slow
@on_each_kind_of_mesh
@every_layer_type
def test_a_prompt_and_tokens_through_a_cache(layer_type, axis_type):
    layer, params, x, ids, cotangent = sharded(layer_type, axis_type)
    want, _ = pure_layer(layer_type, **CHANGES).vjp(params, x, np.ones_like(ids), cotangent)
    step, outputs = nnx.jit(lambda layer, cache, x: layer.prefill(cache, x)), []
    with jax.set_mesh(mesh_of(axis_type)):
        (cache,) = over_data(axis_type, layer.init_cache(*x.shape[:2]))
        for chunk in (x[:, :64], x[:, 64:65], x[:, 65:66], x[:, 66:67]):
            out, cache = step(layer, cache, *over_data(axis_type, chunk))
            outputs.append(out)
    assert_close(np.concatenate(outputs, axis=1), want, np.float32)


def result_shapes(line: str) -> list[tuple[int, ...]]:
    """Shapes of what an operation of a compiled program returns."""
    result = re.split(r"\s[a-z-]+\(", line.split("=", 1)[1], maxsplit=1)[0]
    return [tuple(map(int, sizes.split(","))) for sizes in re.findall(r"\w\[([\d,]+)\]", result)]


# ------------------------------------------------------------------------------------------------------ core attention

# ratio, selected: with 512 tokens each way that entries are scored
CORES = {
    "HCA, few entries": (8, None),
    "HCA, many entries": (4, None),
    "CSA, few selected": (4, 16),
    "CSA, many selected": (4, 80),
    "CSA, few entries": (8, 5),
}


@on_each_kind_of_mesh
@pytest.mark.parametrize("core", CORES)
def test_core_attention_gathers_nothing(core, axis_type):
    """Heads and batch rows are independent but for sums: of a key's gradient over heads, of a sink's over rows."""
    (ratio, selected), batch, length, heads, dim = CORES[core], 2, 512, 8, 16

    def of(shape, *axes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh_of(axis_type), P(*axes)))

    q = of((batch, length, heads, dim), "data", None, "tensor", None)
    args = q, of((batch, length, dim), "data"), of((batch, length // ratio, dim), "data"), of((heads,), "tensor")
    lse = of((batch, length, heads), "data", None, "tensor")
    ids = of((batch, length), "data", dtype=jnp.int32)
    indices = None if selected is None else of((batch, length, selected), "data", dtype=jnp.int32)

    def both_ways(args, ids, indices, cotangents):
        visibility = Visibility(Documents.from_segment_ids(ids), 24, ratio)

        def run(q, kv, entries, sinks):
            return core_attention(q, kv, entries, visibility=visibility, indices=indices, sinks=sinks, return_lse=True)

        results, pull = jax.vjp(run, *args)
        return results, pull(cotangents)

    compiled = jax.jit(both_ways).lower(args, ids, indices, (q, lse)).compile()
    hlo = compiled.as_text() or ""
    assert collectives(hlo, "all-reduce")  # so the program was split, and its text is read
    assert collectives(hlo, "all-gather") == []
    assert collectives(hlo, "all-to-all") == []
    (out, _), (d_q, d_kv, d_entries, d_sinks) = compiled.output_shardings
    for like_q in (out, d_q):
        assert like_q.shard_shape(q.shape) == (1, length, 2, dim)
    assert d_kv.shard_shape(args[1].shape)[0] == d_entries.shard_shape(args[2].shape)[0] == 1
    assert d_sinks.shard_shape((heads,)) == (2,)
