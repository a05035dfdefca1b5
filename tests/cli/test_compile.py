"""`foveal compile`."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

import foveal
from foveal.backends.splash.kernel import CAN_STACK_HEADS
from foveal.cli import compile as command
from foveal.cli import compile_case
from foveal.cli.main import main, make_parser
from foveal.cli.presets import read_model
from foveal.config import AttentionConfig
from foveal.extras import missing

TINY = ["compile", "--preset", "tiny", "--target", "v5e"]


def rows_of(capsys, *arguments: str) -> list[dict]:
    main([*arguments, "--json"])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_a_line_of_json_a_case(capsys):
    rows = rows_of(capsys, *TINY, "--seq", "512,1024", "--implementation", "splash,chunked")
    assert [(r["length"], r["implementation"], r["verdict"]) for r in rows] == [
        (512, "splash", "compiles"),
        (512, "chunked", "compiles"),
        (1024, "splash", "compiles"),
        (1024, "chunked", "compiles"),
    ]
    for row in rows:
        assert row["peak_bytes"] > row["temporary_bytes"] >= 0
        assert row["roofline_seconds"] > 0
        assert (row["mask_seconds"] is not None) == (row["implementation"] == "splash")
        assert (row["kernel_cycles"] is not None) == (row["implementation"] == "splash")


@pytest.mark.slow
def test_a_whole_layer_on_several_chips(capsys):
    """Heads and batch apart: a chip has less to hold than alone."""
    sizes = ("--what", "layer", "--batch", "2", "--seq", "512", "--implementation", "splash")
    alone, apart = rows_of(capsys, *TINY, *sizes) + rows_of(capsys, *TINY, *sizes, "--mesh", "data=2,tensor=2")
    assert alone["verdict"] == apart["verdict"] == "compiles"
    assert apart["argument_bytes"] < alone["argument_bytes"]


@pytest.mark.slow
def test_a_layer_with_the_indexers_loss(capsys):
    layer = ("--what", "layer", "--layer", "csa", "--seq", "512", "--implementation", "chunked")
    without, with_loss = rows_of(capsys, *TINY, *layer) + rows_of(capsys, *TINY, *layer, "--indexer-loss")
    assert without["verdict"] == with_loss["verdict"] == "compiles"
    assert with_loss["output_bytes"] > without["output_bytes"]
    assert main(["compile", "--indexer-loss"]) == 2
    assert "--indexer-loss: expected --what layer --layer csa" in capsys.readouterr().err


def test_a_refusal_is_reported_with_its_reason(capsys):
    assert main([*TINY, "--layer", "csa", "--implementation", "splash", "--seq", "512"]) == 1
    printed = capsys.readouterr().out
    assert "error" in printed
    assert "selected" in printed


def test_the_table(capsys, monkeypatch):
    report = {"verdict": "compiles", "message": "", "mask_seconds": None, "peak_bytes": 3 << 30, "temporary_bytes": 1}
    monkeypatch.setattr(
        command,
        "_in_a_process",
        lambda case, timeout, cycles: (
            report | {"kernel_cycles": 2_250_000 if cycles else None} | {"roofline_seconds": 0.25}
        ),
    )
    assert main(["compile", "--seq", "4096", "--implementation", "chunked"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["4096"])
    assert line.split() == ["4096", "chunked", "compiles", "-", "-", "-", "3.00", "0.00", "2.25", "250.00"]


@pytest.fixture
def asked(monkeypatch):
    """The cases that would be compiled."""
    cases = []

    def compiled(case, timeout, cycles):
        cases.append(case)
        return {"verdict": "compiles", "message": ""}

    monkeypatch.setattr(command, "_in_a_process", compiled)
    return cases


def test_without_a_name_the_choice_is_compiled_and_named(asked, capsys, monkeypatch):
    for layer, name in (("sliding", "splash"), ("hca", "splash"), ("csa", "chunked")):
        (row,) = rows_of(capsys, *TINY, "--layer", layer)
        assert (row["implementation"], row["chosen"]) == (name, True)
    (row,) = rows_of(capsys, *TINY, "--layer", "csa", "--implementation", "chunked")
    assert (row["implementation"], row["chosen"]) == ("chunked", False)
    assert main([*TINY, "--layer", "csa"]) == 0
    assert "chunked (chosen)" in capsys.readouterr().out
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "tokamax" else object())
    (row,) = rows_of(capsys, *TINY)
    assert row["implementation"] == "chunked"
    assert all(case.chosen == (case is not asked[3]) for case in asked)


def test_the_choice_for_selected_entries_compiles_and_no_tpu_is_looked_for():
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    environment["PYTHONPATH"] = str(pathlib.Path(foveal.__file__).parents[1])
    line = [sys.executable, "-m", "foveal", *TINY, "--layer", "csa", "--seq", "64", "--json"]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    row = json.loads(done.stdout)
    assert (row["implementation"], row["chosen"], row["verdict"]) == ("chunked", True, "compiles")


def test_the_process_of_a_case_has_the_sizes_of_a_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(AttentionConfig.tiny().to_hf_config()))
    rows = []
    for sizes in (["--preset", "tiny"], ["--config", str(path)]):
        (case,) = command._cases(make_parser().parse_args(["compile", "--seq", "64", "--layer", "csa", *sizes]))
        rows.append(compile_case.chosen_implementation(case))
        config = read_model(case.preset, case.config)
        assert command.CompileCase.from_json(json.dumps(dataclasses.asdict(case))) == case
        assert config == AttentionConfig.tiny()
    assert rows == ["chunked", "chunked"]


def test_each_case_is_a_line_as_soon_as_it_is_compiled(asked, capsys):
    assert main([*TINY, "--seq", "512,1k", "--implementation", "chunked"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "hca, S = 512, chunked: compiles",
        "hca, S = 1024, chunked: compiles",
    ]


@pytest.mark.parametrize(
    ("layer", "implementation", "dumped"),
    [("hca", "splash", True), ("csa", "splash_dynamic", False), ("hca", "chunked", False), ("csa", "chunked", False)],
)
def test_schedules_are_written_only_where_cycles_come_of_them(layer, implementation, dumped, monkeypatch):
    """They double the compiler's time."""
    seen = []

    def run(arguments, **options):
        seen.append((arguments, options["env"].get("LIBTPU_INIT_ARGS", "")))
        return subprocess.CompletedProcess(arguments, 0, stdout="{}", stderr="")

    monkeypatch.setattr(command.subprocess, "run", run)
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    case = command.CompileCase("v5e", "core", layer, "tiny", 512, implementation, False, 1, "bfloat16", ())
    command._in_a_process(case, 60, cycles=True)
    ((arguments, flags),) = seen
    assert ("--dump" in arguments) == bool(flags) == dumped


def test_a_compiler_that_dies_or_hangs_is_a_verdict(monkeypatch):
    case = command.CompileCase("v5e", "core", "hca", "tiny", 512, "chunked", False, 1, "bfloat16", ())
    assert command._in_a_process(case, 0, cycles=False)["verdict"] == "timeout"
    monkeypatch.setattr(command.sys, "executable", "false")  # ends with code 1 and no word
    assert command._in_a_process(case, 60, cycles=False) == {"verdict": "error", "message": "exit code 1: no message"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--seq", "0"], "--seq"),
        (["--seq", "x"], "--seq"),
        (["--implementation", "nonsense"], "--implementation: expected some of"),
        (["--mesh", "sequence=2"], "--mesh: expected each of data, tensor once at most, got sequence"),
        (["--mesh", "data=2,data=2"], "--mesh: expected each of data, tensor once at most, got data, data"),
        (["--mesh", "data"], "--mesh: expected AXIS=N, got 'data'"),
        (["--mesh", "data=2"], "--mesh: expected a divisor of --batch 1 for data, got 2"),
        (["--mesh", "tensor=3"], "--mesh: expected a divisor of 64 heads for tensor, got 3"),
        (["--mesh", "tensor=64"], "--mesh: expected 16 chips of v5p at most, got 64"),
        (["--target", "v1"], "--target"),
        (["--blocks", "128,128", "--implementation", "splash"], "--blocks: expected 5 numbers"),
        (
            ["--blocks", "128,128,256,100,1", "--implementation", "splash"],
            "--blocks: kv_backward: expected an int >= 128, got 100",
        ),
        (["--blocks", "128,128,256,256,1"], "--blocks: expected --implementation splash or splash_dynamic, got none"),
        (
            ["--blocks", "128,128,128,128,1", "--implementation", "chunked"],
            "--blocks: expected --implementation splash",
        ),
        (
            ["--blocks", "128,128,256,256,3", "--implementation", "splash"],
            "--blocks: expected a divisor of a chip's 64 heads for HEADS, got 3",
        ),
        (["--compiler-option", "fast"], "--compiler-option: expected NAME=VALUE"),
    ],
)
def test_bad_arguments_end_in_one_line_and_code_2(capsys, arguments, complaint):
    assert main(["compile", *arguments]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert len(error.splitlines()) == 1


def test_a_report_without_cycles_says_why(capsys, monkeypatch, tmp_path):
    """And a directory that no flag can name is refused."""
    monkeypatch.setattr(command, "dump_flags", lambda directory: "")  # so nothing is written
    (row,) = rows_of(capsys, *TINY, "--seq", "512")
    assert (row["verdict"], row["kernel_cycles"]) == ("compiles", None)
    assert row["message"] == "no cycles: the compiler wrote down no schedule of splash's kernels"
    monkeypatch.undo()
    (tmp_path / "a b").mkdir()
    monkeypatch.setattr(command.tempfile, "tempdir", str(tmp_path / "a b"))
    assert main([*TINY, "--seq", "512"]) == 2
    assert "directory: expected a path without spaces" in capsys.readouterr().err


def test_without_the_compiler_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert main(["compile"]) == 2
    assert missing("libtpu", "tpu-aot") in capsys.readouterr().err


@pytest.mark.slow
def test_chosen_blocks_and_options_of_the_compiler(capsys):
    """The compiler gets them: it knows no such option."""
    tiles = ("--seq", "1024", "--implementation", "splash", "--no-cycles", "--blocks", "512,256,512,256,1")
    own, other = rows_of(capsys, *TINY, *tiles) + rows_of(capsys, *TINY, *tiles, "--compiler-option", "xla_none=1")
    assert (own["verdict"], own["blocks"], own["kernel_cycles"]) == ("compiles", [512, 256, 512, 256, 1], None)
    assert other["verdict"] == "error"
    assert "xla_none" in other["message"]


@pytest.mark.slow
def test_cycles_of_the_forward_kernels(capsys):
    """Flash's sizes, 4096 rows, v5p: against slower tiles. Without stacked heads (before Tokamax 0.0.17) more."""
    (row,) = rows_of(capsys, "compile", "--seq", "4096")
    assert row["kernel_cycles"] < (2.3e6 if CAN_STACK_HEADS else 4.5e6)  # measured: 2.25 and 4.16 million
    (narrow,) = rows_of(
        capsys, "compile", "--seq", "4096", "--implementation", "splash", "--blocks", "512,512,256,256,1"
    )
    assert narrow["kernel_cycles"] > 1.4 * row["kernel_cycles"]


@pytest.mark.report
def test_static_masks_at_the_lengths_they_are_for(capsys):
    """Flash's sizes on one v5p of 95 GB: 131072 rows forward and backward, and half the memory of a dynamic mask."""
    (row,) = rows_of(capsys, "compile", "--seq", "131072", "--backward", "--no-cycles")
    assert row["verdict"] == "compiles"
    assert row["peak_bytes"] < 36 << 30  # measured: 35.6 GiB
    static, dynamic = rows_of(
        capsys, "compile", "--seq", "65536", "--implementation", "splash,splash_dynamic", "--no-cycles"
    )
    assert static["peak_bytes"] < 0.52 * dynamic["peak_bytes"]
    assert static["temporary_bytes"] < 1.8 * (1 << 30)  # what eight heads need at a time


@pytest.mark.report
def test_a_whole_layer_at_131072_rows(capsys):
    """Without options of the compiler."""
    (row,) = rows_of(capsys, "compile", "--what", "layer", "--seq", "131072", "--backward", "--no-cycles")
    assert row["verdict"] == "compiles"
    assert row["peak_bytes"] < 55 << 30  # measured: 54.6 GiB
