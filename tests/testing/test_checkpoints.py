"""The generator of checkpoints writes what it says; that it is read right, tests/checkpoint/ shows."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from foveal import AttentionConfig, Dialect
from foveal.checkpoint.release import attention_tensors
from foveal.testing.checkpoints import expected_params, write_random_checkpoint
from tests.checkpoint.rewriting import tensors_of

CONFIG = AttentionConfig.tiny()


@pytest.mark.parametrize("scales", ["e8m0", "float32"])
@pytest.mark.parametrize("dialect", Dialect)
def test_fp8_checkpoints_are_like_released_ones(dialect, scales, tmp_path):
    write_random_checkpoint(tmp_path / "made", dialect=dialect, scales=scales)
    names = {"float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0"}
    got = {name: (names[array.dtype.name], array.shape) for name, array in tensors_of(tmp_path / "made").items()}
    want = {}
    for layer in range(CONFIG.num_layers):
        want |= attention_tensors(CONFIG, layer, dialect, "F8_E8M0" if scales == "e8m0" else "F32")
    assert got == want


def test_other_storage_has_no_scales(tmp_path):
    for weights, kinds in (("bfloat16", {"bfloat16", "float32"}), ("float32", {"float32"})):
        write_random_checkpoint(tmp_path / weights, weights=weights)
        arrays = tensors_of(tmp_path / weights)
        assert {array.dtype.name for array in arrays.values()} == kinds
        assert len(arrays) == 8 + 18 + 12


def test_seeds_and_layers_differ():
    one, other = expected_params(CONFIG, 0), expected_params(CONFIG, 0, seed=1)
    assert not any(np.array_equal(one[name], other[name]) for name in one)
    # Of two layers of one type.
    twice = AttentionConfig(**{**vars(CONFIG), "layer_types": CONFIG.layer_types[:1] * 2})
    assert not np.array_equal(expected_params(twice, 0)["sinks"], expected_params(twice, 1)["sinks"])


def test_fp8_rounds_only_what_is_fp8_in_the_releases():
    full, fp8 = expected_params(CONFIG, 1, weights="float32"), expected_params(CONFIG, 1)
    for name, value in full.items():
        if name in ("sinks",) or name.endswith("position_bias"):
            np.testing.assert_array_equal(fp8[name], value)
        elif name.endswith("scale") or (name.startswith("compressor") and "q_b" not in name):
            np.testing.assert_array_equal(fp8[name], value.astype(ml_dtypes.bfloat16).astype(np.float32))
        else:
            assert 0.005 < np.abs(fp8[name] - value).max() / np.abs(value).max() < 1 / 16, name


def test_bad_arguments(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"weights": "int4"}, "weights: expected one of 'fp8', 'bfloat16', 'float32', got 'int4'"),
        ({"scales": "fp16"}, "scales: expected one of 'e8m0', 'float32', got 'fp16'"),
        ({"dialect": "gguf"}, "dialect: expected one of"),
        ({"layers": [3]}, "layer_index: expected 0 <= layer_index < 3"),
    )
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            write_random_checkpoint(tmp_path / "made", **options)
    assert not (tmp_path / "made").exists()
