"""`foveal cache`."""

import json

import pytest

from foveal.cli.main import main


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


def test_mistakes(capsys):
    assert main(["cache", "--length", "-1"]) == 2
    assert "--length: expected a whole number" in capsys.readouterr().err
