"""What is wrong with a checkpoint's tensors is said all at once and by name.

For its files and for arguments, see test_problem_files.py.
"""

import pathlib

import pytest

import foveal
from foveal import AttentionConfig, CheckpointError, Dialect, load_attention
from foveal.checkpoint.names import scale_name
from tests.checkpoint.faulty import CONFIG, L0, L1, L2, WQ_A, Tensors, problems_of, written, zeros
from tests.checkpoint.hostile import Held

Change = dict[str, Held | None]
"""Tensors to put in; None takes one out."""


def changed(tensors: Tensors, change: Change) -> Tensors:
    return {name: held for name, held in (tensors | change).items() if held is not None}


def names_of(problems: list[str]) -> set[str]:
    return {problem.split(": ")[0] for problem in problems}


def test_undamaged_checkpoints_load(sound: dict[tuple[Dialect, str], Tensors], tmp_path: pathlib.Path) -> None:
    """Or else all below would be refused for no reason."""
    for (dialect, weights), tensors in sound.items():
        assert list(load_attention(written(tmp_path / f"{dialect}-{weights}", tensors))) == [0, 1, 2]


def test_the_error_is_a_value_error_at_the_top_of_the_package() -> None:
    assert issubclass(foveal.CheckpointError, ValueError)


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
    "scale under a name that nobody gives": (
        {WQ_A + ".scale": None, WQ_A + ".weight_scale": zeros("F32", 1, 1)},
        [WQ_A + ".scale: missing", WQ_A + ".weight_scale: unexpected"],
    ),
    "scale of bytes": (
        {WQ_A + ".scale": zeros("U8", 1, 1)},
        [WQ_A + ".scale: expected F8_E8M0 or F32, got U8"],
    ),
    "scale of the inputs": (
        {WQ_A + ".input_scale": zeros("F32", 1)},
        [WQ_A + ".input_scale: unexpected"],
    ),
    "kernel of bytes": (
        {WQ_A + ".weight": zeros("U8", 32, 64)},
        [WQ_A + ".weight: expected BF16, F16, F32 or F8_E4M3, got U8"],
    ),
    "kernel in the other FP8, with scales": (
        {WQ_A + ".weight": zeros("F8_E5M2", 32, 64)},
        [WQ_A + ".weight: expected BF16, F16, F32 or F8_E4M3, got F8_E5M2"],
    ),
    "kernel in FP4": (
        {WQ_A + ".weight": Held("F4", (32, 64), bytes(1024))},
        [WQ_A + ".weight: expected BF16, F16, F32 or F8_E4M3, got F4"],
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


def test_names_of_no_dialect_are_said_once(fp8: Tensors, tmp_path: pathlib.Path) -> None:
    (problem,) = problems_of(written(tmp_path, {"language_" + name: held for name, held in fp8.items()}))
    assert problem.startswith("expected tensors layers.N.attn.*, model.layers.N.attn.* or model.layers.N.self_attn.*")
    assert "language_layers.0.attn.attn_sink" in problem
    (problem,) = problems_of(written(tmp_path, {"embed.weight": zeros("BF16", 8, 8)}))
    assert problem.endswith("got none; it has embed.weight")


def test_a_layer_that_is_not_there_at_all_is_said_once(fp8: Tensors, tmp_path: pathlib.Path) -> None:
    some = {name: held for name, held in fp8.items() if not name.startswith(L1)}
    assert problems_of(written(tmp_path, some)) == ["layers.1.attn.*: missing, all of layer 1"]
    assert list(load_attention(tmp_path, layers=[0, 2])) == [0, 2]


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
