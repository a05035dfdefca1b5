"""Mistakes in the arguments and in the set-up: one line says what is wrong."""

import sys

import pytest

from foveal.cli.main import main
from foveal.extras import missing

MISTAKES = [
    ("nonsense", "'nonsense'"),
    ("--nonsense", "unrecognized arguments: --nonsense"),
    ("demo --nonsense\nmore", "unrecognized arguments: --nonsense more"),
    ("demo --len 64", "--len"),
    ("demo --length 0", "--length: expected a whole number of tokens from 1 to 1024, got '0'"),
    ("demo --length 1025", "from 1 to 1024"),
    ("demo --length 1.5", "got '1.5'"),
    ("demo --rows 0", "--rows"),
    ("demo --seed -1", "--seed"),
    ("demo --output", "--output"),
    ("demo {folder}/missing", "missing': No such file"),
    ("demo {folder}/missing\nname", "missing\\nname': No such file"),
    ("demo {folder}/nul\0", "null byte"),
    ("demo {folder}", "Is a directory"),
    ("demo {folder}/empty", "no text in"),
    ("demo {folder}/blank", "no text in"),
    ("demo {folder}/text --output {folder}/picture.nonsense", "expected an ending such as .png"),
    ("demo {folder}/text --output {folder}/text/picture.png", "text/picture.png': "),
    ("demo {folder}/text --output {folder}/folder.png", "folder.png': Is a directory"),
    ("cache --length -1", "--length: expected a whole number"),
    ("compile --seq -1", "--seq: expected a whole number"),
    ("compile --seq 0", "--seq"),
    ("compile --seq x", "--seq"),
    ("compile --implementation nonsense", "--implementation: expected some of"),
    ("compile --mesh sequence=2", "--mesh: expected each of data, tensor once at most, got sequence"),
    ("compile --mesh data=2,data=2", "--mesh: expected each of data, tensor once at most, got data, data"),
    ("compile --mesh data", "--mesh: expected AXIS=N, got 'data'"),
    ("compile --mesh data=2", "--mesh: expected a divisor of --batch 1 for data, got 2"),
    ("compile --mesh tensor=3", "--mesh: expected a divisor of 64 heads for tensor, got 3"),
    ("compile --mesh tensor=64", "--mesh: expected 16 chips of v5p at most, got 64"),
    ("compile --target v1", "--target"),
    ("compile --indexer-loss", "--indexer-loss: expected --what layer --layer csa"),
    ("compile --blocks 128,128 --implementation splash", "--blocks: expected 5 numbers"),
    (
        "compile --blocks 128,128,256,100,1 --implementation splash",
        "--blocks: kv_backward: expected an int >= 128, got 100",
    ),
    (
        "compile --blocks 128,128,256,256,1",
        "--blocks: expected --implementation splash or splash_dynamic or fused, got none",
    ),
    ("compile --blocks 128,128,128,128,1 --implementation chunked", "--blocks: expected --implementation splash"),
    (
        "compile --blocks 128,128,256,256,3 --implementation splash",
        "--blocks: expected a divisor of a chip's 64 heads for HEADS, got 3",
    ),
    ("compile --compiler-option fast", "--compiler-option: expected NAME=VALUE"),
    ("verify", "expected either PATH or --random"),
    ("verify --random here", "expected either PATH or --random, got both"),
    ("verify here --preset flash", "--preset: expected with --random only"),
    ("verify no/such/place", "no/such/place: there is no such file or directory"),
    ("verify --random --layer 3", "--layer: expected 0 <= N < 3, the number of layers, got 3"),
    ("verify --random --layer 1 1", "--layer: expected each layer once, got 1 1"),
    ("verify --random --tokens 0", "--tokens"),
    ("verify --random --tokens 15", "--tokens: expected 16 to 4096, so that each layer has entries, got 15"),
]
CONFIGS = [
    ("none.json", "none.json: there is no such file or directory"),
    ("list.json", "list.json: expected a JSON file, got a JSON list at the top level"),
    ("other.json", "other.json: model_type: expected 'deepseek_v4'"),
]
MISTAKES += [
    (f"{command} --config {{folder}}/{name}", f"--config: {{folder}}/{complaint}")
    for command in ("cache", "compile")
    for name, complaint in CONFIGS
]
MISTAKES += [(f"{command} --config x --preset flash", "not allowed with argument") for command in ("cache", "compile")]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "blank").write_bytes(b" \n\n\t\r\n")
    (tmp_path / "text").write_text("Some text.")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "other.json").write_text('{"model_type": "llama"}')
    return tmp_path


@pytest.mark.parametrize(("line", "complaint"), MISTAKES)
def test_a_mistake_ends_in_one_line_and_code_2(line, complaint, folder, capsys):
    assert main([part.replace("{folder}", str(folder)) for part in line.split(" ")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("foveal")
    assert error.endswith("\n")
    assert error.count("\n") == 1
    assert complaint.replace("{folder}", str(folder)) in error


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [
        ("demo", "rich", "demo"),
        ("demo", "matplotlib", "demo"),
        ("compile", "libtpu", "tpu-aot"),
        ("verify", "safetensors", "checkpoint"),
    ],
)
def test_missing_packages_are_named_with_their_extra(command, module, extra, folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    assert main([command, *([] if command == "compile" else [str(folder / "text")])]) == 2
    assert capsys.readouterr().err == f"foveal {command}: error: {missing(module, extra)}\n"
