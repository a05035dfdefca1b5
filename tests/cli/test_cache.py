"""`foveal cache`."""

import json

import pytest

from foveal.cli.main import main
from foveal.config import AttentionConfig


def parts_of(capsys, *arguments: str) -> dict[str, dict[str, int]]:
    assert main(["cache", *arguments, "--json"]) == 0
    return {row.pop("part"): row for row in map(json.loads, capsys.readouterr().out.splitlines())}


@pytest.mark.parametrize(("preset", "gib"), [("flash", 6.72), ("pro", 9.62)])
def test_the_released_models_at_a_million_tokens(preset, gib, capsys):
    """What grows with the length is what is published of them: 320 bytes a token and CSA layer, 8 an HCA layer."""
    parts = parts_of(capsys, "--preset", preset, "--length", str(1 << 20))
    grown = parts["entries"]["total"] + parts["index_keys"]["total"]
    assert round(grown / 2**30, 2) == gib
    # All else is of one size: windows of 128 KiB, and states of 64 + 16 KiB a CSA layer, 512 an HCA layer.
    csa, hca, layers = (21, 20, 43) if preset == "flash" else (30, 31, 61)
    fixed = (128 * layers + (64 + 16) * csa + 512 * hca) * 1024 + 8 * layers
    assert parts["total"]["total"] == grown + fixed


def test_rows_and_rollback_cost_what_the_formula_says(capsys):
    one = parts_of(capsys, "--preset", "tiny", "--dtype", "float32", "--length", "64")
    more = parts_of(capsys, "--preset", "tiny", "--dtype", "float32", "--length", "64", "--max-rollback", "3")
    # A raw key of 32 floats in each of three layers; 2 x 64 floats of CSA's projections, as many of its indexer's, and
    # 2 x 32 of HCA's.
    assert more["total"]["total"] - one["total"]["total"] == 3 * 4 * (3 * 32 + 2 * 64 + 2 * 64 + 2 * 32)
    assert (
        parts_of(capsys, "--preset", "tiny", "--batch", "5")["total"]["total"]
        == 5 * (parts_of(capsys, "--preset", "tiny")["total"]["total"])
    )


def test_the_table(capsys):
    assert main(["cache", "--preset", "pro", "--length", "1000000"]) == 0
    printed = capsys.readouterr().out
    assert "pro: 1 x 1000000 tokens, bfloat16" in printed
    line = next(line for line in printed.splitlines() if "index_keys" in line)
    cells = [cell.strip() for cell in line.replace("┃", "│").split("│") if cell.strip()]
    # 30 layers x 250000 entries x 128 dims x 2 bytes.
    assert cells == ["index_keys", "1.79 GiB", "-", "1.79 GiB", "1,920.0"]
    assert main(["cache", "--length", "0"]) == 0


@pytest.fixture
def tiny_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(AttentionConfig.tiny().to_hf_config()))
    return path


def test_a_published_config_in_the_place_of_a_preset(tiny_config, capsys):
    expected = parts_of(capsys, "--preset", "tiny", "--length", "64")
    for path in (tiny_config, tiny_config.parent):
        assert parts_of(capsys, "--config", str(path), "--length", "64") == expected
    assert main(["cache", "--config", str(tiny_config)]) == 0
    assert capsys.readouterr().out.startswith(f"{tiny_config}: 1 x 1048576 tokens")


@pytest.mark.parametrize("command", ["cache", "compile"])
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--length", "-1"], "--length: expected a whole number"),
        (["--config", "{folder}/none.json"], "--config: {folder}/none.json: there is no such file or directory"),
        (
            ["--config", "{folder}/list.json"],
            "--config: {folder}/list.json: expected a JSON file, got a JSON list at the top level",
        ),
        (["--config", "{folder}/other.json"], "--config: {folder}/other.json: model_type: expected 'deepseek_v4'"),
        (["--config", "{folder}/list.json", "--preset", "flash"], "not allowed with argument"),
    ],
)
def test_mistakes(command, arguments, complaint, tmp_path, capsys):
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "other.json").write_text('{"model_type": "llama"}')
    if command == "compile":
        arguments = [part.replace("--length", "--seq") for part in arguments]
        complaint = complaint.replace("--length", "--seq")
    assert main([command, *(part.replace("{folder}", str(tmp_path)) for part in arguments)]) == 2
    error = capsys.readouterr().err
    assert complaint.replace("{folder}", str(tmp_path)) in error
    assert error.count("\n") == 1
