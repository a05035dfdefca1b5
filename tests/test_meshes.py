"""Meshes with Explicit axes, what `jax.make_mesh` makes: every public function of arrays equals one device there."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import foveal
from foveal import Documents, RopeConfig, Visibility, WindowLayout
from foveal.meshes import any_mesh
from tests.support.meshes import RATIO, D, S, assert_same, explicit_spec, mesh_of, operands

WINDOW = 6

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
    x, mesh = np.arange(48, dtype=np.float32).reshape(4, 12), mesh_of("Explicit")
    placed = jax.device_put(x, NamedSharding(mesh, P("data", "tensor")))
    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        out, extra = (jax.jit(doubled) if jit else doubled)(placed, extra={"y": placed})
    np.testing.assert_array_equal(out, 2 * x)
    assert_same(extra, {"y": x})
    for array in jax.tree.leaves((out, extra)):
        assert explicit_spec(array) == P("data", "tensor")
        assert array.sharding == NamedSharding(mesh, P("data", "tensor"))


def test_what_is_not_an_array_passes_through():
    placed = jax.device_put(np.ones((2, 2), np.float32), NamedSharding(mesh_of("Explicit"), P("data")))
    marker = object()
    assert doubled(placed, extra=marker)[1] is marker
    assert doubled(np.ones(3, np.float32), extra=marker)[1] is marker


def test_gradients_have_the_sharding_of_what_they_are_of():
    placed = jax.device_put(np.ones((4, 6), np.float32), NamedSharding(mesh_of("Explicit"), P("data", "tensor")))
    out, pull = jax.vjp(lambda x: doubled(x)[0], placed)
    (gradient,) = pull(out)
    assert explicit_spec(gradient) == P("data", "tensor")
    np.testing.assert_array_equal(gradient, np.full((4, 6), 4.0))


def test_results_take_the_leading_dims_that_the_axes_divide():
    @any_mesh(like="x", dims=2)
    def parts(x):
        return x[:, :3, 0], x[:1], x.sum(), x

    placed = jax.device_put(np.ones((4, 6, 2), np.float32), NamedSharding(mesh_of("Explicit"), P("data", "tensor")))
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
    x = jax.device_put(np.ones((3, 4, 2), np.float32), NamedSharding(mesh, P(None, "data")))
    for spec in (P("data"), P()):
        state = {"sum": jax.device_put(np.zeros(4, np.float32), NamedSharding(mesh, spec))}
        last, rows = jax.jit(lambda state, x: jax.lax.scan(swapped, state, x))(state, x)
        np.testing.assert_array_equal(last["sum"], np.full(4, 6.0))
        assert explicit_spec(last["sum"]) == P(*spec, *[None] * (1 - len(spec)))
        assert explicit_spec(rows) == P(None, "data", None)


def test_within_shard_map_the_other_axes_become_automatic():
    mesh = mesh_of("Explicit")
    x = jax.device_put(np.arange(16, dtype=np.float32).reshape(4, 4), NamedSharding(mesh, P("data", "tensor")))

    def local(x):
        assert x.shape == (2, 4)
        return doubled(x)[0]

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(local, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        np.testing.assert_array_equal(jax.jit(mapped)(x), 2 * np.arange(16.0).reshape(4, 4))


def test_an_error_within_leaves_the_context_as_it_was():
    placed = jax.device_put(np.ones((2, 2), np.float32), NamedSharding(mesh_of("Explicit"), P("data")))
    with jax.set_mesh(mesh_of("Explicit")):
        with pytest.raises(TypeError):
            doubled(placed, "two")  # pyright: ignore[reportArgumentType]
        assert jax.sharding.get_abstract_mesh().explicit_axes == ("data", "tensor")


# ------------------------------------------------------------------------------------------------- functions of arrays


def everything(a: dict[str, jax.Array]) -> dict[str, object]:
    """Every public function of arrays, with gradients where it has some."""
    documents = Documents.from_segment_ids(a["ids"])
    visibility, layout = Visibility(documents, WINDOW, RATIO), WindowLayout.of(documents, RATIO)
    table = foveal.rope_table(documents.positions, RopeConfig(10_000.0), D)

    def attention(q, kv, entries, sinks, indices=None, implementation="chunked"):
        options = {"return_lse": True, "implementation": implementation}
        return foveal.core_attention(q, kv, entries, visibility=visibility, indices=indices, sinks=sinks, **options)

    of_attention = a["q"], a["kv"], a["entries"], a["sinks"]
    dense = functools.partial(attention, implementation="dense")
    attended, pull = jax.vjp(attention, *of_attention)
    teacher = {"q": a["q"], "entries": a["entries"], "lse": attended[1], "sinks": a["sinks"], "visibility": visibility}

    def loss(index_q, index_weights, index_keys, indices=None):
        return foveal.indexer_loss(index_q, index_weights, index_keys, **teacher, indices=indices).total

    of_index = a["index_q"], a["index_weights"], a["index_keys"]
    selected = foveal.select_entries(*of_index, visibility=visibility, top_k=3)
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
        "rows": [
            foveal.left_aligned(a["kv"], a["lengths"]),
            foveal.unpack(a["packed"], a["packed_ends"], max_length=14),
        ],
        "attention": [attended, pull(attended), attention(*of_attention, a["indices"]), dense(*of_attention)],
        "indexer": [
            selected,
            jax.value_and_grad(loss, argnums=(0, 1, 2))(*of_index),
            jax.value_and_grad(loss, argnums=(0, 1, 2))(*of_index, selected),
            foveal.indexer_recall(selected, **teacher),
        ],
        "parts": [
            foveal.pool_windows(a["values"], a["values"], a["bias"], layout, overlap=True),
            (table, foveal.apply_rope(a["q"], table, inverse=True)),
            foveal.grouped_projection(a["q"], a["groups"]),
        ],
    }


@functools.cache
def everything_on_one_device() -> dict[str, object]:
    return jax.tree.map(np.asarray, jax.jit(everything)(operands()[0]))


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
