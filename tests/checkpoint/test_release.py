"""The tensors of the released models, counted, against what is published of them."""

import pytest

from foveal import AttentionConfig, Dialect, LayerType
from foveal.checkpoint.release import attention_tensors, released_tensors

AROUND = {"vocab_size": 129280, "num_experts_per_tok": 6, "num_hash_layers": 3, "num_nextn_predict_layers": 1}
AROUND |= {"hc_mult": 4, "expert_dtype": "fp4"}
MODELS = {
    "flash": (AttentionConfig.deepseek_v4_flash(), AROUND | {"moe_intermediate_size": 2048, "n_routed_experts": 256}),
    "pro": (AttentionConfig.deepseek_v4_pro(), AROUND | {"moe_intermediate_size": 3072, "n_routed_experts": 384}),
}
PUBLISHED = {"flash": (69_187, 159_609_485_896), "pro": (145_116, 864_704_792_696)}
COUNTS = {LayerType.SLIDING: 13, LayerType.HCA: 17, LayerType.CSA: 24}


every_model = pytest.mark.parametrize("model", MODELS)


def tensors_of(model, scale_dtype="F8_E8M0", **changes):
    config, raw = MODELS[model]
    tensors = released_tensors(raw | changes, config, scale_dtype=scale_dtype)
    assert tensors is not None
    return tensors


@every_model
def test_all_tensors_to_the_byte(model):
    tensors = tensors_of(model)
    assert (len(tensors), sum(spec.size for spec in tensors.values())) == PUBLISHED[model]


def test_those_of_the_mtp_layer():
    tensors = tensors_of("flash")
    assert sum(name.startswith("mtp.0.") for name in tensors) == 1575
    others = {name: spec for name, spec in tensors.items() if not name.startswith("mtp.")}
    assert tensors_of("flash", num_nextn_predict_layers=0) == others


@every_model
def test_the_attention_of_each_layer(model):
    config, _ = MODELS[model]
    for layer, layer_type in enumerate(config.layer_types):
        tensors = attention_tensors(config, layer)
        assert len(tensors) == COUNTS[layer_type]
        assert all(name.startswith(f"layers.{layer}.attn.") for name in tensors)


def test_a_csa_layer_of_flash_tensor_by_tensor():
    f8, e8, bf16, f32 = "F8_E4M3", "F8_E8M0", "BF16", "F32"
    assert attention_tensors(AttentionConfig.deepseek_v4_flash(), 2) == {
        f"layers.2.attn.{name}": (dtype, shape)
        for name, dtype, shape in [
            ("wq_a.weight", f8, (1024, 4096)),
            ("wq_a.scale", e8, (8, 32)),
            ("q_norm.weight", bf16, (1024,)),
            ("wq_b.weight", f8, (32768, 1024)),
            ("wq_b.scale", e8, (256, 8)),
            ("wkv.weight", f8, (512, 4096)),
            ("wkv.scale", e8, (4, 32)),
            ("kv_norm.weight", bf16, (512,)),
            ("wo_a.weight", f8, (8192, 4096)),
            ("wo_a.scale", e8, (64, 32)),
            ("wo_b.weight", f8, (4096, 8192)),
            ("wo_b.scale", e8, (32, 64)),
            ("attn_sink", f32, (64,)),
            ("compressor.ape", f32, (4, 1024)),
            ("compressor.wkv.weight", bf16, (1024, 4096)),
            ("compressor.wgate.weight", bf16, (1024, 4096)),
            ("compressor.norm.weight", bf16, (512,)),
            ("indexer.wq_b.weight", f8, (8192, 1024)),
            ("indexer.wq_b.scale", e8, (64, 8)),
            ("indexer.weights_proj.weight", bf16, (64, 4096)),
            ("indexer.compressor.ape", f32, (4, 256)),
            ("indexer.compressor.wkv.weight", bf16, (256, 4096)),
            ("indexer.compressor.wgate.weight", bf16, (256, 4096)),
            ("indexer.compressor.norm.weight", bf16, (128,)),
        ]
    }


def test_the_hca_compressor_of_pro():
    tensors = attention_tensors(AttentionConfig.deepseek_v4_pro(), 0)
    assert tensors["layers.0.attn.compressor.ape"] == ("F32", (128, 512))
    assert tensors["layers.0.attn.compressor.wkv.weight"] == ("BF16", (512, 7168))
    assert tensors["layers.0.attn.wo_a.weight"] == ("F8_E4M3", (16384, 4096))


@every_model
def test_base_models_have_float32_scales_and_fp8_experts(model):
    config, raw = MODELS[model]
    base = tensors_of(model, "F32", expert_dtype="fp8")
    assert len(base) == PUBLISHED[model][0]
    assert {spec.dtype for name, spec in base.items() if name.endswith(".scale")} == {"F32"}
    assert base["layers.5.ffn.experts.9.w2.weight"].shape == (config.hidden_size, raw["moe_intermediate_size"])


def test_other_names_are_the_same_tensors():
    config = AttentionConfig.deepseek_v4_flash()
    want = sorted(attention_tensors(config, 2).values())
    for dialect in Dialect:
        assert sorted(attention_tensors(config, 2, dialect).values()) == want


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("vocab_size", None), ("dspark_block_size", 5), ("n_routed_experts", 10**9), ("n_routed_experts", 10**6)),
        *(("num_nextn_predict_layers", 10**5), ("num_hash_layers", -1), ("hc_mult", True)),
    ],
)
def test_what_is_not_known_is_not_guessed(key, value):
    config, raw = MODELS["flash"]
    assert released_tensors(raw | {key: value}, config) is None
