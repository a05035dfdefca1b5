"""transformers' DeepSeek-V4 attention layer, to be compared with. Needs torch and transformers.

It is an oracle for unpadded rows that start at position 0. Of a checkpoint it is given what torch reads, under the
names that transformers' own rules make of those in the files: nothing of foveal's table, FP8 or layouts goes into it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming, apply_renamings
from transformers.models.deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

from foveal.checkpoint.files import CheckpointFiles
from foveal.config import AttentionConfig, LayerType

_BLOCK = 128
# fmt: off
_SAME_NAME = (
    "hidden_size", "num_attention_heads", "head_dim", "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank",
    "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "rms_norm_eps",
)
# fmt: on


def their_config(config: AttentionConfig, **others: Any) -> DeepseekV4Config:
    """transformers' config of the same attention.

    Args:
        config: ours; only its compressed table may have YaRN.
        others: fields that attention does not need, or that shall differ.
    """
    if config.rope.yarn is not None:
        raise ValueError("config: expected a main table without YaRN, as transformers has it")
    yarn = config.compress_rope.yarn
    scaling = {"rope_type": "default"} if yarn is None else {"rope_type": "yarn", **dataclasses.asdict(yarn)}
    fields = {
        "num_hidden_layers": config.num_layers,
        "layer_types": [str(layer_type) for layer_type in config.layer_types],
        "compress_rates": {str(t): config.compress_ratio(t) for t in (LayerType.CSA, LayerType.HCA)},
        "rope_theta": config.rope.theta,
        "compress_rope_theta": config.compress_rope.theta,
        "rope_parameters": scaling,
        "attn_implementation": "eager",
        # Else transformers warns that the factor is not what this length implies.
        "max_position_embeddings": 1 << 20
        if yarn is None
        else int(yarn.factor * yarn.original_max_position_embeddings),
        **{name: getattr(config, name) for name in _SAME_NAME},
    }
    return DeepseekV4Config(**{**fields, **others})


class Peer:
    """transformers' layer.

    Args:
        config: of the model.
        layer_type: of the layer.
        state: its parameters, under the names and in the layouts of transformers' module.

    Attributes:
        module: the `DeepseekV4Attention`, float32.
        config: its config.
    """

    def __init__(self, config: AttentionConfig, layer_type: LayerType, state: Mapping[str, torch.Tensor]) -> None:
        self.config = their_config(dataclasses.replace(config, layer_types=(layer_type,)))
        self.module = modeling.DeepseekV4Attention(self.config, 0)
        self.module.load_state_dict(dict(state), strict=True)
        self.rotary = modeling.DeepseekV4RotaryEmbedding(self.config)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Outputs for hidden states [1, S, E], from position 0."""
        return self.chunk(hidden, 0, None)

    def chunk(self, hidden: torch.Tensor, start: int, cache: Any) -> torch.Tensor:
        """Outputs for hidden states [1, T, E] from position `start`, behind what transformers' cache holds."""
        window = self.config.sliding_window
        first_key = 0 if cache is None else max(start - window + 1, 0)
        positions = torch.arange(start, start + hidden.shape[1])[None]
        distance = positions.T - torch.arange(first_key, start + hidden.shape[1])[None]
        unseen = (distance < 0) | (distance >= window)
        mask = torch.zeros(distance.shape, dtype=hidden.dtype).masked_fill(unseen, float("-inf"))[None, None]
        tables = {label: self.rotary(hidden, positions, layer_type=label) for label in ("main", "compress")}
        return self.module(hidden, tables, positions, mask, cache)[0]

    def with_choice(self, hidden: np.ndarray, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray | None]:
        """Outputs, and the entries that the indexer selects.

        Args:
            hidden: float32 [1, S, E].
            dtype: of the computation: parameters that transformers keeps in float32 stay so.

        Returns:
            float32 [1, S, E]; and int [1, S, K], -1 for none, or None where the layer has no indexer.
        """
        self._cast(dtype)
        chosen: list[torch.Tensor] = []
        indexer = getattr(getattr(self.module, "compressor", None), "indexer", None)
        hook = indexer and indexer.register_forward_hook(lambda module, args, out: chosen.append(out))
        try:
            with torch.no_grad():
                out = self(torch.tensor(hidden).to(dtype))
        finally:
            if hook:
                hook.remove()
            self._cast(torch.float32)
        return out.float().numpy(), chosen[0].numpy() if chosen else None

    def _cast(self, dtype: torch.dtype) -> None:
        kept = modeling.DeepseekV4PreTrainedModel._keep_in_fp32_modules_strict or []
        for name, parameter in self.module.named_parameters():
            if not any(part in kept for part in name.split(".")):
                parameter.data = parameter.data.to(dtype)


def peer_state(params: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Parameters of ours, by dotted name, as transformers' module takes them."""
    return {peer_name(name): torch.tensor(peer_layout(name, value)) for name, value in params.items()}


def peer_name(name: str) -> str:
    """What transformers' module calls a parameter."""
    return name.replace(".kernel", ".weight").replace(".scale", ".weight")


def peer_layout(name: str, value: np.ndarray) -> np.ndarray:
    """How transformers' module holds it: linear weights [out, in], the grouped one [G * out, in]."""
    if name == "o_a_proj.kernel":
        return value.transpose(0, 2, 1).reshape(-1, value.shape[1]).copy()
    return value.T.copy() if name.endswith(".kernel") else value


def peer_of_checkpoint(path: str | os.PathLike[str], config: AttentionConfig, layer: int) -> Peer:
    """transformers' layer with a checkpoint's weights, in float32.

    Args:
        path: of the checkpoint.
        config: of the model.
        layer: the layer's index.
    """
    rules = [
        rule for rule in get_checkpoint_conversion_mapping("deepseek_v4") or () if isinstance(rule, WeightRenaming)
    ]
    raw: dict[str, torch.Tensor] = {}
    for name, file in CheckpointFiles(path).where.items():
        renamed = apply_renamings(name, rules).removeprefix("model.")
        prefix = f"layers.{layer}.self_attn."
        if renamed.startswith(prefix):
            with safe_open(os.fspath(file), framework="pt") as opened:
                raw[renamed.removeprefix(prefix)] = opened.get_tensor(name)
    scales = {name: name.rsplit(".", 1)[0] + ".weight" for name in raw if name.endswith((".scale", "_scale_inv"))}
    state = {name: value.float() for name, value in raw.items() if name not in scales}
    for name, weight in scales.items():
        blocks = raw[name].float().repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
        state[weight] = state[weight] * blocks[: state[weight].shape[0], : state[weight].shape[1]]
    return Peer(config, config.layer_type(layer), state)
