"""What is wrong with a checkpoint's tensors is said all at once and by name.

For its files and for arguments, see test_problem_files.py.
"""

import dataclasses
import itertools
import pathlib

import pytest

from foveal import CheckpointError, Dialect, load_attention
from foveal.checkpoint.names import scale_name
from tests.checkpoint.faulty import CONFIG, L0, L1, L2, WQ_A, Change, Checkpoint, Tensors, problems_of, written, zeros
from tests.checkpoint.hostile import Held


def names_of(problems: list[str]) -> set[str]:
    return {problem.split(": ")[0] for problem in problems}


def test_undamaged_checkpoints_load(sound: dict[tuple[Dialect, str], Tensors], tmp_path: pathlib.Path) -> None:
    """Or else all below would be refused for no reason."""
    for (dialect, weights), tensors in sound.items():
        assert list(load_attention(written(tmp_path / f"{dialect}-{weights}", tensors))) == [0, 1, 2]


COMPRESSOR_WKV, SINKS = L1 + "compressor.wkv.weight", L0 + "attn_sink"
KERNEL, SCALE, KV_NORM = WQ_A + ".weight", WQ_A + ".scale", L0 + "kv_norm.weight"
OF_A_KERNEL, PLAIN, OF_SCALES = "BF16, F16, F32 or F8_E4M3", "BF16, F16, F32", "F8_E8M0 or F32"
Wrong = tuple[Change, list[str]]
"""A change and all that is to be said of it."""


def missing(*names: str) -> Wrong:
    return dict.fromkeys(names), [f"{names[0]}: missing"]


def unexpected(name: str, held: Held, said: str = "unexpected") -> Wrong:
    return {name: held}, [f"{name}: {said}"]


def of_shape(name: str, held: Held, expected: list[int]) -> Wrong:
    return {name: held}, [f"{name}: expected shape {expected}, got {list(held.shape)}"]


def of_dtype(name: str, held: Held, expected: str) -> Wrong:
    return {name: held}, [f"{name}: expected {expected}, got {held.dtype}"]


def both(one: Wrong, other: Wrong) -> Wrong:
    return one[0] | other[0], one[1] + other[1]


WRONG: dict[str, Wrong] = {
    "kernel missing": missing(KERNEL, SCALE),
    "norm missing": missing(L1 + "q_norm.weight"),
    "sinks missing": missing(L2 + "attn_sink"),
    "indexer's bias missing": missing(L1 + "indexer.compressor.ape"),
    "kernel unexpected": unexpected(L0 + "wk.weight", zeros("BF16", 2, 2)),
    "bias unexpected": unexpected(WQ_A + ".bias", zeros("BF16", 32)),
    "compressor in a sliding layer": unexpected(L0 + "compressor.norm.weight", zeros("BF16", 32)),
    "indexer in an HCA layer": unexpected(L2 + "indexer.weights_proj.weight", zeros("BF16", 4, 64)),
    "kernel turned round": of_shape(KERNEL, zeros("F8_E4M3", 64, 32), [32, 64]),
    "kernel flat": of_shape(KERNEL, zeros("F8_E4M3", 2048), [32, 64]),
    "kernel empty": of_shape(KERNEL, zeros("F8_E4M3", 0, 64), [32, 64]),
    "norm of another width": of_shape(L0 + "q_norm.weight", zeros("BF16", 33), [32]),
    "norm with an axis too many": of_shape(L0 + "q_norm.weight", zeros("BF16", 1, 32), [32]),
    "sinks a scalar": of_shape(SINKS, zeros("F32"), [4]),
    "bias of the other layer type": of_shape(L1 + "compressor.ape", zeros("F32", 8, 32), [4, 64]),
    "kernel of ints": both(of_dtype(KERNEL, zeros("I8", 32, 64), OF_A_KERNEL), ({SCALE: None}, [])),
    "kernel in double precision": of_dtype(COMPRESSOR_WKV, zeros("F64", 64, 64), OF_A_KERNEL),
    "kernel in the other FP8": of_dtype(COMPRESSOR_WKV, zeros("F8_E5M2", 64, 64), OF_A_KERNEL),
    "kernel of exponents": of_dtype(COMPRESSOR_WKV, zeros("F8_E8M0", 64, 64), OF_A_KERNEL),
    "norm of ints": of_dtype(KV_NORM, zeros("I32", 32), PLAIN),
    "norm of bools": of_dtype(KV_NORM, zeros("BOOL", 32), PLAIN),
    "norm in FP8": of_dtype(KV_NORM, zeros("F8_E4M3", 32), PLAIN),
    "sinks in FP8": of_dtype(SINKS, zeros("F8_E4M3", 4), PLAIN),
    "shape and dtype": both(of_shape(SINKS, zeros("I32", 5), [4]), of_dtype(SINKS, zeros("I32", 5), PLAIN)),
    "scale missing": missing(SCALE),
    "scale missing where a kernel should have none": (
        {COMPRESSOR_WKV: zeros("F8_E4M3", 64, 64)},
        [L1 + "compressor.wkv.scale: missing"],
    ),
    "scale of more blocks": of_shape(SCALE, zeros("F8_E8M0", 2, 1), [1, 1]),
    "scale a scalar": of_shape(SCALE, zeros("F8_E8M0"), [1, 1]),
    "scale in bfloat16": of_dtype(SCALE, zeros("BF16", 1, 1), OF_SCALES),
    "scale in FP8": of_dtype(SCALE, zeros("F8_E4M3", 1, 1), OF_SCALES),
    "scale of ints and of another shape": both(
        of_shape(SCALE, zeros("I32", 2, 2), [1, 1]), of_dtype(SCALE, zeros("I32", 2, 2), OF_SCALES)
    ),
    "scale in both spellings": unexpected(WQ_A + ".weight_scale_inv", zeros("F32", 1, 1)),
    "scale under a name that nobody gives": both(
        missing(SCALE), unexpected(WQ_A + ".weight_scale", zeros("F32", 1, 1))
    ),
    "scale of bytes": of_dtype(SCALE, zeros("U8", 1, 1), OF_SCALES),
    "scale of the inputs": unexpected(WQ_A + ".input_scale", zeros("F32", 1)),
    "kernel of bytes": of_dtype(KERNEL, zeros("U8", 32, 64), OF_A_KERNEL),
    "kernel in the other FP8, with scales": of_dtype(KERNEL, zeros("F8_E5M2", 32, 64), OF_A_KERNEL),
    "kernel in FP4": of_dtype(KERNEL, Held("F4", (32, 64), bytes(1024)), OF_A_KERNEL),
    "scale of a kernel that is not in FP8": unexpected(L1 + "compressor.wkv.scale", zeros("F32", 1, 1)),
    "scale of a norm": unexpected(L0 + "q_norm.scale", zeros("F32", 1, 1)),
    "layer beyond the config": unexpected(
        "layers.3.attn.wq_a.weight", zeros("BF16", 32, 64), "unexpected, the model has 3 layers"
    ),
    "layer far beyond the config": unexpected(
        "layers.999999999.attn.wq_a.weight", zeros("BF16", 32, 64), "unexpected, the model has 3 layers"
    ),
    "other model's name for all of a layer": unexpected(
        "model.layers.0.self_attn.q_a_proj.weight", zeros("BF16", 32, 64), "unexpected among deepseek names"
    ),
    "one tensor with and without model.": unexpected("model." + SINKS, zeros("F32", 4), f"the same as {SINKS}"),
    "kv_norm as transformers saves it": both(missing(KV_NORM), unexpected(L0 + "norm.weight", zeros("BF16", 32))),
}


@pytest.mark.parametrize(("change", "expected"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_with_a_tensor_is_said_by_its_name(
    change: Change, expected: list[str], checkpoint: Checkpoint
) -> None:
    assert sorted(problems_of(checkpoint(change))) == sorted(expected)


TOGETHER = ["kernel of ints", "norm missing", "norm in FP8", "sinks a scalar", "scale of a norm", "kernel unexpected"]
TOGETHER += ["sinks missing", "scale missing where a kernel should have none", "bias of the other layer type"]
TOGETHER += ["compressor in a sliding layer", "indexer in an HCA layer", "layer beyond the config"]
TOGETHER += ["other model's name for all of a layer"]


def test_all_that_is_wrong_is_said_at_once(checkpoint: Checkpoint) -> None:
    change: Change = {}
    for key in TOGETHER:
        assert not set(change) & set(WRONG[key][0]), key
        change |= WRONG[key][0]
    expected = [problem for key in TOGETHER for problem in WRONG[key][1]]
    assert sorted(problems_of(checkpoint(change))) == sorted(expected)


def test_of_very_many_problems_the_message_shows_some_and_counts_the_others(checkpoint: Checkpoint) -> None:
    more = {f"{L0}more{i}": zeros("F32", 1) for i in range(60)}
    path = checkpoint(more)
    with pytest.raises(CheckpointError) as raised:
        load_attention(path)
    assert names_of(list(raised.value.problems)) == set(more)
    lines = str(raised.value).splitlines()
    assert lines[:-1] == [f"{path}: {problem}" for problem in raised.value.problems[: len(lines) - 1]]
    assert lines[-1] == f"and {60 - (len(lines) - 1)} more"


def test_names_of_no_dialect_are_said_once(checkpoint: Checkpoint, fp8: Tensors) -> None:
    (problem,) = problems_of(checkpoint(tensors={"language_" + name: held for name, held in fp8.items()}))
    assert problem.startswith("expected tensors layers.N.attn.*, model.layers.N.attn.* or model.layers.N.self_attn.*")
    assert "language_layers.0.attn.attn_sink" in problem
    (problem,) = problems_of(checkpoint(tensors={"embed.weight": zeros("BF16", 8, 8)}))
    assert problem.endswith("got none; it has embed.weight")


def test_a_layer_that_is_not_there_at_all_is_said_once(checkpoint: Checkpoint, fp8: Tensors) -> None:
    path = checkpoint(dict.fromkeys(name for name in fp8 if name.startswith(L1)))
    assert problems_of(path) == ["layers.1.attn.*: missing, all of layer 1"]
    assert list(load_attention(path, layers=[0, 2])) == [0, 2]


def test_a_checkpoint_of_another_model_is_refused_by_name(checkpoint: Checkpoint) -> None:
    """DeepSeek-V3's names: same module, other projections."""
    theirs = {f"model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight": zeros("BF16", 2, 2) for i in range(3)}
    with pytest.raises(CheckpointError) as raised:
        load_attention(checkpoint(tensors=theirs))
    assert {f"{name}: unexpected" for name in theirs} <= set(raised.value.problems)
    assert "model.layers.2.self_attn.q_a_proj.weight: missing" in raised.value.problems


def test_a_wrong_config_is_told_by_the_shapes(checkpoint: Checkpoint) -> None:
    problems = problems_of(checkpoint(), dataclasses.replace(CONFIG, num_attention_heads=8))
    assert SINKS + ": expected shape [8], got [4]" in problems
    changed_names = ("attn_sink", "wo_a.weight", "wq_b.weight", "wq_b.scale")
    assert names_of(problems) == {layer + name for layer in (L0, L1, L2) for name in changed_names}


def test_a_config_of_fewer_layers_is_told_by_the_rest(checkpoint: Checkpoint, fp8: Tensors) -> None:
    problems = problems_of(checkpoint(), dataclasses.replace(CONFIG, layer_types=CONFIG.layer_types[:2]))
    assert set(problems) == {f"{name}: unexpected, the model has 2 layers" for name in fp8 if name.startswith(L2)}


@pytest.mark.parametrize(("dialect", "other"), [*itertools.permutations(Dialect, 2)])
def test_one_name_of_another_dialect_is_unexpected_and_its_own_missing(
    dialect: Dialect, other: Dialect, sound: dict[tuple[Dialect, str], Tensors], checkpoint: Checkpoint
) -> None:
    names = {
        Dialect.DEEPSEEK: "layers.1.attn.kv_norm.weight",
        Dialect.TRANSFORMERS: "model.layers.1.self_attn.kv_norm.weight",
        Dialect.TRANSFORMERS_SAVED: "model.layers.1.attn.norm.weight",
    }
    tensors = sound[dialect, "fp8"]
    problems = problems_of(checkpoint({names[dialect]: None, names[other]: tensors[names[dialect]]}, tensors))
    assert names_of(problems) == {names[dialect], names[other]}
    assert f"{names[dialect]}: missing" in problems
    assert any(problem.startswith(f"{names[other]}: unexpected") for problem in problems)


@pytest.mark.parametrize("dialect", Dialect)
def test_a_missing_scale_is_called_as_the_dialect_or_the_release_calls_it(
    dialect: Dialect, sound: dict[tuple[Dialect, str], Tensors], checkpoint: Checkpoint
) -> None:
    tensors = sound[dialect, "fp8"]
    weight = next(name for name, held in tensors.items() if held.dtype == "F8_E4M3")
    (problem,) = problems_of(checkpoint({scale_name(weight, dialect): None}, tensors))
    assert problem in (f"{scale_name(weight, dialect)}: missing", f"{weight.removesuffix('.weight')}.scale: missing")


@pytest.mark.parametrize(
    "name", [L0 + "x\nlayers.0.attn.attn_sink: missing", L0 + "x\u2028y", L0 + "x\r\x1b[2Ky"], ids=ascii
)
def test_a_name_cannot_forge_lines_of_the_message(name: str, checkpoint: Checkpoint) -> None:
    with pytest.raises(CheckpointError) as raised:
        load_attention(checkpoint({name: zeros("F32", 1)}))
    assert len(raised.value.problems) == len(str(raised.value).splitlines()) == 1
    assert "\x1b" not in str(raised.value)


def test_what_is_not_attention_is_passed_over_whatever_it_is(checkpoint: Checkpoint) -> None:
    passed_over = {
        "embed.weight": zeros("I8", 3),
        "layers.0.ffn.experts.0.w1.weight": Held("F4", (2,), bytes(1)),
        "layers.0.attn_norm.weight": zeros("BF16", 64),
        "layers.7.ffn_norm.weight": zeros("BF16", 64),
        "mtp.0.attn.wq_a.weight": zeros("F64", 1),
        "mtp.layers.0.attn.wq_a.weight": zeros("F64", 1),
    }
    assert list(load_attention(checkpoint(passed_over))) == [0, 1, 2]


def test_layers_that_were_not_asked_for_are_not_judged(checkpoint: Checkpoint) -> None:
    path = checkpoint({L1 + "attn_sink": None, L2 + "x": zeros("F32", 1), "layers.9.attn.x": zeros("F32", 1)})
    assert list(load_attention(path, layers=[0])) == [0]
    assert problems_of(path, layers=[1]) == [L1 + "attn_sink: missing"]
