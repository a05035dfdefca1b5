"""What is wrong with a checkpoint's files and config is said all at once and by name; so is what is wrong in a call."""

import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import pytest

from foveal import AttentionConfig, CheckpointError, load_attention
from foveal.checkpoint.files import INDEX, SINGLE
from foveal.testing.checkpoints import write_random_checkpoint
from tests.checkpoint.faulty import CONFIG, L0, L2, WKV, WQ_A, Checkpoint, Tensors, problems_of, tensors_of, zeros
from tests.checkpoint.hostile import framed, packed

pytestmark = pytest.mark.usefixtures("unchecked_annotations")


# --- Files -----------------------------------------------------------------------------------------------------------

SHARD = [f"model-0000{i + 1}-of-00003.safetensors" for i in range(3)]


@pytest.fixture
def sharded(tmp_path: pathlib.Path) -> pathlib.Path:
    """A file for each layer, by an index; their names are in `SHARD`."""
    path = tmp_path / "sharded"
    write_random_checkpoint(path, CONFIG)
    tensors = tensors_of(path / SINGLE)
    (path / SINGLE).unlink()
    for layer, file in enumerate(SHARD):
        (path / file).write_bytes(packed({n: t for n, t in tensors.items() if n.startswith(f"layers.{layer}.")}))
    relist(path, lambda listed: {name: SHARD[int(name.split(".")[1])] for name in listed})
    return path


def relist(path: pathlib.Path, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] = change(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


def test_a_listed_file_that_is_not_there_is_said_once_and_blamed_for_nothing_else(sharded: pathlib.Path) -> None:
    assert list(load_attention(sharded)) == [0, 1, 2]
    (sharded / SHARD[1]).unlink()
    assert problems_of(sharded) == [f"{SHARD[1]}: there is no such file"]


def test_a_file_of_kernels_that_is_not_there_does_not_make_their_scales_unexpected(
    checkpoint: Checkpoint, fp8: Tensors
) -> None:
    path = checkpoint({WQ_A + ".weight": None})
    listed = dict.fromkeys(fp8, SINGLE) | {WQ_A + ".weight": "other.safetensors"}
    (path / INDEX).write_text(json.dumps({"weight_map": listed}))
    assert problems_of(path) == ["other.safetensors: there is no such file"]


def test_damaged_files_and_wrong_tensors_are_said_together(sharded: pathlib.Path) -> None:
    (sharded / SHARD[0]).unlink()
    (sharded / SHARD[1]).write_bytes((sharded / SHARD[1]).read_bytes()[:-1])
    third = {name: held for name, held in tensors_of(sharded / SHARD[2]).items() if name != L2 + "attn_sink"}
    (sharded / SHARD[2]).write_bytes(packed(third | {L2 + "q_norm.weight": zeros("I32", 32)}))
    relist(sharded, lambda listed: {name: file for name, file in listed.items() if name != L2 + "attn_sink"})
    problems = problems_of(sharded)
    assert {f"{SHARD[0]}: there is no such file", L2 + "attn_sink: missing"} <= set(problems)
    assert L2 + "q_norm.weight: expected BF16, F16, F32, got I32" in problems
    assert any(problem.startswith(f"{SHARD[1]}: expected a safetensors file") for problem in problems)
    assert len(problems) == 4


def test_what_a_file_lacks_of_its_index_and_holds_beyond_it_is_named(sharded: pathlib.Path) -> None:
    lost = [L0 + "attn_sink", WQ_A + ".scale", WKV + ".weight"]
    held = {name: held for name, held in tensors_of(sharded / SHARD[0]).items() if name not in lost}
    (sharded / SHARD[0]).write_bytes(packed(held | {"extra": zeros("F32", 1)}))
    expected = {f"{SHARD[0]}: {name}: the index says it is here, but it is not" for name in lost}
    assert set(problems_of(sharded)) == expected | {f"{SHARD[0]}: extra: is here, but the index does not say so"}


def test_each_of_very_many_tensors_that_a_file_lacks_is_among_the_problems(sharded: pathlib.Path) -> None:
    more = [f"experts.{i}.weight" for i in range(60)]
    relist(sharded, lambda listed: listed | dict.fromkeys(more, SHARD[0]))
    with pytest.raises(CheckpointError) as raised:
        load_attention(sharded)
    assert [name for name in more if not any(f"{name}: " in problem for problem in raised.value.problems)] == []
    assert not any(re.match(r"and \d+ more", problem) for problem in raised.value.problems)


def test_a_damaged_file_of_another_layer_does_no_harm(sharded: pathlib.Path) -> None:
    (sharded / SHARD[1]).write_bytes(b"damaged")
    (sharded / SHARD[2]).unlink()
    assert list(load_attention(sharded, layers=[0])) == [0]


def test_an_index_that_leads_outside_is_refused_before_anything_is_read(sharded: pathlib.Path) -> None:
    """Even for a tensor that would never be asked for, and though the file is there and is right."""
    (sharded / SHARD[2]).rename(sharded.parent / SHARD[2])
    relist(sharded, lambda listed: {name: file.replace(SHARD[2], f"../{SHARD[2]}") for name, file in listed.items()})
    with pytest.raises(CheckpointError, match="expected a file inside the checkpoint's directory"):
        load_attention(sharded, layers=[0])


OBJECT = "attn_sink: expected an object"
HEADERS: dict[str, tuple[object, str]] = {
    "cut off": ({"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}, "expected a safetensors file"),
    # These safetensors reads in its own way.
    "a list": (["F32", [4], [0, 16]], OBJECT),
    "dtype an object": ({"dtype": {"F32": None}, "shape": [4], "data_offsets": [0, 16]}, OBJECT),
}


@pytest.mark.parametrize(("entry", "message"), HEADERS.values(), ids=HEADERS)
def test_a_hostile_or_truncated_file_is_refused_by_name(entry: object, message: str, checkpoint: Checkpoint) -> None:
    path = checkpoint(tensors={})
    (path / SINGLE).write_bytes(framed(json.dumps({L0 + "attn_sink": entry}).encode(), bytes(16)))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{message}"):
        load_attention(path)


# --- Paths and configs -----------------------------------------------------------------------------------------------

with_and_without_a_config = pytest.mark.parametrize("config", [None, CONFIG], ids=["config.json", "config"])


@with_and_without_a_config
@pytest.mark.parametrize("kind", [pathlib.Path, str])
def test_a_path_where_nothing_is_is_refused_by_name(
    config: AttentionConfig | None, kind: type, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(CheckpointError, match="nowhere: there is no such file"):
        load_attention(kind(tmp_path / "nowhere"), config)


def test_an_empty_directory_is_refused(tmp_path: pathlib.Path) -> None:
    (problem,) = problems_of(tmp_path, CONFIG)
    assert INDEX in problem


def test_a_missing_config_is_refused_by_name(checkpoint: Checkpoint) -> None:
    path = checkpoint()
    (path / "config.json").unlink()
    assert list(load_attention(path, CONFIG)) == [0, 1, 2]
    assert problems_of(path) == ["expected a config.json beside the files, or a config, got neither"]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"model_type": "llama"}', "\ufffe"], ids=ascii)
def test_a_config_that_is_none_is_refused_by_name(text: str, checkpoint: Checkpoint) -> None:
    path = checkpoint()
    (path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        load_attention(path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"quantization_config": 1, "quantization_config": 2}'], ids=ascii)
def test_a_damaged_config_is_refused_even_if_another_is_given(text: str, checkpoint: Checkpoint) -> None:
    """It says how large the blocks are."""
    path = checkpoint()
    (path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json: expected a JSON file"):
        load_attention(path, CONFIG)


def state(path: pathlib.Path, quantization: object) -> None:
    (path / "config.json").write_text(json.dumps(CONFIG.to_hf_config() | {"quantization_config": quantization}))


@pytest.mark.parametrize("size", [[64, 64], [128, 64], [128], 128, "128", [128, 128, 1], {}], ids=str)
@with_and_without_a_config
def test_blocks_of_another_size_are_refused(
    size: object, config: AttentionConfig | None, checkpoint: Checkpoint
) -> None:
    """Their scales would fit: the tiny kernels have one block in any case."""
    path = checkpoint()
    state(path, {"quant_method": "fp8", "weight_block_size": size})
    expected = re.escape(f"config.json: quantization_config.weight_block_size: expected [128, 128], got {size!r}")
    with pytest.raises(CheckpointError, match=expected):
        load_attention(path, config)


@pytest.mark.parametrize("section", [None, {}, {"weight_block_size": None}, {"weight_block_size": [128, 128]}], ids=str)
def test_the_blocks_of_the_releases_are_accepted_and_assumed(section: object, checkpoint: Checkpoint) -> None:
    path = checkpoint()
    state(path, section)
    assert list(load_attention(path, layers=[0])) == [0]


# --- Arguments -------------------------------------------------------------------------------------------------------

NO_INDICES = "indices of layers or None, got "
BAD_LAYERS: dict[str, tuple[object, str]] = {
    "too large": ([99], "ints from 0 to 2, got 99"),
    "one too large": ([0, 3], "ints from 0 to 2, got 3"),
    "negative": ([-1], "ints from 0 to 2, got -1"),
    "a string": ("0", NO_INDICES + "'0'"),
    "no letters": ("", NO_INDICES + "''"),
    "bytes": (b"\0", NO_INDICES),
    "one int": (0, NO_INDICES + "0"),
    "a bool": (True, NO_INDICES + "True"),
    "of strings": (["0"], "ints from 0 to 2, got '0'"),
    "of floats": ([0.0], "ints from 0 to 2, got 0.0"),
    "of bools": ([True], "ints from 0 to 2, got True"),
    "of None": ([None], "ints from 0 to 2, got None"),
    "of lists": ([[0]], "ints from 0 to 2, got [0]"),
    "repeated": ([0, 0], "each layer once, got [0] more than once"),
    "two repeated": ([2, 1, 0, 1, 2], "each layer once, got [1, 2] more than once"),
}


@pytest.mark.parametrize(("layers", "expected"), BAD_LAYERS.values(), ids=BAD_LAYERS)
def test_bad_layers_are_refused_by_name(layers: Any, expected: str, checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match=re.escape(f"layers: expected {expected}")):
        load_attention(checkpoint(), layers=layers)


@pytest.mark.parametrize(
    "layers", [(2, 0), {0, 2}, iter([2, 0]), range(0, 3, 2)], ids=lambda layers: type(layers).__name__
)
def test_layers_come_from_any_iterable_and_in_order(layers: Any, checkpoint: Checkpoint) -> None:
    assert list(load_attention(checkpoint(), layers=layers)) == [0, 2]


EXPECTED = {
    "dtype": "one of bfloat16, float16, float32, .*",
    "param_dtype": "one of bfloat16, .*",
    "path": "a path",
    "config": "an AttentionConfig or None",
    "sharding": "a Mesh, a Sharding or None",
}
BAD_ARGUMENTS: dict[str, tuple[str, object, str]] = {
    "dtype of ints": ("dtype", "int8", "int8"),
    "dtype FP8": ("dtype", "float8_e4m3fn", "float8_e4m3fn"),
    "dtype unknown": ("dtype", "bf16", "'bf16'"),
    "dtype float64 without x64": ("dtype", "float64", "float64"),
    "param_dtype complex": ("param_dtype", "complex64", "complex64"),
    "path None": ("path", None, "NoneType"),
    "path bytes": ("path", b"ck", "bytes"),
    "config a mapping": ("config", CONFIG.to_hf_config(), "dict"),
    "config empty": ("config", {}, "dict"),
    "config false": ("config", False, "bool"),
    "config the class": ("config", AttentionConfig, "type"),
    "config a path": ("config", "config.json", "str"),
    "sharding a string": ("sharding", "data", "str"),
    "sharding a spec": ("sharding", jax.sharding.PartitionSpec("data"), ""),
    "sharding a tuple": ("sharding", (), "tuple"),
    "sharding false": ("sharding", False, "bool"),
    "sharding a class": ("sharding", jax.sharding.NamedSharding, ""),
    "sharding a device, which JAX's own functions accept": ("sharding", jax.devices()[0], ""),
}


@pytest.mark.parametrize(("name", "value", "got"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_arguments_of_a_wrong_type_are_refused_by_name(
    name: str, value: object, got: str, checkpoint: Checkpoint
) -> None:
    arguments: dict[str, Any] = {"path": checkpoint(), name: value}
    with pytest.raises(ValueError, match=f"{name}: expected {EXPECTED[name]}, got {got}"):
        load_attention(**arguments)
