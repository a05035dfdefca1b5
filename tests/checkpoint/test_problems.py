"""What is wrong with a checkpoint is said all at once and by name; so is what is wrong with a call."""

import json
import pathlib
import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jaxtyping
import pytest

import foveal
from foveal import AttentionConfig, CheckpointError, Dialect, load_attention
from foveal.checkpoint.files import INDEX, SINGLE, read_header
from foveal.checkpoint.names import scale_name
from foveal.testing.checkpoints import Weights, write_random_checkpoint

CONFIG = AttentionConfig.tiny()  # layer 0 slides, 1 is CSA, 2 is HCA
L0, L1, L2 = "layers.0.attn.", "layers.1.attn.", "layers.2.attn."
WQ_A, WKV = L0 + "wq_a", L0 + "wkv"
BYTES = {"F64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I8": 1, "BOOL": 1}


class Held(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


Tensors = dict[str, Held]


def zeros(dtype: str, *shape: int) -> Held:
    size = BYTES.get(dtype, 1)
    for extent in shape:
        size *= extent
    return Held(dtype, shape, bytes(size))


def packed(tensors: Tensors) -> bytes:
    """By hand: it must also write what NumPy has no dtype for."""
    header, at = {}, 0
    for name, held in tensors.items():
        header[name] = {"dtype": held.dtype, "shape": held.shape, "data_offsets": [at, at + len(held.data)]}
        at += len(held.data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(held.data for held in tensors.values())


def written(directory: pathlib.Path, tensors: Tensors) -> pathlib.Path:
    directory.mkdir(exist_ok=True)
    (directory / SINGLE).write_bytes(packed(tensors))
    (directory / "config.json").write_text(json.dumps(CONFIG.to_hf_config()))
    return directory


def tensors_of(file: pathlib.Path) -> Tensors:
    return {name: Held(t.dtype, t.shape, t.read().tobytes()) for name, t in read_header(file).items()}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Dialect, str], Tensors]:
    """Undamaged checkpoints, to be copied: each dialect in FP8, and DeepSeek's in bfloat16."""
    root, found = tmp_path_factory.mktemp("sound"), {}
    kinds: list[tuple[Dialect, Weights]] = [(dialect, "fp8") for dialect in Dialect]
    for dialect, weights in [*kinds, (Dialect.DEEPSEEK, "bfloat16")]:
        write_random_checkpoint(root / f"{dialect}-{weights}", CONFIG, dialect=dialect, weights=weights)
        found[dialect, weights] = tensors_of(root / f"{dialect}-{weights}" / SINGLE)
    return found


@pytest.fixture
def fp8(sound: dict[tuple[Dialect, str], Tensors]) -> Tensors:
    return dict(sound[Dialect.DEEPSEEK, "fp8"])


@pytest.fixture(autouse=True)
def unchecked_annotations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls as a user makes them: this suite's check of annotations would speak first."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def problems_of(path: pathlib.Path, *args: Any, **kwargs: Any) -> list[str]:
    """All of them, which must be in the message too, each on a line of its own behind the checkpoint's path."""
    with pytest.raises(CheckpointError) as raised:
        load_attention(path, *args, **kwargs)
    problems = list(raised.value.problems)
    assert str(raised.value).splitlines() == [f"{path}: {problem}" for problem in problems]
    assert len(set(problems)) == len(problems)
    return problems


def names_of(problems: list[str]) -> set[str]:
    return {problem.split(": ")[0] for problem in problems}


def test_undamaged_checkpoints_load(sound: dict[tuple[Dialect, str], Tensors], tmp_path: pathlib.Path) -> None:
    """Or else all below would be refused for no reason."""
    for (dialect, weights), tensors in sound.items():
        assert list(load_attention(written(tmp_path / f"{dialect}-{weights}", tensors))) == [0, 1, 2]


def test_the_error_is_a_value_error_at_the_top_of_the_package() -> None:
    assert issubclass(foveal.CheckpointError, ValueError)


# --- Tensors ---------------------------------------------------------------------------------------------------------

Change = dict[str, Held | None]
"""Tensors to put in; None takes one out."""


def changed(tensors: Tensors, change: Change) -> Tensors:
    return {name: held for name, held in (tensors | change).items() if held is not None}


WRONG: dict[str, tuple[Change, list[str]]] = {
    "kernel missing": ({WQ_A + ".weight": None, WQ_A + ".scale": None}, [WQ_A + ".weight: missing"]),
    "norm missing": ({L1 + "q_norm.weight": None}, [L1 + "q_norm.weight: missing"]),
    "sinks missing": ({L2 + "attn_sink": None}, [L2 + "attn_sink: missing"]),
    "indexer's bias missing": ({L1 + "indexer.compressor.ape": None}, [L1 + "indexer.compressor.ape: missing"]),
    "kernel unexpected": ({L0 + "wk.weight": zeros("BF16", 2, 2)}, [L0 + "wk.weight: unexpected"]),
    "bias unexpected": ({WQ_A + ".bias": zeros("BF16", 32)}, [WQ_A + ".bias: unexpected"]),
    "compressor in a sliding layer": (
        {L0 + "compressor.norm.weight": zeros("BF16", 32)},
        [L0 + "compressor.norm.weight: unexpected"],
    ),
    "indexer in an HCA layer": (
        {L2 + "indexer.weights_proj.weight": zeros("BF16", 4, 64)},
        [L2 + "indexer.weights_proj.weight: unexpected"],
    ),
    "kernel turned round": (
        {WQ_A + ".weight": zeros("F8_E4M3", 64, 32)},
        [WQ_A + ".weight: expected shape [32, 64], got [64, 32]"],
    ),
    "kernel flat": (
        {WQ_A + ".weight": zeros("F8_E4M3", 2048)},
        [WQ_A + ".weight: expected shape [32, 64], got [2048]"],
    ),
    "kernel empty": (
        {WQ_A + ".weight": zeros("F8_E4M3", 0, 64)},
        [WQ_A + ".weight: expected shape [32, 64], got [0, 64]"],
    ),
    "norm of another width": (
        {L0 + "q_norm.weight": zeros("BF16", 33)},
        [L0 + "q_norm.weight: expected shape [32], got [33]"],
    ),
    "norm with an axis too many": (
        {L0 + "q_norm.weight": zeros("BF16", 1, 32)},
        [L0 + "q_norm.weight: expected shape [32], got [1, 32]"],
    ),
    "sinks a scalar": ({L0 + "attn_sink": zeros("F32")}, [L0 + "attn_sink: expected shape [4], got []"]),
    "bias of the other layer type": (
        {L1 + "compressor.ape": zeros("F32", 8, 32)},
        [L1 + "compressor.ape: expected shape [4, 64], got [8, 32]"],
    ),
    "kernel of ints": (
        {WQ_A + ".weight": zeros("I8", 32, 64), WQ_A + ".scale": None},
        [WQ_A + ".weight: expected BF16, F16, F32 or F8_E4M3, got I8"],
    ),
    "kernel in double precision": (
        {L1 + "compressor.wkv.weight": zeros("F64", 64, 64)},
        [L1 + "compressor.wkv.weight: expected BF16, F16, F32 or F8_E4M3, got F64"],
    ),
    "kernel in the other FP8": (
        {L1 + "compressor.wkv.weight": zeros("F8_E5M2", 64, 64)},
        [L1 + "compressor.wkv.weight: expected BF16, F16, F32 or F8_E4M3, got F8_E5M2"],
    ),
    "kernel of exponents": (
        {L1 + "compressor.wkv.weight": zeros("F8_E8M0", 64, 64)},
        [L1 + "compressor.wkv.weight: expected BF16, F16, F32 or F8_E4M3, got F8_E8M0"],
    ),
    "norm of ints": (
        {L0 + "kv_norm.weight": zeros("I32", 32)},
        [L0 + "kv_norm.weight: expected BF16, F16, F32, got I32"],
    ),
    "norm of bools": (
        {L0 + "kv_norm.weight": zeros("BOOL", 32)},
        [L0 + "kv_norm.weight: expected BF16, F16, F32, got BOOL"],
    ),
    "norm in FP8": (
        {L0 + "kv_norm.weight": zeros("F8_E4M3", 32)},
        [L0 + "kv_norm.weight: expected BF16, F16, F32, got F8_E4M3"],
    ),
    "sinks in FP8": (
        {L0 + "attn_sink": zeros("F8_E4M3", 4)},
        [L0 + "attn_sink: expected BF16, F16, F32, got F8_E4M3"],
    ),
    "shape and dtype": (
        {L0 + "attn_sink": zeros("I32", 5)},
        [L0 + "attn_sink: expected shape [4], got [5]", L0 + "attn_sink: expected BF16, F16, F32, got I32"],
    ),
    "scale missing": ({WQ_A + ".scale": None}, [WQ_A + ".scale: missing"]),
    "scale missing where a kernel should have none": (
        {L1 + "compressor.wkv.weight": zeros("F8_E4M3", 64, 64)},
        [L1 + "compressor.wkv.scale: missing"],
    ),
    "scale of more blocks": (
        {WQ_A + ".scale": zeros("F8_E8M0", 2, 1)},
        [WQ_A + ".scale: expected shape [1, 1], got [2, 1]"],
    ),
    "scale a scalar": ({WQ_A + ".scale": zeros("F8_E8M0")}, [WQ_A + ".scale: expected shape [1, 1], got []"]),
    "scale in bfloat16": (
        {WQ_A + ".scale": zeros("BF16", 1, 1)},
        [WQ_A + ".scale: expected F8_E8M0 or F32, got BF16"],
    ),
    "scale in FP8": (
        {WQ_A + ".scale": zeros("F8_E4M3", 1, 1)},
        [WQ_A + ".scale: expected F8_E8M0 or F32, got F8_E4M3"],
    ),
    "scale of ints and of another shape": (
        {WQ_A + ".scale": zeros("I32", 2, 2)},
        [
            WQ_A + ".scale: expected shape [1, 1], got [2, 2]",
            WQ_A + ".scale: expected F8_E8M0 or F32, got I32",
        ],
    ),
    "scale in both spellings": (
        {WQ_A + ".weight_scale_inv": zeros("F32", 1, 1)},
        [WQ_A + ".weight_scale_inv: unexpected"],
    ),
    "scale of a norm": ({L0 + "q_norm.scale": zeros("F32", 1, 1)}, [L0 + "q_norm.scale: unexpected"]),
    "layer beyond the config": (
        {"layers.3.attn.wq_a.weight": zeros("BF16", 32, 64)},
        ["layers.3.attn.wq_a.weight: unexpected, the model has 3 layers"],
    ),
    "layer far beyond the config": (
        {"layers.999999999.attn.wq_a.weight": zeros("BF16", 32, 64)},
        ["layers.999999999.attn.wq_a.weight: unexpected, the model has 3 layers"],
    ),
    "other model's name for all of a layer": (
        {"model.layers.0.self_attn.q_a_proj.weight": zeros("BF16", 32, 64)},
        ["model.layers.0.self_attn.q_a_proj.weight: unexpected among deepseek names"],
    ),
    "one tensor with and without model.": (
        {f"model.{L0}attn_sink": zeros("F32", 4)},
        [f"model.{L0}attn_sink: the same as {L0}attn_sink"],
    ),
    "kv_norm as transformers saves it": (
        {L0 + "kv_norm.weight": None, L0 + "norm.weight": zeros("BF16", 32)},
        [L0 + "kv_norm.weight: missing", L0 + "norm.weight: unexpected"],
    ),
}


@pytest.mark.parametrize(("change", "expected"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_with_a_tensor_is_said_by_its_name(
    change: Change, expected: list[str], fp8: Tensors, tmp_path: pathlib.Path
) -> None:
    assert sorted(problems_of(written(tmp_path, changed(fp8, change)))) == sorted(expected)


TOGETHER = ["kernel of ints", "norm missing", "norm in FP8", "sinks a scalar", "scale of a norm", "kernel unexpected"]
TOGETHER += ["sinks missing", "scale missing where a kernel should have none", "bias of the other layer type"]
TOGETHER += ["compressor in a sliding layer", "indexer in an HCA layer", "layer beyond the config"]
TOGETHER += ["other model's name for all of a layer"]


def test_all_that_is_wrong_is_said_at_once(fp8: Tensors, tmp_path: pathlib.Path) -> None:
    change: Change = {}
    for key in TOGETHER:
        assert not set(change) & set(WRONG[key][0]), key
        change |= WRONG[key][0]
    expected = [problem for key in TOGETHER for problem in WRONG[key][1]]
    assert sorted(problems_of(written(tmp_path, changed(fp8, change)))) == sorted(expected)


def test_of_very_many_problems_the_message_shows_some_and_counts_the_others(
    fp8: Tensors, tmp_path: pathlib.Path
) -> None:
    more = {f"{L0}more{i}": zeros("F32", 1) for i in range(60)}
    with pytest.raises(CheckpointError) as raised:
        load_attention(written(tmp_path, fp8 | more))
    assert names_of(list(raised.value.problems)) == set(more)
    lines = str(raised.value).splitlines()
    assert lines[:-1] == [f"{tmp_path}: {problem}" for problem in raised.value.problems[: len(lines) - 1]]
    assert lines[-1] == f"and {60 - (len(lines) - 1)} more"


def test_a_checkpoint_without_attention_lacks_every_tensor(fp8: Tensors, tmp_path: pathlib.Path) -> None:
    problems = problems_of(written(tmp_path, {"embed.weight": zeros("BF16", 8, 8)}))
    assert set(problems) == {f"{name}: missing" for name in fp8 if not name.endswith(".scale")}


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    """DeepSeek-V3's names: same module, other projections."""
    theirs = {f"model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight": zeros("BF16", 2, 2) for i in range(3)}
    with pytest.raises(CheckpointError) as raised:
        load_attention(written(tmp_path, theirs))
    assert {f"{name}: unexpected" for name in theirs} <= set(raised.value.problems)
    assert "model.layers.2.self_attn.q_a_proj.weight: missing" in raised.value.problems


def test_a_wrong_config_is_told_by_the_shapes(fp8: Tensors, tmp_path: pathlib.Path) -> None:
    config = AttentionConfig.from_hf_config(CONFIG.to_hf_config() | {"num_attention_heads": 8})
    problems = problems_of(written(tmp_path, fp8), config)
    assert L0 + "attn_sink: expected shape [8], got [4]" in problems
    changed_names = ("attn_sink", "wo_a.weight", "wq_b.weight", "wq_b.scale")
    assert names_of(problems) == {layer + name for layer in (L0, L1, L2) for name in changed_names}


def test_a_config_of_fewer_layers_is_told_by_the_rest(fp8: Tensors, tmp_path: pathlib.Path) -> None:
    config = AttentionConfig.from_hf_config(
        CONFIG.to_hf_config() | {"num_hidden_layers": 2, "layer_types": [str(kind) for kind in CONFIG.layer_types[:2]]}
    )
    problems = problems_of(written(tmp_path, fp8), config)
    assert set(problems) == {f"{name}: unexpected, the model has 2 layers" for name in fp8 if name.startswith(L2)}


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("other", Dialect)
def test_one_name_of_another_dialect_is_unexpected_and_its_own_missing(
    dialect: Dialect, other: Dialect, sound: dict[tuple[Dialect, str], Tensors], tmp_path: pathlib.Path
) -> None:
    names = {
        Dialect.DEEPSEEK: "layers.1.attn.kv_norm.weight",
        Dialect.TRANSFORMERS: "model.layers.1.self_attn.kv_norm.weight",
        Dialect.TRANSFORMERS_SAVED: "model.layers.1.attn.norm.weight",
    }
    tensors = dict(sound[dialect, "fp8"])
    tensors[names[other]] = tensors.pop(names[dialect])
    if other is dialect:
        load_attention(written(tmp_path, tensors))
        return
    problems = problems_of(written(tmp_path, tensors))
    assert names_of(problems) == {names[dialect], names[other]}
    assert f"{names[dialect]}: missing" in problems
    assert any(problem.startswith(f"{names[other]}: unexpected") for problem in problems)


@pytest.mark.parametrize("dialect", Dialect)
def test_a_missing_scale_is_called_as_the_dialect_or_the_release_calls_it(
    dialect: Dialect, sound: dict[tuple[Dialect, str], Tensors], tmp_path: pathlib.Path
) -> None:
    tensors = dict(sound[dialect, "fp8"])
    weight = next(name for name, held in tensors.items() if held.dtype == "F8_E4M3")
    del tensors[scale_name(weight, dialect)]
    (problem,) = problems_of(written(tmp_path, tensors))
    assert problem in (f"{scale_name(weight, dialect)}: missing", f"{weight.removesuffix('.weight')}.scale: missing")


def test_the_scale_of_a_weight_that_has_none_is_unexpected(
    sound: dict[tuple[Dialect, str], Tensors], tmp_path: pathlib.Path
) -> None:
    tensors = sound[Dialect.DEEPSEEK, "bfloat16"] | {WQ_A + ".scale": zeros("F32", 1, 1)}
    assert problems_of(written(tmp_path, tensors)) == [WQ_A + ".scale: unexpected"]


@pytest.mark.parametrize(
    "name", [L0 + "x\nlayers.0.attn.attn_sink: missing", L0 + "x\u2028y", L0 + "x\r\x1b[2Ky"], ids=ascii
)
def test_a_name_cannot_forge_lines_of_the_message(name: str, fp8: Tensors, tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError) as raised:
        load_attention(written(tmp_path, fp8 | {name: zeros("F32", 1)}))
    assert len(raised.value.problems) == 1
    assert len(str(raised.value).splitlines()) == 1
    assert "\x1b" not in str(raised.value)


PASSED_OVER = {
    "embed.weight": zeros("I8", 3),
    "layers.0.ffn.experts.0.w1.weight": Held("F4", (2,), bytes(1)),
    "layers.0.attn_norm.weight": zeros("BF16", 64),
    "layers.7.ffn_norm.weight": zeros("BF16", 64),
    "mtp.0.attn.wq_a.weight": zeros("F64", 1),
    "mtp.layers.0.attn.wq_a.weight": zeros("F64", 1),
}


def test_what_is_not_attention_is_passed_over_whatever_it_is(fp8: Tensors, tmp_path: pathlib.Path) -> None:
    assert list(load_attention(written(tmp_path, fp8 | PASSED_OVER))) == [0, 1, 2]


def test_layers_that_were_not_asked_for_are_not_judged(fp8: Tensors, tmp_path: pathlib.Path) -> None:
    change: Change = {L1 + "attn_sink": None, L2 + "x": zeros("F32", 1), "layers.9.attn.x": zeros("F32", 1)}
    path = written(tmp_path, changed(fp8, change))
    assert list(load_attention(path, layers=[0])) == [0]
    assert problems_of(path, layers=[1]) == [L1 + "attn_sink: missing"]


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
    assert problems_of(sharded) == [f"{sharded / SHARD[1]}: there is no such file"]


def test_a_file_of_kernels_that_is_not_there_does_not_make_their_scales_unexpected(
    fp8: Tensors, tmp_path: pathlib.Path
) -> None:
    path = written(tmp_path, {name: held for name, held in fp8.items() if name != WQ_A + ".weight"})
    listed = dict.fromkeys(fp8, SINGLE) | {WQ_A + ".weight": "other.safetensors"}
    (path / INDEX).write_text(json.dumps({"weight_map": listed}))
    assert problems_of(path) == [f"{path / 'other.safetensors'}: there is no such file"]


def test_damaged_files_and_wrong_tensors_are_said_together(sharded: pathlib.Path) -> None:
    (sharded / SHARD[0]).unlink()
    (sharded / SHARD[1]).write_bytes((sharded / SHARD[1]).read_bytes()[:-1])
    third = {name: held for name, held in tensors_of(sharded / SHARD[2]).items() if name != L2 + "attn_sink"}
    (sharded / SHARD[2]).write_bytes(packed(third | {L2 + "q_norm.weight": zeros("I32", 32)}))
    relist(sharded, lambda listed: {name: file for name, file in listed.items() if name != L2 + "attn_sink"})
    problems = problems_of(sharded)
    assert {f"{sharded / SHARD[0]}: there is no such file", L2 + "attn_sink: missing"} <= set(problems)
    assert L2 + "q_norm.weight: expected BF16, F16, F32, got I32" in problems
    assert any(problem.startswith(f"{sharded / SHARD[1]}: expected a safetensors file") for problem in problems)
    assert len(problems) == 4


def test_what_a_file_lacks_of_its_index_is_named(sharded: pathlib.Path) -> None:
    first = tensors_of(sharded / SHARD[0])
    lost = [L0 + "attn_sink", WQ_A + ".scale", WKV + ".weight"]
    (sharded / SHARD[0]).write_bytes(packed({name: held for name, held in first.items() if name not in lost}))
    problems = problems_of(sharded)
    expected = {f"{sharded / SHARD[0]}: {name}: the index says it is here, but it is not" for name in lost}
    assert set(problems) == expected


def test_what_a_file_holds_beyond_its_index_is_named(sharded: pathlib.Path) -> None:
    file = sharded / SHARD[0]
    file.write_bytes(packed(tensors_of(file) | {"extra": zeros("F32", 1)}))
    assert problems_of(sharded) == [f"{file}: extra: is here, but the index does not say so"]


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
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_attention(path)


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
    "too large": ([99], "layer_index: expected 0 <= layer_index < 3 .*got 99"),
    "one too large": ([0, 3], "layer_index: .*got 3"),
    "negative": ([-1], "layer_index: .*got -1"),
    "a string": ("0", "layers: expected indices of layers or None, got '0'"),
    "no letters": ("", "layers: expected indices of layers or None, got ''"),
    "bytes": (b"\0", "layers: expected indices of layers or None"),
    "one int": (0, "layers: expected indices of layers or None, got 0"),
    "a bool": (True, "layers: expected indices of layers or None, got True"),
    "of strings": (["0"], "layer_index: expected an int, got '0'"),
    "of floats": ([0.0], r"layer_index: expected an int, got 0\.0"),
    "of bools": ([True], "layer_index: expected an int, got True"),
    "of None": ([None], "layer_index: expected an int, got None"),
    "of lists": ([[0]], r"layer_index: expected an int, got \[0\]"),
    "repeated": ([0, 0], r"layers: expected each layer once, got \[0\] more often"),
    "two repeated": ([2, 1, 0, 1, 2], r"layers: expected each layer once, got \[1, 2\] more often"),
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
    with pytest.raises(ValueError, match=message):
        load_attention(written(tmp_path, fp8), **arguments)


def test_a_device_is_no_sharding(fp8: Tensors, tmp_path: pathlib.Path) -> None:
    """Nor a `Device`, which JAX's own functions accept."""
    with pytest.raises(ValueError, match="sharding: expected a Mesh, a Sharding or None, got "):
        load_attention(written(tmp_path, fp8), sharding=jax.devices()[0])  # pyright: ignore[reportArgumentType]
