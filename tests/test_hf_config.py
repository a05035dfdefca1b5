"""Reading published configs: three spellings of the released models, and all that is not DeepSeek-V4."""

import copy
import functools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from foveal.config import AttentionConfig
from foveal.layers import LayerType, RopeConfig, YarnConfig
from tests.published import (
    FLASH_HF,
    FLASH_OFFICIAL,
    FLASH_SAVED,
    PRO_HF,
    PRO_OFFICIAL,
    PRO_SAVED,
    YARN,
    changed,
    nested,
)

SLIDING, CSA, HCA = LayerType.SLIDING, LayerType.CSA, LayerType.HCA
hf, official, saved = (functools.partial(changed, config) for config in (FLASH_HF, FLASH_OFFICIAL, FLASH_SAVED))
"""Flash's config in each spelling, with some keys removed and others set."""


def yarn(**values: Any) -> dict[str, Any]:
    return hf(rope_scaling=YARN | values)


PUBLISHED: dict[str, tuple[Any, ...]] = {
    "flash": (AttentionConfig.deepseek_v4_flash(), FLASH_HF, FLASH_OFFICIAL, FLASH_SAVED),
    "pro": (AttentionConfig.deepseek_v4_pro(), PRO_HF, PRO_OFFICIAL, PRO_SAVED),
}


@pytest.mark.parametrize("spelling", [1, 2, 3], ids=["hf", "official", "transformers"])
@pytest.mark.parametrize("model", PUBLISHED)
def test_every_spelling_of_a_model_reads_as_the_preset(model: str, spelling: int) -> None:
    preset, published = PUBLISHED[model][0], PUBLISHED[model][spelling]
    before = copy.deepcopy(published)
    assert AttentionConfig.from_hf_config(published) == preset
    assert published == before


def test_reads_a_file_and_a_directory(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FLASH_HF))
    for given in (path, str(path), tmp_path):
        assert AttentionConfig.from_hf_config(given) == AttentionConfig.deepseek_v4_flash()


def test_a_missing_file_says_so(tmp_path: pathlib.Path) -> None:
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(FileNotFoundError):
            AttentionConfig.from_hf_config(path)


@pytest.mark.parametrize("content", [b"{'dim': 1}", b"", b"[1]", b"null", b"\xff\xfe\xff", b"[" * 10**5], ids=range(6))
def test_a_file_that_holds_no_object_is_named(tmp_path: pathlib.Path, content: bytes) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.json: expected a JSON"):
        AttentionConfig.from_hf_config(path)


def test_errors_name_the_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(hf(o_groups=7)))
    with pytest.raises(ValueError, match=r"wrong\.json: o_groups: "):
        AttentionConfig.from_hf_config(path)


@pytest.mark.usefixtures("unchecked_annotations")
def test_a_config_object_is_told_how_to_come_in() -> None:
    with pytest.raises(ValueError, match=r"mapping_or_path: .*to_dict"):
        AttentionConfig.from_hf_config(AttentionConfig.tiny())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (hf(rope_scaling=None), None),
        (hf(rope_scaling={"type": "default"}), None),
        (official(original_seq_len=0), None),
        (nested(FLASH_SAVED, "compress", "type", rope_type="default"), None),
        (yarn(mscale=1.0), YarnConfig(16, 65536, 32, 1)),
        (yarn(factor=4), YarnConfig(4, 65536, 32, 1)),
    ],
)
def test_yarn_is_what_the_config_states(config: dict[str, Any], expected: YarnConfig | None) -> None:
    read = AttentionConfig.from_hf_config(config)
    assert read.rope == RopeConfig(10_000)
    assert read.compress_rope == RopeConfig(160_000, expected)


def test_transformers_can_give_the_main_table_yarn() -> None:
    yarn = {key: value for key, value in YARN.items() if key != "type"}
    read = AttentionConfig.from_hf_config(nested(FLASH_SAVED, "main", rope_type="yarn", attention_factor=1.0, **yarn))
    assert read.rope == RopeConfig(10_000, YarnConfig(16, 65536, 32, 1))


def test_optional_keys_have_the_defaults_of_the_class() -> None:
    read = AttentionConfig.from_hf_config(hf("rms_norm_eps", "initializer_range", "model_type"))
    assert read == AttentionConfig.deepseek_v4_flash()
    assert AttentionConfig.from_hf_config(official(norm_eps=1e-5)).rms_norm_eps == 1e-5


def test_null_means_absent() -> None:
    read = AttentionConfig.from_hf_config(hf(layer_types=None, dim=None, model_type=None))
    assert read == AttentionConfig.deepseek_v4_flash()


def test_rotated_dims_may_come_as_a_fraction() -> None:
    read = AttentionConfig.from_hf_config(saved("qk_rope_head_dim"))
    assert read.qk_rope_head_dim == 64


@pytest.mark.parametrize(
    "rates",
    [
        {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 8}},
        {"compress_rate_csa": 2, "compress_rate_hca": 8},
    ],
)
def test_stated_rates_are_the_known_ratios(rates: dict[str, Any]) -> None:
    by_ratio = hf(compress_ratios=[0, 2, 8, 0], num_hidden_layers=3, **rates)
    names = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    by_name = changed(by_ratio, "compress_ratios", layer_types=names)
    both = changed(by_ratio, layer_types=[*names, "sliding_attention"])
    for config in (by_ratio, by_name, both):
        read = AttentionConfig.from_hf_config(config)
        assert (read.layer_types, read.csa_ratio, read.hca_ratio) == ((SLIDING, CSA, HCA), 2, 8)


def test_layer_types_that_need_no_ratio_need_none_stated() -> None:
    read = AttentionConfig.from_hf_config(hf("compress_ratios", layer_types=["sliding_attention"], num_hidden_layers=1))
    assert read.layer_types == (SLIDING,)


MISSING = {
    "hidden_size": "hidden_size or dim",
    "num_hidden_layers": "num_hidden_layers or n_layers",
    "num_attention_heads": "num_attention_heads or n_heads",
    "head_dim": "head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim or rope_head_dim or partial_rotary_factor",
    "q_lora_rank": "q_lora_rank",
    "o_groups": "o_groups",
    "o_lora_rank": "o_lora_rank",
    "sliding_window": "sliding_window or window_size",
    "index_n_heads": "index_n_heads",
    "index_head_dim": "index_head_dim",
    "index_topk": "index_topk",
    "rope_theta": "rope_theta or rope_parameters.main.rope_theta",
    "compress_rope_theta": "compress_rope_theta or rope_parameters.compress.rope_theta",
    "compress_ratios": "layer_types or compress_ratios",
    "rope_scaling": "rope_scaling or rope_parameters.compress or original_seq_len .*'factor': 16.* null for no YaRN",
}


@pytest.mark.parametrize("key", MISSING)
def test_a_missing_key_is_named_by_all_its_spellings(key: str) -> None:
    with pytest.raises(ValueError, match=f"missing keys, none of which has a safe default: {MISSING[key]}"):
        AttentionConfig.from_hf_config(hf(key))


def test_all_missing_keys_are_named_at_once() -> None:
    with pytest.raises(ValueError, match="missing keys") as caught:
        AttentionConfig.from_hf_config({})
    assert all(key in str(caught.value) for key in MISSING)


REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "other model": (hf(model_type="deepseek_v3"), "model_type: expected 'deepseek_v4'"),
    "V4.1": (hf(model_type="deepseek_v41"), "model_type: expected 'deepseek_v4'"),
    "key-value heads": (hf(num_key_value_heads=8), "num_key_value_heads: expected 1, got 8"),
    "bias": (hf(attention_bias=True), "attention_bias: expected False"),
    "dropout": (hf(attention_dropout=0.1), "attention_dropout: expected 0.0, got 0.1"),
    "unpublished ratio": (
        hf(compress_ratios=[0, 0, 2] + [4] * 40),
        r"compress_ratios\[2\]: expected 0 .*, 4 .* 128 .*, got 2; .*compress_rates",
    ),
    "published ratio beside other rates": (
        hf(compress_rate_hca=8),
        r"compress_ratios\[3\]: expected 0 .*, 4 .* 8 .*, got 128",
    ),
    "too few ratios": (hf(compress_ratios=[0, 4]), "compress_ratios: .*43 layers, got 2"),
    "no ratios": (hf(compress_ratios=[]), "compress_ratios: .*got 0"),
    "equal rates": (hf(compress_rate_csa=128), "compress_ratios: expected csa_ratio != hca_ratio"),
    "unknown rate": (saved(compress_rates={"csa": 4}), "compress_rates: expected an object with"),
    "rates as a list": (saved(compress_rates=[4, 128]), "compress_rates: expected an object with"),
    "rate of a wrong type": (
        saved(compress_rates={"compressed_sparse_attention": 4.0, "heavily_compressed_attention": 128}),
        "csa_ratio: expected an int >= 1, got 4.0",
    ),
    "types without rates": (
        saved("compress_rates"),
        "missing compress_rates.compressed_sparse_attention or compress_rate_csa",
    ),
    "too few types": (saved(num_hidden_layers=44), "layer_types: expected .*44 layers, got 43"),
    "types no list": (saved(layer_types="sliding_attention"), "layer_types: expected a list"),
    "unknown type": (saved(layer_types=["full"] * 43), r"layer_types\[0\]: expected one of"),
    "no layers": (hf(num_hidden_layers=0), "num_hidden_layers or n_layers: expected an int >= 1, got 0"),
    "wrong type of a size": (hf(hidden_size=4096.0), "hidden_size: expected an int >= 1, got 4096.0"),
    "no number": (hf(index_topk=float("nan")), "index_topk: expected an int >= 1, got nan"),
    "low theta": (hf(rope_theta=0.5), "rope_theta: theta: expected a finite number > 1"),
    "compress theta": (hf(compress_rope_theta="1e4"), "compress_rope_theta: theta: expected"),
    "two sizes": (hf(dim=2048), "conflicting .*hidden_size = 4096, dim = 2048"),
    "two eps": (hf(norm_eps=1e-5), "conflicting .*rms_norm_eps = 1e-06, norm_eps = 1e-05"),
    "two thetas": (
        nested(FLASH_SAVED, "main", rope_theta=5000.0),
        "conflicting .*rope_theta = 10000, rope_parameters.main.rope_theta = 5000.0",
    ),
    "two rates": (
        saved(compress_rate_csa=8),
        "conflicting .*compress_rates.compressed_sparse_attention = 4, compress_rate_csa = 8",
    ),
    "two schedules": (
        hf(layer_types=["sliding_attention"] * 43),
        r"conflicting .*layer_types\[2\] = 'sliding_attention' but compress_ratios\[2\] means 'compressed_sparse",
    ),
    "two rotated sizes": (
        saved(qk_rope_head_dim=32),
        r"conflicting .*qk_rope_head_dim = 32, partial_rotary_factor \* head_dim .* = 64",
    ),
    "two yarns": (hf(original_seq_len=0), "conflicting .*rope_scaling = .*original_seq_len = None"),
    "two kinds": (
        yarn(rope_type="default"),
        "conflicting .*rope_scaling.rope_type = 'default', rope_scaling.type = 'yarn'",
    ),
    "ragged rotary factor": (
        hf("qk_rope_head_dim", partial_rotary_factor=0.1),
        "partial_rotary_factor: expected a whole number",
    ),
    "rotary factor no number": (hf(partial_rotary_factor="1/8"), "partial_rotary_factor: expected a number, got '1/8'"),
    "rotary factor of no head": (
        hf(head_dim="512", partial_rotary_factor=0.125),
        "head_dim: expected an int >= 1, got '512'",
    ),
    "scaling without kind": (
        hf(rope_scaling={k: v for k, v in YARN.items() if k != "type"}),
        r"rope_scaling.rope_type \(or type\): expected 'yarn' or 'default', got None",
    ),
    "other scaling": (yarn(type="linear"), "rope_scaling.rope_type .*'linear'"),
    "scaling no object": (hf(rope_scaling="yarn"), "rope_scaling: expected an object or null"),
    "scaling without betas": (
        hf(rope_scaling={"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536}),
        "rope_scaling: missing beta_fast, beta_slow .*32.*1",
    ),
    "official without length": (official("original_seq_len"), "missing keys.*original_seq_len"),
    "official among others": (hf(rope_factor=40), "YaRN: missing original_seq_len, beta_fast"),
    "official without betas": (official("beta_fast"), "YaRN: missing beta_fast"),
    "official factor": (official(rope_factor=0.5), "YaRN .*rope_factor = 0.5.*expected .* >= 1"),
    "attention factor": (yarn(attention_factor=1.28), "rope_scaling.attention_factor: expected 1.0, .*got 1.28"),
    "attention factor in transformers' spelling": (
        nested(FLASH_SAVED, "compress", attention_factor=0.5),
        "rope_parameters.compress.attention_factor: expected 1.0, .*got 0.5",
    ),
    "mscale": (yarn(mscale=0.7), "rope_scaling.mscale: expected 1.0"),
    "mscale_all_dim": (yarn(mscale_all_dim=0), "rope_scaling.mscale_all_dim: "),
    "untruncated": (yarn(truncate=False), "rope_scaling.truncate: expected True"),
    "transformers' own attention factor": (
        nested(FLASH_SAVED, "compress", "attention_factor"),
        "rope_parameters.compress.attention_factor: expected 1.0, got none",
    ),
    "flat rope_parameters": (saved(rope_parameters=YARN), "rope_parameters: .*'main' and 'compress'"),
}


@pytest.mark.parametrize(("config", "message"), REJECTED.values(), ids=REJECTED)
def test_what_no_released_model_has_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionConfig.from_hf_config(config)


def settings(config: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The numbers and flags of a config, nested ones too, by path."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from (((key, *path), inner) for path, inner in settings(value))
        elif isinstance(value, bool | int | float):
            yield (key,), value


@pytest.mark.parametrize("published", [FLASH_HF, FLASH_OFFICIAL, FLASH_SAVED], ids=["hf", "official", "transformers"])
def test_a_number_or_a_flag_that_is_a_string_is_refused_whichever_it_is(published: dict[str, Any]) -> None:
    """A string is never taken for true, nor for the number that it spells."""
    found = list(settings(published))
    assert len(found) > 15
    for path, value in found:
        for wrong in (str(value), json.dumps(value), "1e-6", "false", "", [value], {"value": value}):
            config = copy.deepcopy(published)
            section = config
            for key in path[:-1]:
                section = section[key]
            section[path[-1]] = wrong
            with pytest.raises(ValueError, match=r"expected|conflicting") as raised:
                AttentionConfig.from_hf_config(config)
            assert repr(wrong) in str(raised.value), path


# --- transformers' own files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("released", "preset"),
    [(FLASH_HF, AttentionConfig.deepseek_v4_flash()), (PRO_HF, AttentionConfig.deepseek_v4_pro())],
    ids=["flash", "pro"],
)
def test_round_trip_through_transformers(
    released: dict[str, Any], preset: AttentionConfig, tmp_path: pathlib.Path
) -> None:
    transformers = pytest.importorskip("transformers")
    keys = {key: value for key, value in released.items() if key not in ("architectures", "model_type")}
    config = transformers.DeepseekV4Config(**copy.deepcopy(keys))
    config.save_pretrained(tmp_path)
    assert AttentionConfig.from_hf_config(tmp_path) == preset
    assert AttentionConfig.from_hf_config(config.to_dict()) == preset


def test_transformers_rates_and_odd_sizes_round_trip(tmp_path: pathlib.Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV4Config(
        num_hidden_layers=2,
        layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rate_csa=2,
        compress_rate_hca=8,
        head_dim=48,
        qk_rope_head_dim=22,
    )
    config.save_pretrained(tmp_path)
    read = AttentionConfig.from_hf_config(tmp_path)
    assert (read.csa_ratio, read.hca_ratio, read.qk_rope_head_dim, read.layer_types) == (2, 8, 22, (CSA, HCA))
    # Bare DeepseekV4Config has no YaRN, says so in the file, and is taken at its word.
    assert read.compress_rope == RopeConfig(160_000)
