"""What is written is whole, and comes back to the bit."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from foveal import AttentionConfig, Dialect, LayerType, load_attention, save_attention
from foveal.checkpoint.files import CheckpointFiles
from foveal.testing.checkpoints import write_random_checkpoint
from foveal.testing.parameters import get_params, set_params
from tests.checkpoint.rewriting import assert_same, layer_of, layers_of
from tests.support.trees import assert_equal_leaves


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_was_saved_is_loaded_to_the_bit(dialect, dtype, ragged, tmp_path):
    layers = layers_of(ragged, getattr(jnp, dtype))
    save_attention(tmp_path / "saved", layers, dialect=dialect)
    assert_same(load_attention(tmp_path / "saved"), layers)  # in the narrowest dtype that holds it


@pytest.mark.parametrize(("scales", "stored"), [("e8m0", "BF16"), ("float32", "F32")])
def test_what_was_fp8_is_saved_as_it_was_loaded_and_is_not_quantised_again(scales, stored, ragged, tmp_path):
    write_random_checkpoint(tmp_path / "fp8", ragged, scales=scales)
    config = tmp_path / "fp8" / "config.json"
    released = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
    config.write_text(json.dumps(json.loads(config.read_text()) | released))
    layers = load_attention(tmp_path / "fp8")
    save_attention(tmp_path / "saved", layers)
    files = CheckpointFiles(tmp_path / "saved")
    assert {files.tensor(name).dtype for name in files.where} == {stored, "F32"}
    assert not any(name.endswith("scale") for name in files.where)
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    assert_same(load_attention(tmp_path / "saved"), layers)


def test_each_layer_keeps_its_dtypes(ragged, tmp_path):
    narrow, wide = layers_of(ragged, jnp.bfloat16), layers_of(ragged)
    save_attention(tmp_path / "saved", {0: narrow[0], 1: wide[1], 2: narrow[2]})
    assert_same(load_attention(tmp_path / "saved"), {0: narrow[0], 1: wide[1], 2: narrow[2]})
    # That a layer computes in another dtype is not written down.
    mixed = layers_of(ragged, jnp.bfloat16, jnp.float32)
    save_attention(tmp_path / "mixed", mixed)
    assert_same(load_attention(tmp_path / "mixed", dtype="bfloat16", param_dtype="float32"), mixed)


def test_numbers_of_every_kind_come_back(ragged, tmp_path):
    layer = layer_of(ragged, 0)
    odd = np.array([np.nan, np.inf, -np.inf, -0.0, np.finfo(np.float32).tiny / 3, 1 + 2**-23], np.float32)
    set_params(layer, get_params(layer) | {"sinks": odd})
    save_attention(tmp_path / "saved", {0: layer})
    assert_same(load_attention(tmp_path / "saved", layers=[0]), {0: layer})


def test_some_layers_under_their_own_indices(ragged, tmp_path):
    layers = layers_of(ragged)
    save_attention(tmp_path / "saved", {2: layers[2], 1: layers[1]})
    assert {name.split(".")[1] for name in CheckpointFiles(tmp_path / "saved").where} == {"1", "2"}
    assert_same(load_attention(tmp_path / "saved", layers=[1, 2], dtype="float32"), {1: layers[1], 2: layers[2]})


def test_files_are_no_larger_than_asked_for(ragged, tmp_path):
    layers, most = layers_of(ragged), 100_000
    save_attention(tmp_path / "saved", layers, shard_bytes=most)
    files = CheckpointFiles(tmp_path / "saved")
    assert len(files.files) > 5
    names = [f"model-{i:05}-of-{len(files.files):05}.safetensors" for i in range(1, len(files.files) + 1)]
    assert sorted(os.listdir(tmp_path / "saved")) == sorted([*names, "config.json", "model.safetensors.index.json"])
    total = 0
    for file in files.files:
        held = [files.tensor(name) for name, where in files.where.items() if where == file]
        size = sum(tensor.size for tensor in held)
        assert size <= most or len(held) == 1
        total += size
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total
    assert total == sum(value.nbytes for layer in layers.values() for value in get_params(layer).values())
    assert_same(load_attention(tmp_path / "saved", dtype="float32"), layers)


def test_sharded_arrays_are_gathered(ragged, tmp_path):
    layers = layers_of(ragged)
    save_attention(tmp_path / "one", layers)
    mesh = jax.make_mesh((2,), ("all",), axis_types=(jax.sharding.AxisType.Auto,))
    by_last_axis = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("all"))
    spread = load_attention(tmp_path / "one", layers=[0], sharding=by_last_axis)
    save_attention(tmp_path / "two", spread)
    assert_same(load_attention(tmp_path / "two", layers=[0], dtype="float32"), {0: layers[0]})


# ---------------------------------------------------------------------------------------------------- whole or nothing


@pytest.mark.parametrize(
    "failing",
    ["safetensors.numpy.save_file", "foveal.checkpoint.writing._write_json", "foveal.checkpoint.writing._sync"],
)
def test_nothing_is_left_of_what_fails(failing, ragged, tmp_path, monkeypatch):
    def fail(*args, **options):
        raise OSError("no space left")

    monkeypatch.setattr(failing, fail)
    with pytest.raises(OSError, match="no space left"):
        save_attention(tmp_path / "saved", layers_of(ragged))
    assert os.listdir(tmp_path) == []


def test_nothing_is_written_over(ragged, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "there", tmp_path / "file"):
        with pytest.raises(ValueError, match=r"path: expected nothing or an empty directory, got .*, which exists"):
            save_attention(path, layers_of(ragged))
    assert sorted(os.listdir(tmp_path)) == ["file", "there"]
    assert os.listdir(tmp_path / "there") == ["thesis.txt"]
    (tmp_path / "empty").mkdir()
    save_attention(tmp_path / "empty", layers_of(ragged))
    assert_same(load_attention(tmp_path / "empty", dtype="float32"), layers_of(ragged))


def test_a_path_may_be_a_link_or_a_dot(ragged, tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "later")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for path, place in (("../link", "real"), (tmp_path / "dangling", "later"), (".", "here"), ("below/", "here/below")):
        if path == "below/":  # the directory that one stands in has been replaced
            monkeypatch.chdir(tmp_path / "real")
            place = "real/below"
        save_attention(path, {0: layers_of(ragged)[0]})
        assert (tmp_path / place / "config.json").exists()
    assert sorted(os.listdir(tmp_path)) == ["dangling", "here", "later", "link", "real"]


def test_who_comes_second_is_told_so(ragged, tmp_path, monkeypatch):
    layers, replace = {0: layers_of(ragged)[0]}, os.replace

    def slow(source, target):
        monkeypatch.setattr("os.replace", replace)
        save_attention(tmp_path / "saved", layers)
        return replace(source, target)

    monkeypatch.setattr("os.replace", slow)
    with pytest.raises(ValueError, match=r"path: expected nothing there, but .*saved was created in the meantime"):
        save_attention(tmp_path / "saved", layers)
    assert os.listdir(tmp_path) == ["saved"]
    assert_same(load_attention(tmp_path / "saved", layers=[0]), layers)


def test_others_may_read_it_as_the_umask_says(ragged, tmp_path):
    before = os.umask(0o022)
    try:
        save_attention(tmp_path / "deeper" / "saved", layers_of(ragged))
    finally:
        os.umask(before)
    made = tmp_path / "deeper" / "saved"
    assert made.stat().st_mode & 0o777 == 0o755
    assert {file.stat().st_mode & 0o777 for file in made.iterdir()} == {0o644}


def test_bad_arguments(ragged, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    layers, other = layers_of(ragged), layers_of(AttentionConfig.tiny())
    whole = layer_of(ragged, 0)
    whole.q_a_proj.kernel = nnx.Param(jnp.zeros((160, 136), jnp.int8))
    cases = [
        ({}, {}, "layers: expected a mapping of indices to layers, got an empty one"),
        ([layers[0]], {}, "layers: expected a mapping of indices to layers, got list"),
        ({0: "layer"}, {}, r"layers\[0\]: expected a CompressedAttention, got str"),
        ({0: layers[0], 1: other[1]}, {}, r"layers\[1\]: expected a layer of the same config as the others"),
        ({0: layers[1]}, {}, r"layers\[0\]: expected a sliding_attention layer, got a compressed_sparse_attention"),
        ({7: layers[1]}, {}, r"layer_index: expected 0 <= layer_index < 3"),
        ({0: whole}, {}, r"layers\[0\]\.q_a_proj\.kernel: expected one of float32, .*, got int8"),
        (layers, {"dialect": "hf"}, "dialect: expected one of 'deepseek', 'transformers', .*, got 'hf'"),
        (layers, {"shard_bytes": 0}, "shard_bytes: expected an int >= 1, got 0"),
        (layers, {"shard_bytes": 1e9}, "shard_bytes: expected an int >= 1, got 1000000000.0"),
    ]
    for given, options, message in cases:
        with pytest.raises(ValueError, match=message):
            save_attention(tmp_path / "saved", given, **options)
    assert os.listdir(tmp_path) == []


# --------------------------------------------------------------------------------------------------------------- Orbax


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Orbax closes its event loops when the process ends
def test_orbax_keeps_the_state_of_training(ragged, tmp_path):
    """Parameters and optimizer, of a layer that was loaded."""
    import optax

    save_attention(tmp_path / "saved", layers_of(ragged, jnp.bfloat16))
    layer = load_attention(tmp_path / "saved", layers=[1])[1]
    optimizer = nnx.Optimizer(layer, optax.adam(1e-3), wrt=nnx.Param)
    state = nnx.state((layer, optimizer))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "training", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "training", jax.tree.map(ocp.utils.to_shape_dtype_struct, state))
    assert_equal_leaves(restored, state)
    assert layer.layer_type is LayerType.CSA
