"""Weights arrive where they belong, exactly, whatever a checkpoint calls them and however it stores them."""

import dataclasses
import json
import re
import sys
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from flax.core.spmd import logical_axis_rules
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from foveal import CheckpointError, CompressedAttention, Dialect, LayerType, load_attention
from foveal.checkpoint.files import StoredTensor
from foveal.checkpoint.find import find_attention
from foveal.checkpoint.load import load_layer
from foveal.checkpoint.names import ROWS
from foveal.extras import missing
from foveal.testing.checkpoints import expected_params, write_random_checkpoint
from foveal.testing.generators import random_hidden
from foveal.testing.parameters import get_params
from tests.checkpoint.rewriting import assert_same, rewrite, tensors_of

STORED: dict[str, dict[str, Any]] = {
    "released": {"weights": "fp8", "scales": "e8m0"},
    "base": {"weights": "fp8", "scales": "float32"},
    "bfloat16": {"weights": "bfloat16"},
    "float32": {"weights": "float32"},
}
FORWARD = nnx.jit(CompressedAttention.__call__)
AXES = (
    ("embed", "data"),
    *((name, "tensor") for name in ("heads", "o_groups", "index_heads")),
    *((name, None) for name in ("q_lora", "kv", "window", "norm", "group_heads", "o_lora")),
)


# --------------------------------------------------------------------------------------------------- names and numbers


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dialect", Dialect)
def test_every_dialect_and_storage_gives_the_numbers_that_were_written(dialect, stored, written, ragged):
    layers = load_attention(written(dialect=dialect, **STORED[stored]))
    assert [layer.layer_type for layer in layers.values()] == list(ragged.layer_types)
    for index, layer in layers.items():
        want = expected_params(ragged, index, **STORED[stored])
        got = get_params(layer)
        assert got.keys() == want.keys()
        for name, value in got.items():
            # Kernels in the narrowest dtype that holds them, which the base models' are too wide for; all else float32.
            narrow = name.endswith("kernel") and stored in ("released", "bfloat16")
            assert value.dtype == (jnp.bfloat16 if narrow else jnp.float32), name
            np.testing.assert_array_equal(np.asarray(value, np.float32), want[name], err_msg=name)


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda name: re.sub(r"\.(scale|weight_scale_inv)$", ".scale", name), id=".scale"),
        pytest.param(lambda name: re.sub(r"\.scale$", ".weight_scale_inv", name), id=".weight_scale_inv"),
        pytest.param(lambda name: re.sub(r"^(model\.)?", lambda m: "" if m[0] else "model.", name), id="model."),
    ],
)
def test_scales_go_by_either_name_and_the_models_prefix_may_be_there_or_not(change, dialect, written, tmp_path):
    renamed = {change(name): array for name, array in tensors_of(written(dialect=dialect)).items()}
    rewrite(written(dialect=dialect), tmp_path / "renamed", renamed)
    assert_same(load_attention(tmp_path / "renamed"), load_attention(written()))


def test_kernels_that_were_left_unquantised_are_taken_as_they_are(written, ragged, tmp_path):
    """Some write the grouped output projection so: beside FP8 with its scales it has none, and needs none."""
    name, arrays = "layers.0.attn.wo_a", tensors_of(written())
    plain = tensors_of(written(weights="float32"))[name + ".weight"]
    del arrays[name + ".scale"]
    for dtype, widest in ((ml_dtypes.bfloat16, "bfloat16"), (np.float32, "float32"), (np.float16, "float32")):
        kernel = plain.astype(dtype)
        rewrite(written(), tmp_path / "mixed", arrays | {name + ".weight": kernel})
        params = get_params(load_attention(tmp_path / "mixed", layers=[0])[0])
        assert {value.dtype.name for key, value in params.items() if key.endswith("kernel")} == {widest}
        want = expected_params(ragged, 0) | {
            "o_a_proj.kernel": kernel.astype(np.float32).reshape(2, 80, 144).swapaxes(1, 2)
        }
        for key, value in params.items():
            np.testing.assert_array_equal(np.asarray(value, np.float32), want[key], err_msg=key)


def test_what_is_not_attention_is_passed_over(written, tmp_path):
    arrays = tensors_of(written())
    others = ["mtp.0.attn.wq_a.weight", "layers.0.attn_norm.weight", "embed.weight", "layers.1.ffn.gate.weight"]
    path = tmp_path / "with others"
    rewrite(written(), path, arrays | {name: np.zeros((3, 5), np.float32) for name in others})
    assert_same(load_attention(path), load_attention(written()))


@pytest.mark.parametrize("layer", range(3), ids=[str(layer_type) for layer_type in LayerType])
def test_each_tensor_moves_one_parameter_and_the_output(layer, written, ragged, tmp_path):
    """No tensor is ignored, none is used twice, and none goes where it makes no difference."""
    arrays = tensors_of(written())
    mine = {name: array for name, array in arrays.items() if name.startswith(f"layers.{layer}.")}
    # float32 activations: no change is lost to rounding.
    base = load_attention(written(), layers=[layer], dtype="float32", param_dtype="bfloat16")[layer]
    x = jnp.asarray(random_hidden(0, 1, 64, ragged.hidden_size))
    output, params = FORWARD(base, x), get_params(base)
    for name, array in mine.items():
        turned = array.ravel()[::-1].reshape(array.shape).copy()
        if array.dtype.name == "float8_e8m0fnu":  # one block doubled: all scales may be equal
            turned = array.copy()
            turned.view(np.uint8).flat[0] += 1
        rewrite(written(), tmp_path / "changed", mine | {name: turned})
        changed = load_attention(tmp_path / "changed", layers=[layer], dtype="float32", param_dtype="bfloat16")[layer]
        moved = [key for key, value in get_params(changed).items() if not np.array_equal(value, params[key])]
        assert len(moved) == 1, name
        assert np.abs(FORWARD(changed, x) - output).max() > 1e-3, name


# ------------------------------------------------------------------------------------------------------------- options


def test_the_dtypes_asked_for(written):
    mixed = load_attention(written(), layers=[1], dtype="bfloat16", param_dtype="float32")[1]
    wide = load_attention(written(), layers=[1], dtype="float32")[1]
    assert (mixed.dtype, wide.dtype) == (jnp.bfloat16, jnp.float32)
    for layer in (mixed, wide):
        assert {value.dtype.name for value in get_params(layer).values()} == {"float32"}
    narrow = get_params(load_attention(written(), layers=[1], dtype="bfloat16")[1])
    kept = {name for name, value in narrow.items() if value.dtype == jnp.float32}
    assert kept == {name for name in narrow if name.endswith(("scale", "sinks", "position_bias"))}


def test_a_layer_is_as_the_class_makes_it(written, ragged):
    """Attributes, axes' names and structure: it can be trained, sharded and saved as any other."""
    loaded = load_attention(written(), layers=[1], dtype="float32", precision="highest")[1]
    made = CompressedAttention(ragged, 1, precision="highest", rngs=nnx.Rngs(0))
    (graph, state), (made_graph, made_state) = nnx.split(loaded), nnx.split(made)
    assert graph == made_graph
    assert nnx.get_partition_spec(state) == nnx.get_partition_spec(made_state)
    assert loaded.precision == "highest"
    # Whatever the dtype is spelled like, so that nothing is traced twice.
    for dtype in (jnp.float32, np.float32, np.dtype("float32")):
        again = load_attention(written(), layers=[1], dtype=dtype, precision="highest")[1]
        assert nnx.split(again)[0] == made_graph


def test_only_what_is_needed_is_read(written, ragged, tmp_path, monkeypatch):
    path, read = tmp_path / "sharded", []
    write_random_checkpoint(path, ragged, shard_bytes=60_000)
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {file for name, file in index.items() if name.startswith("layers.2.")}
    assert needed < set(index.values())
    for file in set(index.values()) - needed:
        (path / file).unlink()
    original = StoredTensor.read
    monkeypatch.setattr(StoredTensor, "read", lambda self: read.append(self.name) or original(self))
    assert_same(load_attention(path, layers=[2]), load_attention(written(), layers=[2]))
    assert sorted(read[: len(read) // 2]) == sorted(name for name in index if name.startswith("layers.2."))


def test_a_directory_an_index_a_file_or_files_without_an_index(written, ragged, tmp_path):
    path = tmp_path / "sharded"
    write_random_checkpoint(path, ragged, shard_bytes=100_000)
    want = load_attention(written())
    assert_same(load_attention(path), want)
    assert_same(load_attention(str(path)), want)
    assert_same(load_attention(path / "model.safetensors.index.json"), want)
    (path / "model.safetensors.index.json").unlink()
    assert len(list(path.glob("*.safetensors"))) > 2
    assert_same(load_attention(path), want)
    assert_same(load_attention(written() / "model.safetensors"), want)


def test_a_config_of_ones_own(written, ragged, tmp_path):
    path = tmp_path / "no config"
    rewrite(written(), path, tensors_of(written()))
    (path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"expected a config\.json beside the files, or a config, got neither"):
        load_attention(path)
    assert_same(load_attention(path, ragged), load_attention(written()))


@pytest.mark.usefixtures("unchecked_annotations")
def test_layers_may_be_numbers_of_numpy(written):
    layers: Any = np.array([2, 0])
    assert [(type(layer), layer) for layer in load_attention(written(), layers=layers)] == [(int, 0), (int, 2)]
    assert load_attention(written(), layers=()) == {}


def test_links_are_followed(written, tmp_path):
    """The Hugging Face cache is a directory of links to files elsewhere."""
    for file in written().iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert_same(load_attention(tmp_path), load_attention(written()))


# -------------------------------------------------------------------------------------------------- memory and placing


def test_memory_is_the_result_and_one_layer(ragged, tmp_path):
    """Of float32 weights bfloat16 ones: all of the file in memory would be twice the result."""
    config = dataclasses.replace(ragged, hidden_size=1024, layer_types=(LayerType.SLIDING,) * 8)
    write_random_checkpoint(tmp_path / "large", config, weights="float32")
    stored = sum(array.nbytes for array in tensors_of(tmp_path / "large").values())
    load_attention(tmp_path / "large", layers=[0], dtype="bfloat16")  # what is made once is made
    tracemalloc.start()
    try:
        layers = load_attention(tmp_path / "large", dtype="bfloat16")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    result = sum(value.nbytes for layer in layers.values() for value in get_params(layer).values())
    assert stored > 1.9 * result
    # Of a layer the file's array, the module's, and room for the objects around them.
    assert peak < result + 2 * stored / 8 + 500_000


every_kind_of_axes = pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto], ids=lambda a: a.name)


@every_kind_of_axes
@pytest.mark.parametrize("layer", range(3))
def test_a_mesh_places_every_parameter_by_its_axes(layer, axis_type, written):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(axis_type,) * 2)
    with logical_axis_rules(AXES):
        placed = load_attention(written(), layers=[layer], sharding=mesh)[layer]
        specs = dict(nnx.to_flat_state(nnx.get_partition_spec(nnx.state(placed, nnx.Param))))
    for path, spec in specs.items():
        value = get_params(placed)[".".join(map(str, path))]
        assert value.sharding.is_equivalent_to(NamedSharding(mesh, spec.get_value()), value.ndim), path
    assert get_params(placed)["q_b_proj.kernel"].sharding.shard_shape((136, 288)) == (136, 144)
    assert get_params(placed)["o_a_proj.kernel"].sharding.shard_shape((2, 144, 80)) == (1, 144, 80)
    assert_same({layer: placed}, load_attention(written(), layers=[layer]))


@every_kind_of_axes
def test_a_layer_placed_on_a_mesh_runs_there(axis_type, written):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(axis_type,) * 2)
    x = jnp.asarray(random_hidden(0, 2, 40, 160))
    (want,) = (FORWARD(layer, x) for layer in load_attention(written(), layers=[1], dtype="float32").values())
    with logical_axis_rules(AXES):
        placed = load_attention(written(), layers=[1], dtype="float32", sharding=mesh)[1]
    with jax.set_mesh(mesh):
        got = FORWARD(placed, jax.device_put(x, NamedSharding(mesh, P("data"))))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    if axis_type is AxisType.Explicit:  # on Auto axes the compiler says where results lie
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 3)


@every_kind_of_axes
def test_a_sharding_places_all(axis_type, written):
    everywhere = NamedSharding(jax.make_mesh((8,), ("all",), axis_types=(axis_type,)), P())
    placed = load_attention(written(), layers=[0], sharding=everywhere)
    assert all(value.sharding == everywhere for value in get_params(placed[0]).values())
    assert_same(placed, load_attention(written(), layers=[0]))


def test_without_safetensors_it_says_what_to_install(written, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=re.escape(missing("safetensors", "checkpoint"))):
        load_attention(written())


def test_weights_swapped_in_the_table_would_show(written, monkeypatch):
    """What these tests compare with does not come out of a wrong table."""
    want = load_attention(written(dialect="transformers"))
    rows = {row.path: row for row in ROWS}
    kv, gate = rows["compressor.kv_proj.kernel"], rows["compressor.gate_proj.kernel"]
    swapped = {kv.path: dataclasses.replace(kv, path=gate.path), gate.path: dataclasses.replace(gate, path=kv.path)}
    wrong = tuple(swapped.get(row.path, row) for row in ROWS)
    monkeypatch.setattr("foveal.checkpoint.find.rows_of", lambda kind: tuple(row for row in wrong if row.is_in(kind)))
    with pytest.raises(AssertionError, match="compressor"):
        assert_same(load_attention(written(dialect="transformers")), want)


def test_a_file_that_shrinks_while_it_is_read(written, tmp_path, ragged):
    path = tmp_path / "shrinks"
    write_random_checkpoint(path, ragged)
    found = find_attention(path)
    file = path / "model.safetensors"
    with open(file, "r+b") as opened:
        opened.truncate(file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: layers\..*: expected \d+ bytes, got \d+"):
        [load_layer(found, layer) for layer in found.layers]


@every_kind_of_axes
def test_a_mesh_without_a_rule_for_an_axis_and_one_that_does_not_divide(axis_type, written):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    no_rule = r"sharding: expected a rule for every axis \(logical_axis_rules\), got Resource axis: "
    with logical_axis_rules((("embed", "x"),)), pytest.raises(ValueError, match=no_rule):
        load_attention(written(), layers=[0], sharding=mesh)
    uneven = NamedSharding(jax.make_mesh((7,), ("x",), axis_types=(axis_type,)), P("x"))
    with pytest.raises(ValueError, match=r"sharding: q_a_proj\.kernel, \[160, 136\]: "):
        load_attention(written(), layers=[0], sharding=uneven)
