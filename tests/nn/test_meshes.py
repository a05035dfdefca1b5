"""Layers and modules on meshes with Explicit axes, what `jax.make_mesh` makes: the same as on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from foveal import (
    Compressor,
    Documents,
    GroupedLinear,
    LayerType,
    LightningIndexer,
    RopeConfig,
    Visibility,
    WindowLayout,
    rope_table,
)
from foveal.nn.parameters import Numerics
from tests.nn.layers import CONFIG, build
from tests.support.meshes import B, D, S, assert_same, explicit_spec, mesh_of, operands

layer_of = functools.cache(build)


def serve(layer, cache, x):
    """A prompt, what a server does with its cache, and tokens by `scan`."""
    out, cache = layer.prefill(cache, x[:, :13])
    cache = cache.rollback(2).reset(np.array([False, True])).reorder(np.array([1, 0]))

    def step(cache, x):
        out, cache = layer.decode(cache, x[:, None])
        return cache, out

    cache, outs = jax.lax.scan(step, cache, jnp.swapaxes(x[:, 16:20], 0, 1))
    return out, outs, cache, cache.recent_keys(3)


def train(layer, x, ids, cotangent):
    def loss(layer, x):
        out, indexer = layer(x, ids, return_indexer_loss=True)
        return jnp.sum(out * cotangent) + indexer.mean

    return jax.grad(loss, argnums=(0, 1))(layer, x)


@functools.cache
def layer_on_one_device(layer_type):
    layer, (x, ids) = layer_of(layer_type), hidden_states()
    cache = layer.init_cache(B, S, max_rollback=2)
    return jax.tree.map(np.asarray, (jax.jit(train)(layer, x, ids, x), jax.jit(serve)(layer, cache, x)))


def hidden_states():
    rng = np.random.default_rng(1)
    return rng.normal(size=(B, S, CONFIG.hidden_size)).astype(np.float32), operands()[0]["ids"]


BATCH, SEQUENCE = P("data"), P(None, "data")


def on(mesh, spec, *arrays):
    return [jax.device_put(array, NamedSharding(mesh, spec)) for array in arrays]


@pytest.mark.parametrize(
    ("kind", "spec", "layer_type"),
    [
        ("mixed", BATCH, LayerType.CSA),
        ("Explicit", SEQUENCE, LayerType.CSA),
        ("Explicit", SEQUENCE, LayerType.HCA),
    ],
)
def test_a_layer_trains_where_test_sharding_does_not(kind, spec, layer_type):
    (want, want_x), _ = layer_on_one_device(layer_type)
    layer, (x, ids) = layer_of(layer_type), on(mesh_of(kind), spec, *hidden_states())
    with jax.set_mesh(mesh_of(kind)):
        gradients, d_x = jax.jit(train)(layer, x, ids, x)
    assert_same((jax.tree.leaves(gradients), d_x), (jax.tree.leaves(want), want_x))
    assert explicit_spec(d_x) == P(*spec, *[None] * (3 - len(spec)))


@pytest.mark.parametrize("layer_type", [LayerType.CSA, LayerType.HCA])
def test_a_layer_serves(layer_type):
    mesh, layer = mesh_of("Explicit"), layer_of(layer_type)
    with jax.set_mesh(mesh):
        cache, x = on(mesh, BATCH, layer.init_cache(B, S, max_rollback=2), hidden_states()[0])
        out, outs, cache, keys = got = jax.jit(serve)(layer, cache, x)
    assert_same(got, layer_on_one_device(layer_type)[1])
    assert explicit_spec(out) == explicit_spec(keys) == P("data", None, None)
    assert explicit_spec(outs) == P(None, "data", None, None)
    assert {explicit_spec(leaf)[0] for leaf in jax.tree.leaves(cache)} == {"data"}


def test_hidden_states_that_are_not_sharded_under_a_mesh():
    """The mesh in context alone makes every new array one with Explicit axes."""
    layer, (x, ids) = layer_of(LayerType.CSA), hidden_states()
    want, _ = layer_on_one_device(LayerType.CSA)
    with jax.set_mesh(mesh_of("Explicit")):
        got = jax.jit(train)(layer, x, ids, x)
    assert_same(jax.tree.leaves(got), jax.tree.leaves(want))


def test_a_layer_without_jit_or_context():
    layer, x = layer_of(LayerType.SLIDING), jnp.asarray(hidden_states()[0])
    out = layer(jax.device_put(x, NamedSharding(mesh_of("Explicit"), P("data"))))
    np.testing.assert_allclose(out, jax.jit(layer)(x), rtol=1e-5, atol=1e-5)
    assert out.sharding == NamedSharding(mesh_of("Explicit"), P("data", None, None))


def test_modules_of_their_own():
    numerics, rngs = Numerics(jnp.float32, jnp.float32, None, 0.02), nnx.Rngs(0)
    compressor = Compressor(8, 4, ratio=4, overlap=True, epsilon=1e-6, numerics=numerics, rngs=rngs)
    indexer = LightningIndexer(CONFIG, numerics=numerics, rngs=rngs)
    grouped = GroupedLinear(16, 6, 2, numerics=numerics, rngs=rngs)

    def run(modules, a, latent):
        compressor, indexer, grouped = modules
        documents = Documents.from_segment_ids(a["ids"])
        layout = WindowLayout.of(documents, 4)
        table = rope_table(documents.positions, RopeConfig(10_000.0), 4)
        entries = compressor(a["kv"], layout, rope_table(layout.positions, RopeConfig(10_000.0), 4))
        x = jnp.tile(a["kv"], (1, 1, CONFIG.hidden_size // D))
        q, weights = indexer.queries(x, latent, rope_table(documents.positions, RopeConfig(10_000.0), 16))
        keys = indexer(x, layout, rope_table(layout.positions, RopeConfig(10_000.0), 16))
        chosen = indexer.select(q, weights, keys, Visibility(documents, 6, 4))
        return table, entries, q, weights, keys, chosen, grouped(a["q"])

    (arrays, specs), modules = operands(), (compressor, indexer, grouped)
    latent = np.random.default_rng(2).normal(size=(B, S, CONFIG.q_lora_rank)).astype(np.float32)
    mesh = mesh_of("Explicit")
    placed = {name: jax.device_put(array, NamedSharding(mesh, specs[name])) for name, array in arrays.items()}
    with jax.set_mesh(mesh):
        got = jax.jit(run)(modules, placed, jax.device_put(latent, NamedSharding(mesh, P("data"))))
    assert_same(got, jax.tree.map(np.asarray, jax.jit(run)(modules, arrays, latent)))
