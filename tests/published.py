"""Configs as they were published: the attention keys of the released files, and changes to them."""

import copy
from typing import Any

YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}

# The attention keys of the released files: config.json ("hf") and inference/config.json ("official").
FLASH_HF: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 512,
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "initializer_range": 0.02,
    "model_type": "deepseek_v4",
    "num_attention_heads": 64,
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "sliding_window": 128,
    "compress_rope_theta": 160000,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0],
}
PRO_HF: dict[str, Any] = FLASH_HF | {
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "index_topk": 1024,
    "compress_ratios": [128, 128] + [4, 128] * 29 + [4] + [0],
}
FLASH_OFFICIAL: dict[str, Any] = {
    "dim": 4096,
    "n_layers": 43,
    "n_heads": 64,
    "q_lora_rank": 1024,
    "head_dim": 512,
    "rope_head_dim": 64,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "window_size": 128,
    "original_seq_len": 65536,
    "rope_theta": 10000,
    "rope_factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "dtype": "fp8",
    "compress_rope_theta": 160000,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0],
}
PRO_OFFICIAL: dict[str, Any] = FLASH_OFFICIAL | {
    "dim": 7168,
    "n_layers": 61,
    "n_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "index_topk": 1024,
    "norm_eps": 1e-6,
    "compress_ratios": [128, 128] + [4, 128] * 29 + [4] + [0],
}


def transformers_spelling(released: dict[str, Any]) -> dict[str, Any]:
    """What transformers makes of a released config.json when it loads and saves it."""
    names = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    main = {"partial_rotary_factor": 0.125, "rope_theta": 10000.0, "rope_type": "default"}
    compress = {"partial_rotary_factor": 0.125, "rope_theta": 160000.0, "rope_type": "yarn", "attention_factor": 1.0}
    saved = {key: value for key, value in released.items() if key not in ("rope_scaling", "compress_ratios")}
    return saved | {
        "layer_types": [names[r] for r in released["compress_ratios"][: released["num_hidden_layers"]]],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "partial_rotary_factor": 0.125,
        "rope_parameters": {"main": main, "compress": YARN | compress},
    }


FLASH_SAVED, PRO_SAVED = transformers_spelling(FLASH_HF), transformers_spelling(PRO_HF)


def changed(config: dict[str, Any], /, *without: str, **values: Any) -> dict[str, Any]:
    """A copy of a published config with some keys removed and others set."""
    return {key: copy.deepcopy(value) for key, value in config.items() if key not in without} | values


def nested(config: dict[str, Any], table: str, *without: str, **values: Any) -> dict[str, Any]:
    """A copy of a transformers config with one of its two rotary tables changed."""
    copied = changed(config)
    copied["rope_parameters"][table] = changed(copied["rope_parameters"][table], *without, **values)
    return copied
