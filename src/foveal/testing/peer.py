"""transformers' DeepSeek-V4 attention layer, to compare with. Needs torch and transformers.

It is an oracle for unpadded rows that start at position 0. It takes checkpoint tensors as torch reads them, renamed by
transformers' own rules: nothing of foveal's name table, FP8 code or layouts goes into it.
"""

from __future__ import annotations

import copy
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

from foveal.checkpoint.files import CONFIG, CheckpointFiles, read_json
from foveal.config import AttentionConfig
from foveal.layers import LayerType

_BLOCK = 128


def their_config(config: AttentionConfig, **others: Any) -> DeepseekV4Config:
    """transformers' config for the same attention.

    Args:
        config: ours.
        others: fields that attention does not need, or that override ours.
    """
    return DeepseekV4Config.from_dict(config.to_hf_config() | others)


class Peer:
    """transformers' attention layer with given parameters.

    Args:
        config: of the model.
        layer: its index.
        state: its parameters, under the names and in the layouts of transformers' module.

    Attributes:
        module: the `DeepseekV4Attention`, in the parameters' dtype.
        config: its config.
    """

    def __init__(self, config: DeepseekV4Config, layer: int, state: Mapping[str, torch.Tensor]) -> None:
        self.config = config
        config._attn_implementation = "eager"
        self.module = modeling.DeepseekV4Attention(config, layer).to(next(iter(state.values())).dtype)
        self.module.load_state_dict(dict(state), strict=True)
        self.rotary = modeling.DeepseekV4RotaryEmbedding(self.config)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Outputs for hidden states [1, S, E], from position 0."""
        return self.chunk(hidden, 0, None)

    def chunk(self, hidden: torch.Tensor, start: int, cache: Any) -> torch.Tensor:
        """Outputs for hidden states [1, T, E] from position `start`, after the tokens in transformers' cache."""
        return self._run(self.module, hidden, start, cache)

    def _run(self, module: torch.nn.Module, hidden: torch.Tensor, start: int, cache: Any) -> torch.Tensor:
        return module(hidden, *self.inputs(hidden, start, cached=cache is not None), cache)[0]

    def inputs(self, hidden: torch.Tensor, start: int = 0, *, cached: bool = False) -> tuple[Any, ...]:
        """The module's other inputs for hidden states [1, T, E] from position `start`: RoPE, positions, a mask."""
        window = self.config.sliding_window
        first_key = max(start - window + 1, 0) if cached else 0
        positions = torch.arange(start, start + hidden.shape[1])[None]
        distance = positions.T - torch.arange(first_key, start + hidden.shape[1])[None]
        unseen = (distance < 0) | (distance >= window)
        mask = torch.zeros(distance.shape, dtype=hidden.dtype).masked_fill(unseen, float("-inf"))[None, None]
        tables = {label: self.rotary(hidden, positions, layer_type=label) for label in ("main", "compress")}
        return tables, positions, mask

    def with_choice(self, hidden: np.ndarray, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray | None]:
        """Outputs, and the entries that the indexer selects.

        Args:
            hidden: float32 [1, S, E].
            dtype: of the computation; parameters that transformers keeps in float32 stay float32.

        Returns:
            float32 [1, S, E]; and int [1, S, K], -1 for none, or None where the layer has no indexer.
        """
        module = self._in(dtype)
        chosen: list[torch.Tensor] = []
        indexer = getattr(getattr(module, "compressor", None), "indexer", None)
        if indexer is not None:
            indexer.register_forward_hook(lambda _, inputs, selected: chosen.append(selected))
        with torch.no_grad():
            out = self._run(module, torch.tensor(hidden).to(dtype), 0, None)
        return out.float().numpy(), chosen[0].numpy() if chosen else None

    def _in(self, dtype: torch.dtype) -> torch.nn.Module:
        """A copy of the module in another dtype, as transformers would have loaded it."""
        module = copy.deepcopy(self.module)
        kept = modeling.DeepseekV4PreTrainedModel._keep_in_fp32_modules_strict or []
        for name, parameter in module.named_parameters():
            if not any(part in kept for part in name.split(".")):
                parameter.data = parameter.data.to(dtype)
        return module


def peer_of_params(config: AttentionConfig, layer_type: LayerType, params: Mapping[str, np.ndarray]) -> Peer:
    """transformers' layer with our parameters, given by dotted name."""
    return Peer(their_config(dataclasses.replace(config, layer_types=(layer_type,))), 0, peer_state(params))


def peer_state(params: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Convert our parameters, by dotted name, to those of transformers' module."""
    return {peer_name(name): torch.tensor(peer_layout(name, value)) for name, value in params.items()}


def peer_name(name: str) -> str:
    """Name of our parameter in transformers' module."""
    return name.replace(".kernel", ".weight").replace(".scale", ".weight")


def peer_layout(name: str, value: np.ndarray) -> np.ndarray:
    """Value of our parameter in transformers' layout: linear weights [out, in], the grouped one [G * out, in]."""
    if name == "o_a_proj.kernel":
        return value.transpose(0, 2, 1).reshape(-1, value.shape[1]).copy()
    return value.T.copy() if name.endswith(".kernel") else value


def peer_of_checkpoint(path: str | os.PathLike[str], config: AttentionConfig, layer: int) -> Peer:
    """transformers' layer with a checkpoint's weights, in float32.

    Its config is the one that transformers reads beside the weights, or made from ours where `config.json` is in the
    spelling of DeepSeek's inference code, which transformers does not understand.

    Args:
        path: path of the checkpoint.
        config: of the model. `index_topk` is always taken from it.
        layer: the layer's index.
    """
    files = CheckpointFiles(path)
    theirs = their_config(config)
    if "num_hidden_layers" in read_json(files.directory / CONFIG):
        theirs = DeepseekV4Config.from_pretrained(files.directory, index_topk=config.index_topk)
    mapping = get_checkpoint_conversion_mapping("deepseek_v4") or ()
    rules = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    raw: dict[str, torch.Tensor] = {}
    prefix = f"layers.{layer}.self_attn."
    for name, file in files.where.items():
        if f"layers.{layer}." not in name:  # the rules are slow, and Pro has 145,000 names
            continue
        renamed = apply_renamings(name, rules).removeprefix("model.")
        if renamed.startswith(prefix):
            with safe_open(os.fspath(file), framework="pt") as opened:
                raw[renamed.removeprefix(prefix)] = opened.get_tensor(name)
    scales = {name: name.rsplit(".", 1)[0] + ".weight" for name in raw if name.endswith((".scale", "_scale_inv"))}
    state = {name: value.float() for name, value in raw.items() if name not in scales}
    for name, weight in scales.items():
        blocks = raw[name].float().repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
        state[weight] = state[weight] * blocks[: state[weight].shape[0], : state[weight].shape[1]]
    return Peer(theirs, layer, state)
