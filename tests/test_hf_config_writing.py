"""What is written of a config is read as the same, here and by transformers."""

import dataclasses
import json

import pytest

from foveal.config import AttentionConfig
from foveal.layers import RopeConfig, YarnConfig


@pytest.mark.parametrize("name", ["tiny", "deepseek_v4_flash", "deepseek_v4_pro"])
def test_what_is_written_is_read_as_the_same(name, tmp_path):
    config = getattr(AttentionConfig, name)()
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf_config()))
    assert AttentionConfig.from_hf_config(tmp_path) == config


@pytest.mark.parametrize(
    "changes",
    [
        {"rope": RopeConfig(500.0, YarnConfig(4.0, 100, 16.0, 2.0))},
        {"compress_rope": RopeConfig(1e6)},
        {"csa_ratio": 3, "hca_ratio": 3},
        {"head_dim": 48, "qk_rope_head_dim": 22, "rms_norm_eps": 1e-5, "initializer_range": 0.0},
    ],
    ids=str,
)
def test_unusual_configs_too(changes):
    config = dataclasses.replace(AttentionConfig.tiny(), **changes)
    assert AttentionConfig.from_hf_config(json.loads(json.dumps(config.to_hf_config()))) == config


@pytest.mark.parametrize("name", ["tiny", "deepseek_v4_flash", "deepseek_v4_pro"])
def test_transformers_reads_what_is_written(name):
    theirs = pytest.importorskip("transformers").DeepseekV4Config
    config = getattr(AttentionConfig, name)()
    read = theirs(**config.to_hf_config()).to_dict()
    assert AttentionConfig.from_hf_config(read) == config
    assert read["layer_types"] == [str(layer_type) for layer_type in config.layer_types]
