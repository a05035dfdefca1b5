"""Meshes with Explicit axes, what `jax.make_mesh` makes: every public function of arrays equals one device there."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from foveal import (
    AttentionConfig,
    CompressedAttention,
    Compressor,
    Documents,
    GroupedLinear,
    LayerType,
    LightningIndexer,
    RopeConfig,
    Visibility,
    WindowLayout,
    apply_rope,
    core_attention,
    grouped_projection,
    indexer_loss,
    indexer_recall,
    left_aligned,
    pool_windows,
    rope_table,
    select_entries,
    unpack,
)
from foveal.meshes import any_mesh
from foveal.nn.parameters import Numerics

MESHES = {"Explicit": ("Explicit", "Explicit"), "mixed": ("Explicit", "Auto")}
B, S, H, D, RATIO, WINDOW = 2, 24, 4, 8, 4, 6


@functools.cache
def mesh_of(kind: str) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2), ("data", "tensor"), axis_types=tuple(AxisType[name] for name in MESHES[kind]))


def explicit_spec(array: jax.Array) -> P:
    """The sharding in the array's type: one entry a dim."""
    return P(*(*jax.typeof(array).sharding.spec, *[None] * array.ndim)[: array.ndim])


# ------------------------------------------------------------------------------------------------------- the decorator


@any_mesh(like="x")
def doubled(x, scale=2.0, *, extra=None):
    assert not jax.sharding.get_abstract_mesh().explicit_axes
    flat = (x * scale).reshape(-1)  # merges sharded axes: no operation for Explicit ones
    buffer = jnp.zeros(flat.shape).at[jnp.arange(flat.size)].set(flat)
    return buffer.reshape(x.shape), extra


def test_make_mesh_makes_explicit_axes():
    """Why this module exists: the day JAX's default changes, these tests should say what they are for."""
    assert jax.make_mesh((2,), ("data",)).axis_types == (AxisType.Explicit,)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("in_context", [False, True])
def test_a_function_sees_automatic_axes_and_its_results_keep_the_sharding(jit, in_context):
    x, mesh = jnp.arange(48.0).reshape(4, 12), mesh_of("Explicit")
    placed = jax.device_put(x, NamedSharding(mesh, P("data", "tensor")))
    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        out, extra = (jax.jit(doubled) if jit else doubled)(placed, extra={"y": placed})
    np.testing.assert_array_equal(out, 2 * x)
    assert_same(extra, {"y": x})
    for array in jax.tree.leaves((out, extra)):
        assert explicit_spec(array) == P("data", "tensor")
        assert array.sharding == NamedSharding(mesh, P("data", "tensor"))


def test_what_is_not_an_array_passes_through():
    placed = jax.device_put(jnp.ones((2, 2)), NamedSharding(mesh_of("Explicit"), P("data")))
    marker = object()
    assert doubled(placed, extra=marker)[1] is marker
    assert doubled(jnp.ones(3), extra=marker)[1] is marker


def test_gradients_have_the_sharding_of_what_they_are_of():
    placed = jax.device_put(jnp.ones((4, 6)), NamedSharding(mesh_of("Explicit"), P("data", "tensor")))
    out, pull = jax.vjp(lambda x: doubled(x)[0], placed)
    (gradient,) = pull(out)
    assert explicit_spec(gradient) == P("data", "tensor")
    np.testing.assert_array_equal(gradient, np.full((4, 6), 4.0))


def test_results_take_the_leading_dims_that_the_axes_divide():
    @any_mesh(like="x", dims=2)
    def parts(x):
        return x[:, :3, 0], x[:1], x.sum(), x

    placed = jax.device_put(jnp.ones((4, 6, 2)), NamedSharding(mesh_of("Explicit"), P("data", "tensor")))
    specs = [explicit_spec(array) for array in parts(placed)]
    assert specs == [P("data", None), P(None, "tensor", None), P(), P("data", "tensor", None)]


def test_what_a_loop_carries_keeps_its_type():
    @any_mesh(like="x", keep="state")
    def step(state, x):
        return x + state["sum"][:, None], {"sum": state["sum"] + x.sum(axis=1)}

    def swapped(state, x):
        out, state = step(state, x)
        return state, out

    mesh = mesh_of("Explicit")
    x = jax.device_put(jnp.ones((3, 4, 2)), NamedSharding(mesh, P(None, "data")))
    for spec in (P("data"), P()):
        state = {"sum": jax.device_put(jnp.zeros(4), NamedSharding(mesh, spec))}
        last, rows = jax.jit(lambda state, x: jax.lax.scan(swapped, state, x))(state, x)
        np.testing.assert_array_equal(last["sum"], np.full(4, 6.0))
        assert explicit_spec(last["sum"]) == P(*spec, *[None] * (1 - len(spec)))
        assert explicit_spec(rows) == P(None, "data", None)


def test_within_shard_map_the_other_axes_become_automatic():
    mesh = mesh_of("Explicit")
    x = jax.device_put(jnp.arange(16.0).reshape(4, 4), NamedSharding(mesh, P("data", "tensor")))

    def local(x):
        assert x.shape == (2, 4)
        return doubled(x)[0]

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(local, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        np.testing.assert_array_equal(jax.jit(mapped)(x), 2 * np.arange(16.0).reshape(4, 4))


def test_an_error_within_leaves_the_context_as_it_was():
    placed = jax.device_put(jnp.ones((2, 2)), NamedSharding(mesh_of("Explicit"), P("data")))
    with jax.set_mesh(mesh_of("Explicit")):
        with pytest.raises(TypeError):
            doubled(placed, "two")  # pyright: ignore[reportArgumentType]
        assert jax.sharding.get_abstract_mesh().explicit_axes == ("data", "tensor")


# ------------------------------------------------------------------------------------------------- functions of arrays


def operands() -> tuple[dict[str, np.ndarray], dict[str, P]]:
    """Arrays for every public function, and how each lies on the mesh: batch over "data", heads over "tensor"."""
    rng = np.random.default_rng(0)
    floats = {
        "q": ((B, S, H, D), P("data", None, "tensor")),
        "kv": ((B, S, D), P("data")),
        "entries": ((B, S // RATIO, D), P("data")),
        "sinks": ((H,), P("tensor")),
        "index_q": ((B, S, H, D), P("data", None, "tensor")),
        "index_weights": ((B, S, H), P("data", None, "tensor")),
        "index_keys": ((B, S // RATIO, D), P("data")),
        "values": ((B, S, 2 * D), P("data", None, "tensor")),
        "bias": ((RATIO, 2 * D), P(None, "tensor")),
        "groups": ((2, H // 2 * D, 6), P("tensor")),
        "packed": ((S, D), P()),
    }
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, (shape, _) in floats.items()}
    specs = {name: spec for name, (_, spec) in floats.items()}
    integers = {
        "ids": np.array([[1] * 7 + [2] * 14 + [0] * 3, [1] * 24]),
        "ends": np.array([[0, 7, 21, 21], [0, 4, 8, 24]]),
        "lengths": np.array([24, 5]),
        "indices": rng.integers(-1, S // RATIO, size=(B, S, 3)),
    }
    arrays |= {name: values.astype(np.int32) for name, values in integers.items()}
    arrays["packed_ends"] = arrays["ends"][0]
    return arrays, specs | dict.fromkeys(integers, P("data")) | {"packed_ends": P()}


def everything(a: dict[str, jax.Array]) -> dict[str, object]:
    """Every public function of arrays, with gradients where it has some."""
    documents = Documents.from_segment_ids(a["ids"])
    visibility, layout = Visibility(documents, WINDOW, RATIO), WindowLayout.of(documents, RATIO)
    table = rope_table(documents.positions, RopeConfig(10_000.0), D)

    def attention(q, kv, entries, sinks, indices=None, implementation="chunked"):
        return core_attention(
            q,
            kv,
            entries,
            visibility=visibility,
            indices=indices,
            sinks=sinks,
            return_lse=True,
            implementation=implementation,
        )

    of_attention = a["q"], a["kv"], a["entries"], a["sinks"]
    dense = functools.partial(attention, implementation="dense")
    attended, pull = jax.vjp(attention, *of_attention)

    def loss(index_q, index_weights, index_keys, indices=None):
        return indexer_loss(
            index_q,
            index_weights,
            index_keys,
            q=a["q"],
            entries=a["entries"],
            lse=attended[1],
            sinks=a["sinks"],
            visibility=visibility,
            indices=indices,
        ).total

    of_index = a["index_q"], a["index_weights"], a["index_keys"]
    selected = select_entries(*of_index, visibility=visibility, top_k=3)
    return {
        "documents": [
            documents,
            Documents.from_cu_seqlens(a["ends"], S),
            Documents.from_lengths(a["lengths"], S),
            Documents.continuing(a["lengths"], a["lengths"] // 5, 4),
            (documents.positions, documents.is_padding),
        ],
        "visibility": [
            visibility,
            (visibility.window_range, visibility.entry_range, visibility.window_counts, visibility.entry_counts),
            (visibility.dense(), visibility.sees_slots(a["indices"]), visibility.tile(3, 5)),
            Visibility(Documents.from_segment_ids(a["ids"] * 0, alignment=4), WINDOW, 4).slot_document_start,
        ],
        "windows": [layout, layout.has_previous, layout.at_start(a["kv"]), layout.gather(a["values"], shift=-1)],
        "rows": [left_aligned(a["kv"], a["lengths"]), unpack(a["packed"], a["packed_ends"], max_length=14)],
        "attention": [attended, pull(attended), attention(*of_attention, a["indices"]), dense(*of_attention)],
        "indexer": [
            selected,
            jax.value_and_grad(loss, argnums=(0, 1, 2))(*of_index),
            jax.value_and_grad(loss, argnums=(0, 1, 2))(*of_index, selected),
            indexer_recall(
                selected,
                q=a["q"],
                entries=a["entries"],
                lse=attended[1],
                sinks=a["sinks"],
                visibility=visibility,
            ),
        ],
        "parts": [
            pool_windows(a["values"], a["values"], a["bias"], layout, overlap=True),
            (table, apply_rope(a["q"], table, inverse=True)),
            grouped_projection(a["q"], a["groups"]),
        ],
    }


@functools.cache
def everything_on_one_device() -> dict[str, object]:
    return jax.tree.map(np.asarray, jax.jit(everything)(operands()[0]))


def assert_same(got, want) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(("kind", "in_context"), [("Explicit", False), ("mixed", True)])
def test_every_function_equals_one_device(kind, in_context):
    mesh, (arrays, specs) = mesh_of(kind), operands()
    placed = {name: jax.device_put(array, NamedSharding(mesh, specs[name])) for name, array in arrays.items()}
    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        got = jax.jit(everything)(placed)
    assert_same(got, everything_on_one_device())
    if kind != "Explicit":
        return
    (out, lse), (d_q, d_kv, d_entries, d_sinks) = got["attention"][:2]
    by_head = P("data", None, "tensor")
    assert explicit_spec(out) == explicit_spec(d_q) == P(*by_head, None)
    assert explicit_spec(lse) == by_head
    assert explicit_spec(d_kv) == explicit_spec(d_entries) == P("data", None, None)
    assert explicit_spec(d_sinks) == P("tensor")
    assert explicit_spec(got["indexer"][0]) == P("data", None, None)
    pooled, (_, rotated), projected = got["parts"]
    assert explicit_spec(pooled) == P("data", None, None)
    assert explicit_spec(rotated) == P(*by_head, None)
    assert explicit_spec(projected) == by_head


@pytest.mark.parametrize("axis", ["batch", "sequence"])
def test_documents_from_ids_on_a_mesh_without_jit(axis):
    ids, mesh = operands()[0]["ids"], mesh_of("Explicit")
    spec = P("data", None) if axis == "batch" else P(None, "data")
    documents = Documents.from_segment_ids(jax.device_put(ids, NamedSharding(mesh, spec)))
    np.testing.assert_array_equal(documents.document_start, Documents.from_segment_ids(ids).document_start)
    assert explicit_spec(documents.positions) == spec


# -------------------------------------------------------------------------------------------------------------- layers

TINY = AttentionConfig.tiny()


@functools.cache
def layer_of(layer_type: LayerType) -> CompressedAttention:
    return CompressedAttention(TINY, layer_type=layer_type, rngs=nnx.Rngs(0))


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
    return rng.normal(size=(B, S, TINY.hidden_size)).astype(np.float32), operands()[0]["ids"]


BATCH, SEQUENCE = P("data"), P(None, "data")


def on(mesh, spec, *arrays):
    return [jax.device_put(array, NamedSharding(mesh, spec)) for array in arrays]


@pytest.mark.parametrize(
    ("kind", "spec", "layer_type"),
    [
        *(("Explicit", BATCH, layer_type) for layer_type in LayerType),
        ("mixed", BATCH, LayerType.CSA),
        ("Explicit", SEQUENCE, LayerType.CSA),
        ("Explicit", SEQUENCE, LayerType.HCA),
    ],
)
def test_a_layer_trains(kind, spec, layer_type):
    (want, want_x), _ = layer_on_one_device(layer_type)
    layer, (x, ids) = layer_of(layer_type), on(mesh_of(kind), spec, *hidden_states())
    with jax.set_mesh(mesh_of(kind)):
        gradients, d_x = jax.jit(train)(layer, x, ids, x)
    assert_same((jax.tree.leaves(gradients), d_x), (jax.tree.leaves(want), want_x))
    assert explicit_spec(d_x) == P(*spec, *[None] * (3 - len(spec)))


@pytest.mark.parametrize("layer_type", LayerType)
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
    layer, x = layer_of(LayerType.HCA), jnp.asarray(hidden_states()[0])
    out = layer(jax.device_put(x, NamedSharding(mesh_of("Explicit"), P("data"))))
    np.testing.assert_allclose(out, layer(x), rtol=1e-5, atol=1e-5)
    assert out.sharding == NamedSharding(mesh_of("Explicit"), P("data", None, None))


def test_modules_of_their_own():
    numerics, rngs = Numerics(jnp.float32, jnp.float32, None, 0.02), nnx.Rngs(0)
    compressor = Compressor(8, 4, ratio=4, overlap=True, epsilon=1e-6, numerics=numerics, rngs=rngs)
    indexer = LightningIndexer(TINY, numerics=numerics, rngs=rngs)
    grouped = GroupedLinear(16, 6, 2, numerics=numerics, rngs=rngs)

    def run(modules, a, latent):
        compressor, indexer, grouped = modules
        documents = Documents.from_segment_ids(a["ids"])
        layout = WindowLayout.of(documents, 4)
        table = rope_table(documents.positions, RopeConfig(10_000.0), 4)
        entries = compressor(a["kv"], layout, rope_table(layout.positions, RopeConfig(10_000.0), 4))
        x = jnp.tile(a["kv"], (1, 1, TINY.hidden_size // D))
        q, weights = indexer.queries(x, latent, rope_table(documents.positions, RopeConfig(10_000.0), 16))
        keys = indexer(x, layout, rope_table(layout.positions, RopeConfig(10_000.0), 16))
        chosen = indexer.select(q, weights, keys, Visibility(documents, WINDOW, 4))
        return table, entries, q, weights, keys, chosen, grouped(a["q"])

    (arrays, specs), modules = operands(), (compressor, indexer, grouped)
    latent = np.random.default_rng(2).normal(size=(B, S, TINY.q_lora_rank)).astype(np.float32)
    mesh = mesh_of("Explicit")
    placed = {name: jax.device_put(array, NamedSharding(mesh, specs[name])) for name, array in arrays.items()}
    with jax.set_mesh(mesh):
        got = jax.jit(run)(modules, placed, jax.device_put(latent, NamedSharding(mesh, P("data"))))
    assert_same(got, jax.tree.map(np.asarray, jax.jit(run)(modules, arrays, latent)))
