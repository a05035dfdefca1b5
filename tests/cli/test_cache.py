"""`foveal cache`."""

import json

import pytest

from foveal.config import AttentionConfig


@pytest.fixture
def parts(rows):
    """The rows of a table by the parts of a cache."""
    return lambda *arguments: {row.pop("part"): row for row in rows(" ".join(["cache", *arguments]))}


@pytest.mark.parametrize(
    ("preset", "gib", "csa", "hca", "layers"), [("flash", 6.72, 21, 20, 43), ("pro", 9.62, 30, 31, 61)]
)
def test_the_released_models_at_a_million_tokens(preset, gib, csa, hca, layers, parts):
    """What grows with the length is what is published of them: 320 bytes a token and CSA layer, 8 an HCA layer."""
    found = parts("--preset", preset, "--length", str(1 << 20))
    grown = found["entries"]["total"] + found["index_keys"]["total"]
    assert round(grown / 2**30, 2) == gib
    # All else is of one size: windows of 128 KiB, and states of 64 + 16 KiB a CSA layer, 512 an HCA layer.
    fixed = (128 * layers + (64 + 16) * csa + 512 * hca) * 1024 + 8 * layers
    assert found["total"]["total"] == grown + fixed


def test_rows_and_rollback_cost_what_the_formula_says(parts):
    small = ("--preset", "tiny", "--dtype", "float32", "--length", "64")
    one, more, five = (
        parts(*small, *others)["total"]["total"] for others in ((), ("--max-rollback", "3"), ("--batch", "5"))
    )
    # A raw key of 32 floats in each of three layers; 2 x 64 floats of CSA's projections, as many of its indexer's, and
    # 2 x 32 of HCA's.
    assert more - one == 3 * 4 * (3 * 32 + 2 * 64 + 2 * 64 + 2 * 32)
    assert five == 5 * one


def test_the_table(run):
    printed = run("cache --preset pro --length 1000000")
    assert "pro: 1 x 1000000 tokens, bfloat16" in printed
    line = next(line for line in printed.splitlines() if "index_keys" in line)
    cells = [cell.strip() for cell in line.replace("┃", "│").split("│") if cell.strip()]
    # 30 layers x 250000 entries x 128 dims x 2 bytes.
    assert cells == ["index_keys", "1.79 GiB", "-", "1.79 GiB", "1,920.0"]
    run("cache --length 0")


def test_a_published_config_in_the_place_of_a_preset(tmp_path, parts, run):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(AttentionConfig.tiny().to_hf_config()))
    expected = parts("--preset", "tiny", "--length", "64")
    for path in (config, tmp_path):
        assert parts("--config", str(path), "--length", "64") == expected
    assert run("cache --config", config).startswith(f"{config}: 1 x 1048576 tokens")
