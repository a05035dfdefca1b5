"""The config: its numbers, what it answers and what it refuses."""

import dataclasses
import pickle
from typing import Any

import pytest

from foveal.config import AttentionConfig
from foveal.layers import LayerType, RopeConfig, YarnConfig, layer_types_from_compress_ratios

SLIDING, CSA, HCA = LayerType.SLIDING, LayerType.CSA, LayerType.HCA


# --- presets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "sizes", "layers"),
    [
        (AttentionConfig.deepseek_v4_flash(), (4096, 64, 1024, 8, 512), (2, 21, 20)),
        (AttentionConfig.deepseek_v4_pro(), (7168, 128, 1536, 16, 1024), (0, 30, 31)),
    ],
    ids=["flash", "pro"],
)
def test_presets_have_the_released_numbers(config: AttentionConfig, sizes: Any, layers: Any) -> None:
    names = ("hidden_size", "num_attention_heads", "q_lora_rank", "o_groups", "index_topk")
    assert tuple(getattr(config, name) for name in names) == sizes
    assert tuple(config.layer_types.count(kind) for kind in (SLIDING, CSA, HCA)) == layers
    assert config.num_layers == sum(layers)
    assert (config.head_dim, config.qk_rope_head_dim, config.sliding_window, config.o_lora_rank) == (512, 64, 128, 1024)
    assert (config.csa_ratio, config.hca_ratio, config.index_n_heads, config.index_head_dim) == (4, 128, 64, 128)
    assert (config.rms_norm_eps, config.initializer_range) == (1e-6, 0.02)
    assert config.rope == RopeConfig(10_000)
    assert config.compress_rope == RopeConfig(160_000, YarnConfig(16, 65_536, 32, 1))


def test_first_layers_differ_between_flash_and_pro_and_then_alternate() -> None:
    flash, pro = AttentionConfig.deepseek_v4_flash(), AttentionConfig.deepseek_v4_pro()
    assert flash.layer_types[:5] == (SLIDING, SLIDING, CSA, HCA, CSA)
    assert pro.layer_types[:5] == (HCA, HCA, CSA, HCA, CSA)
    assert flash.layer_types[-1] == pro.layer_types[-1] == CSA


def test_tiny_has_one_layer_of_each_type() -> None:
    tiny = AttentionConfig.tiny()
    assert tiny.layer_types == (SLIDING, CSA, HCA)
    assert (tiny.hidden_size, tiny.num_attention_heads, tiny.head_dim, tiny.sliding_window) == (64, 4, 32, 8)


# --- what a config answers -------------------------------------------------------------------------------------------


def test_layer_types_lead_to_ratios_and_rotary_tables() -> None:
    tiny = AttentionConfig.tiny()
    assert [tiny.layer_type(index) for index in range(3)] == [SLIDING, CSA, HCA]
    assert [tiny.compress_ratio(kind) for kind in LayerType] == [0, 4, 8]
    assert [tiny.rope_for(kind) for kind in LayerType] == [tiny.rope, tiny.compress_rope, tiny.compress_rope]
    assert tiny.compress_ratio(LayerType("compressed_sparse_attention")) == 4


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize("layer_index", [-1, 3, True, 1.0, None])
def test_layer_type_refuses_what_is_no_layer(layer_index: Any) -> None:
    with pytest.raises(ValueError, match="layer_index: expected"):
        AttentionConfig.tiny().layer_type(layer_index)


def test_unknown_layer_type_lists_the_known_ones() -> None:
    for ask in (AttentionConfig.tiny().compress_ratio, AttentionConfig.tiny().rope_for):
        with pytest.raises(ValueError, match=r"layer_type: .*'sliding_attention'.*got 'full_attention'"):
            ask("full_attention")


def test_equal_configs_hash_alike_and_survive_copies() -> None:
    config, same = AttentionConfig.tiny(), AttentionConfig.tiny()
    other = dataclasses.replace(config, index_topk=5)
    assert len({config, same, other}) == 2
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.head_dim = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_what_changes_the_numbers_has_no_default() -> None:
    """A base, a ratio or a window that was left out must be missed: a checkpoint may have been trained with another."""
    optional = {
        made: {f.name for f in dataclasses.fields(made) if f.default is not dataclasses.MISSING}
        for made in (AttentionConfig, RopeConfig, YarnConfig)
    }
    assert optional == {AttentionConfig: {"rms_norm_eps", "initializer_range"}, RopeConfig: {"yarn"}, YarnConfig: set()}


def test_numbers_and_layer_types_are_normalised() -> None:
    config = dataclasses.replace(AttentionConfig.tiny(), layer_types=["sliding_attention", CSA], rms_norm_eps=1)
    assert config.layer_types == (SLIDING, CSA)
    assert all(type(kind) is LayerType for kind in config.layer_types)
    assert type(config.rms_norm_eps) is float
    assert type(RopeConfig(10_000).theta) is float


def test_any_ratios_are_accepted_equal_ones_too() -> None:
    config = dataclasses.replace(AttentionConfig.tiny(), csa_ratio=1, hca_ratio=1)
    assert config.compress_ratio(CSA) == config.compress_ratio(HCA) == 1


# --- what a config refuses -------------------------------------------------------------------------------------------

SIZES = [field.name for field in dataclasses.fields(AttentionConfig) if field.type is int]
assert len(SIZES) == 13


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "8", None])
def test_sizes_must_be_positive_ints(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: expected an int >= 1, got {value!r}"):
        dataclasses.replace(AttentionConfig.tiny(), **{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim: expected an even int"),
        ({"qk_rope_head_dim": 34}, "qk_rope_head_dim: expected at most head_dim = 32, got 34"),
        ({"index_head_dim": 8}, "qk_rope_head_dim: expected at most index_head_dim = 8, got 16"),
        ({"o_groups": 3}, "o_groups: expected a divisor of num_attention_heads = 4 .*got 3"),
        ({"layer_types": ()}, "layer_types: expected at least one"),
        ({"layer_types": "sliding_attention"}, "layer_types: expected a sequence"),
        ({"layer_types": 3}, "layer_types: expected a sequence"),
        ({"layer_types": (SLIDING, "dense")}, r"layer_types\[1\]: .*'heavily_compressed_attention'.*got 'dense'"),
        ({"layer_types": ([],)}, r"layer_types\[0\]: expected one of"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps: expected a finite number > 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a finite number > 0"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps: expected a finite number > 0"),
        ({"initializer_range": -0.1}, "initializer_range: expected a finite number >= 0"),
        ({"rope": 10_000.0}, "^rope: expected a RopeConfig"),
        ({"compress_rope": None}, "^compress_rope: expected a RopeConfig"),
    ],
)
def test_contradictions_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(AttentionConfig.tiny(), **changes)


@pytest.mark.parametrize("theta", [1.0, 0, float("inf"), float("nan"), True, "10000"])
def test_ranges_of_rope(theta: Any) -> None:
    with pytest.raises(ValueError, match="theta: expected a finite number > 1"):
        RopeConfig(theta)
    with pytest.raises(ValueError, match="yarn: expected a YarnConfig or None"):
        RopeConfig(10_000.0, {"factor": 16})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.5, 64, 32, 1), "factor: expected a finite number >= 1"),
        ((16, 64.0, 32, 1), "original_max_position_embeddings: expected an int >= 1"),
        ((16, 0, 32, 1), "original_max_position_embeddings: expected an int >= 1"),
        ((16, 64, 1, 1), "beta_fast: expected a finite number > beta_slow = 1.0"),
        ((16, 64, 32, 0), "beta_slow: expected a finite number > 0"),
    ],
)
def test_yarn_ranges(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        YarnConfig(*arguments)


# --- compress_ratios -------------------------------------------------------------------------------------------------


def test_compress_ratios_name_layer_types_and_mtp_entries_are_left_out() -> None:
    assert layer_types_from_compress_ratios([0, 4, 128]) == (SLIDING, CSA, HCA)
    assert layer_types_from_compress_ratios([128, 4, 0, 0], num_layers=2) == (HCA, CSA)
    assert layer_types_from_compress_ratios([0, 2, 8], csa_ratio=2, hca_ratio=8) == (SLIDING, CSA, HCA)


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(
    ("ratios", "options", "message"),
    [
        ([], {}, "compress_ratios: .*got 0"),
        ([0, 4], {"num_layers": 3}, "compress_ratios: expected one ratio for each of 3 layers, got 2"),
        ([0, 4], {"num_layers": 0}, "num_layers: expected an int >= 1"),
        ([0, 16], {}, r"compress_ratios\[1\]: expected 0 .*4 .*128 .*got 16; .*csa_ratio"),
        ([False], {}, r"compress_ratios\[0\]: expected an int, got False"),
        ([4.0], {}, r"compress_ratios\[0\]: expected an int, got 4.0"),
        ("04", {}, "compress_ratios: expected a sequence"),
        (4, {}, "compress_ratios: expected a sequence"),
        ([0], {"csa_ratio": 8, "hca_ratio": 8}, "compress_ratios: expected csa_ratio != hca_ratio.*layer_types"),
        ([0], {"csa_ratio": 0}, "csa_ratio: expected an int >= 1"),
    ],
)
def test_compress_ratios_that_name_no_layers(ratios: Any, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer_types_from_compress_ratios(ratios, **options)
