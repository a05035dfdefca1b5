"""What is wrong with a checkpoint's files and config is said all at once and by name; so is what is wrong in a call."""

import json
import pathlib
import re
import struct
from collections.abc import Callable
from typing import Any

import jax
import pytest

from foveal import AttentionConfig, CheckpointError, load_attention
from foveal.checkpoint.files import INDEX, SINGLE
from foveal.testing.checkpoints import write_random_checkpoint
from tests.checkpoint.faulty import CONFIG, L0, L2, WKV, WQ_A, Tensors, problems_of, tensors_of, written, zeros
from tests.checkpoint.hostile import packed

pytestmark = pytest.mark.usefixtures("unchecked_annotations")


# --- Files -----------------------------------------------------------------------------------------------------------


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


SHARD = [f"model-0000{i + 1}-of-00003.safetensors" for i in range(3)]


def relist(path: pathlib.Path, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] = change(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


def test_an_undamaged_sharded_checkpoint_loads(sharded: pathlib.Path) -> None:
    assert list(load_attention(sharded)) == [0, 1, 2]


def test_a_listed_file_that_is_not_there_is_said_once_and_blamed_for_nothing_else(sharded: pathlib.Path) -> None:
    (sharded / SHARD[1]).unlink()
    assert problems_of(sharded) == [f"{SHARD[1]}: there is no such file"]


def test_a_file_of_kernels_that_is_not_there_does_not_make_their_scales_unexpected(
    fp8: Tensors, tmp_path: pathlib.Path
) -> None:
    path = written(tmp_path, {name: held for name, held in fp8.items() if name != WQ_A + ".weight"})
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


def test_what_a_file_lacks_of_its_index_is_named(sharded: pathlib.Path) -> None:
    first = tensors_of(sharded / SHARD[0])
    lost = [L0 + "attn_sink", WQ_A + ".scale", WKV + ".weight"]
    (sharded / SHARD[0]).write_bytes(packed({name: held for name, held in first.items() if name not in lost}))
    problems = problems_of(sharded)
    expected = {f"{SHARD[0]}: {name}: the index says it is here, but it is not" for name in lost}
    assert set(problems) == expected


def test_what_a_file_holds_beyond_its_index_is_named(sharded: pathlib.Path) -> None:
    file = sharded / SHARD[0]
    file.write_bytes(packed(tensors_of(file) | {"extra": zeros("F32", 1)}))
    assert problems_of(sharded) == [f"{file.name}: extra: is here, but the index does not say so"]


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


def test_one_tensor_in_two_files_without_an_index_is_refused(sharded: pathlib.Path) -> None:
    (sharded / INDEX).unlink()
    assert list(load_attention(sharded)) == [0, 1, 2]
    (sharded / "copy.safetensors").write_bytes(packed({L0 + "attn_sink": zeros("F32", 4)}))
    (problem,) = problems_of(sharded)
    assert problem.startswith(L0 + "attn_sink: ")
    assert "copy.safetensors" in problem
    assert SHARD[0] in problem


def test_a_truncated_file_is_refused_by_name(fp8: Tensors, tmp_path: pathlib.Path) -> None:
    path = written(tmp_path, fp8)
    (path / SINGLE).write_bytes(packed(fp8)[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected a safetensors file"):
        load_attention(path)


HOSTILE_ENTRIES = {
    "a list": ["F32", [4], [0, 16]],
    "dtype an object": {"dtype": {"F32": None}, "shape": [4], "data_offsets": [0, 16]},
}


@pytest.mark.parametrize("entry", HOSTILE_ENTRIES.values(), ids=HOSTILE_ENTRIES)
def test_a_header_that_safetensors_reads_its_own_way_is_refused(entry: object, tmp_path: pathlib.Path) -> None:
    path = written(tmp_path, {})
    text = json.dumps({L0 + "attn_sink": entry}).encode()
    (path / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: "):
        load_attention(path)


# --- Paths and configs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [None, CONFIG], ids=["config.json", "config"])
@pytest.mark.parametrize("as_string", [False, True], ids=["Path", "str"])
def test_a_path_where_nothing_is_is_refused_by_name(
    config: AttentionConfig | None, as_string: bool, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "nowhere"
    with pytest.raises(CheckpointError, match="nowhere: there is no such file"):
        load_attention(str(path) if as_string else path, config)


def test_an_empty_directory_is_refused(tmp_path: pathlib.Path) -> None:
    (problem,) = problems_of(tmp_path, CONFIG)
    assert INDEX in problem


def test_a_missing_config_is_refused_by_name(fp8: Tensors, tmp_path: pathlib.Path) -> None:
    path = written(tmp_path, fp8)
    (path / "config.json").unlink()
    assert list(load_attention(path, CONFIG)) == [0, 1, 2]
    assert problems_of(path) == ["expected a config.json beside the files, or a config, got neither"]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"model_type": "llama"}', "\ufffe"], ids=ascii)
def test_a_config_that_is_none_is_refused_by_name(text: str, fp8: Tensors, tmp_path: pathlib.Path) -> None:
    path = written(tmp_path, fp8)
    (path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        load_attention(path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"quantization_config": 1, "quantization_config": 2}'], ids=ascii)
def test_a_damaged_config_is_refused_even_if_another_is_given(text: str, fp8: Tensors, tmp_path: pathlib.Path) -> None:
    """It says how large the blocks are."""
    path = written(tmp_path, fp8)
    (path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json: expected a JSON file"):
        load_attention(path, CONFIG)


@pytest.mark.parametrize("size", [[64, 64], [128, 64], [128], 128, "128", [128, 128, 1], {}], ids=str)
@pytest.mark.parametrize("config", [None, CONFIG], ids=["config.json", "config"])
def test_blocks_of_another_size_are_refused(
    size: object, config: AttentionConfig | None, fp8: Tensors, tmp_path: pathlib.Path
) -> None:
    """Their scales would fit: the tiny kernels have one block in any case."""
    path = written(tmp_path, fp8)
    stated = CONFIG.to_hf_config() | {"quantization_config": {"quant_method": "fp8", "weight_block_size": size}}
    (path / "config.json").write_text(json.dumps(stated))
    expected = (
        rf"config\.json: quantization_config\.weight_block_size: expected \[128, 128\], got {re.escape(repr(size))}"
    )
    with pytest.raises(CheckpointError, match=expected):
        load_attention(path, config)


@pytest.mark.parametrize("section", [None, {}, {"weight_block_size": None}, {"weight_block_size": [128, 128]}], ids=str)
def test_the_blocks_of_the_releases_are_accepted_and_assumed(
    section: object, fp8: Tensors, tmp_path: pathlib.Path
) -> None:
    path = written(tmp_path, fp8)
    (path / "config.json").write_text(json.dumps(CONFIG.to_hf_config() | {"quantization_config": section}))
    assert list(load_attention(path, layers=[0])) == [0]


# --- Arguments -------------------------------------------------------------------------------------------------------

BAD_LAYERS: dict[str, tuple[object, str]] = {
    "too large": ([99], "layers: expected ints from 0 to 2, got 99"),
    "one too large": ([0, 3], "layers: expected ints from 0 to 2, got 3"),
    "negative": ([-1], "layers: expected ints from 0 to 2, got -1"),
    "a string": ("0", "layers: expected indices of layers or None, got '0'"),
    "no letters": ("", "layers: expected indices of layers or None, got ''"),
    "bytes": (b"\0", "layers: expected indices of layers or None"),
    "one int": (0, "layers: expected indices of layers or None, got 0"),
    "a bool": (True, "layers: expected indices of layers or None, got True"),
    "of strings": (["0"], "layers: expected ints from 0 to 2, got '0'"),
    "of floats": ([0.0], r"layers: expected ints from 0 to 2, got 0\.0"),
    "of bools": ([True], "layers: expected ints from 0 to 2, got True"),
    "of None": ([None], "layers: expected ints from 0 to 2, got None"),
    "of lists": ([[0]], r"layers: expected ints from 0 to 2, got \[0\]"),
    "repeated": ([0, 0], r"layers: expected each layer once, got \[0\] more than once"),
    "two repeated": ([2, 1, 0, 1, 2], r"layers: expected each layer once, got \[1, 2\] more than once"),
}


@pytest.mark.parametrize(("layers", "message"), BAD_LAYERS.values(), ids=BAD_LAYERS)
def test_bad_layers_are_refused_by_name(layers: Any, message: str, fp8: Tensors, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=message):
        load_attention(written(tmp_path, fp8), layers=layers)


@pytest.mark.parametrize(
    "layers", [(2, 0), {0, 2}, iter([2, 0]), range(0, 3, 2)], ids=lambda layers: type(layers).__name__
)
def test_layers_come_from_any_iterable_and_in_order(layers: Any, fp8: Tensors, tmp_path: pathlib.Path) -> None:
    assert list(load_attention(written(tmp_path, fp8), layers=layers)) == [0, 2]


BAD_ARGUMENTS: dict[str, tuple[dict[str, object], str]] = {
    "dtype of ints": ({"dtype": "int8"}, "dtype: expected one of bfloat16, float16, float32, .*, got int8"),
    "dtype FP8": ({"dtype": "float8_e4m3fn"}, "dtype: expected one of .*, got float8_e4m3fn"),
    "dtype unknown": ({"dtype": "bf16"}, "dtype: expected one of .*, got 'bf16'"),
    "dtype float64 without x64": ({"dtype": "float64"}, "dtype: expected one of .*, got float64"),
    "param_dtype complex": ({"param_dtype": "complex64"}, "param_dtype: expected one of .*, got complex64"),
    "path None": ({"path": None}, "path: expected a path, got NoneType"),
    "path bytes": ({"path": b"ck"}, "path: expected a path, got bytes"),
    "config a mapping": ({"config": CONFIG.to_hf_config()}, "config: expected an AttentionConfig or None, got dict"),
    "config empty": ({"config": {}}, "config: expected an AttentionConfig or None, got dict"),
    "config false": ({"config": False}, "config: expected an AttentionConfig or None, got bool"),
    "config the class": ({"config": AttentionConfig}, "config: expected an AttentionConfig or None, got type"),
    "config a path": ({"config": "config.json"}, "config: expected an AttentionConfig or None, got str"),
    "sharding a string": ({"sharding": "data"}, "sharding: expected a Mesh, a Sharding or None, got str"),
    "sharding a spec": (
        {"sharding": jax.sharding.PartitionSpec("data")},
        "sharding: expected a Mesh, a Sharding or None, got ",
    ),
    "sharding a tuple": ({"sharding": ()}, "sharding: expected a Mesh, a Sharding or None, got tuple"),
    "sharding false": ({"sharding": False}, "sharding: expected a Mesh, a Sharding or None, got bool"),
    "sharding a class": (
        {"sharding": jax.sharding.NamedSharding},
        "sharding: expected a Mesh, a Sharding or None, got ",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_arguments_of_a_wrong_type_are_refused_by_name(
    arguments: dict[str, Any], message: str, fp8: Tensors, tmp_path: pathlib.Path
) -> None:
    others = {name: value for name, value in arguments.items() if name != "path"}
    with pytest.raises(ValueError, match=message):
        load_attention(arguments.get("path", written(tmp_path, fp8)), **others)


def test_a_device_is_no_sharding(fp8: Tensors, tmp_path: pathlib.Path) -> None:
    """Nor a `Device`, which JAX's own functions accept."""
    with pytest.raises(ValueError, match="sharding: expected a Mesh, a Sharding or None, got "):
        load_attention(written(tmp_path, fp8), sharding=jax.devices()[0])  # pyright: ignore[reportArgumentType]
