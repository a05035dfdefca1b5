"""Tensors of a released DeepSeek-V4 checkpoint, from its config: names, dtypes and shapes; nothing is allocated.

The table in `names` gives the tensors of the layers' attention. This module adds all others, to tell whether a
checkpoint is complete.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from foveal.checkpoint.fp8 import scale_shape
from foveal.checkpoint.layers import parameter_shapes
from foveal.checkpoint.names import Dialect, Stored, full_name, rows_of, scale_name
from foveal.config import AttentionConfig
from foveal.layers import LayerType

_KEYS = (
    "vocab_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "num_hash_layers",
    "num_nextn_predict_layers",
    "hc_mult",
)
_LARGEST = 1 << 20  # bounds each number in a config, and the number of experts in all layers
_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4, "I64": 8}
_FP4_GROUP = 32  # columns that share a scale, two per byte


class TensorSpec(NamedTuple):
    """The dtype and shape of a tensor in a file.

    Attributes:
        dtype: as safetensors spells it.
        shape: its shape.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * _BYTES[self.dtype]


def attention_tensors(
    config: AttentionConfig, layer: int, dialect: Dialect = Dialect.DEEPSEEK, scale_dtype: str = "F8_E8M0"
) -> dict[str, TensorSpec]:
    """Return the tensors of a layer's attention in a released checkpoint, by name.

    Args:
        config: the model's config.
        layer: the layer's index.
        dialect: the dialect of the names.
        scale_dtype: dtype of the blocks' scales: "F8_E8M0", or "F32" as in the Base models.
    """
    specs, shapes = {}, parameter_shapes(config, layer)
    for row in rows_of(config.layer(layer)):
        name, shape = full_name(row, dialect, layer), row.file_shape(shapes[row.path])
        specs[name] = TensorSpec(str(row.stored), shape)
        if row.stored is Stored.F8:
            specs[scale_name(name, dialect)] = TensorSpec(scale_dtype, scale_shape((shape[0], shape[1])))
    return specs


def released_tensors(
    raw_config: Mapping[str, Any], config: AttentionConfig, scale_dtype: str = "F8_E8M0"
) -> dict[str, TensorSpec] | None:
    """Return all tensors of a released checkpoint, by name.

    Args:
        raw_config: the model's `config.json`.
        config: the same config, as returned by `AttentionConfig.from_hf_config`.
        scale_dtype: dtype of the blocks' scales.

    Returns:
        None if the config does not describe a whole model of plausible size, or has other MTP layers than the first
        releases.
    """
    sizes = [raw_config.get(key) for key in _KEYS]
    if any(type(size) is not int or not 0 <= size <= _LARGEST for size in sizes):
        return None
    layers = config.num_layers + raw_config["num_nextn_predict_layers"]
    if raw_config.get("dspark_block_size") or layers * (raw_config["n_routed_experts"] + 1) > _LARGEST:
        return None
    model = _Model(raw_config, config, scale_dtype)
    return dict(model.tensors())


class _Model:
    """The names, dtypes and shapes of a whole model's tensors."""

    def __init__(self, raw: Mapping[str, Any], config: AttentionConfig, scale_dtype: str) -> None:
        self.raw, self.config, self.scale_dtype = raw, config, scale_dtype
        self.width, self.streams = config.hidden_size, int(raw["hc_mult"])
        self.fp4_experts = raw.get("expert_dtype") == "fp4"

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        vocabulary = TensorSpec("BF16", (self.raw["vocab_size"], self.width))
        yield from (("embed.weight", vocabulary), ("head.weight", vocabulary), ("norm.weight", self._norm()))
        yield from self._head("")
        for layer in range(self.config.num_layers):
            yield from attention_tensors(self.config, layer, scale_dtype=self.scale_dtype).items()
            yield from self._around_attention(f"layers.{layer}.", hashed=layer < self.raw["num_hash_layers"])
        for layer in range(self.raw["num_nextn_predict_layers"]):
            yield from self._mtp(layer)

    def _mtp(self, layer: int) -> Iterator[tuple[str, TensorSpec]]:
        prefix = f"mtp.{layer}."
        one = dataclasses.replace(self.config, layer_types=(LayerType.SLIDING,))
        for name, spec in attention_tensors(one, 0, scale_dtype=self.scale_dtype).items():
            yield name.replace("layers.0.", prefix, 1), spec
        yield from self._around_attention(prefix, hashed=False)
        for name in ("e_proj", "h_proj"):
            yield from self._fp8(prefix + name, self.width, self.width)
        yield from ((f"{prefix}{name}.weight", self._norm()) for name in ("enorm", "hnorm", "norm"))
        yield from self._head(prefix)

    def _around_attention(self, prefix: str, *, hashed: bool) -> Iterator[tuple[str, TensorSpec]]:
        yield from ((f"{prefix}{name}.weight", self._norm()) for name in ("attn_norm", "ffn_norm"))
        n = self.streams
        mixes = n * (n + 2)  # into the layer, out of it, and between the streams
        for name in ("attn", "ffn"):
            yield f"{prefix}hc_{name}_fn", TensorSpec("F32", (mixes, n * self.width))
            yield f"{prefix}hc_{name}_base", TensorSpec("F32", (mixes,))
            yield f"{prefix}hc_{name}_scale", TensorSpec("F32", (3,))
        experts, inner = self.raw["n_routed_experts"], self.raw["moe_intermediate_size"]
        yield f"{prefix}ffn.gate.weight", TensorSpec("BF16", (experts, self.width))
        if hashed:
            table = self.raw["vocab_size"], self.raw["num_experts_per_tok"]
            yield f"{prefix}ffn.gate.tid2eid", TensorSpec("I64", table)
        else:
            yield f"{prefix}ffn.gate.bias", TensorSpec("F32", (experts,))
        shapes = {"w1": (inner, self.width), "w2": (self.width, inner), "w3": (inner, self.width)}
        for name, (outputs, inputs) in shapes.items():
            yield from self._fp8(f"{prefix}ffn.shared_experts.{name}", outputs, inputs)
            for expert in range(experts):
                store = self._fp4 if self.fp4_experts else self._fp8
                yield from store(f"{prefix}ffn.experts.{expert}.{name}", outputs, inputs)

    def _head(self, prefix: str) -> Iterator[tuple[str, TensorSpec]]:
        n = self.streams
        for name, shape in (("fn", (n, n * self.width)), ("base", (n,)), ("scale", (1,))):
            yield f"{prefix}hc_head_{name}", TensorSpec("F32", shape)

    def _norm(self) -> TensorSpec:
        return TensorSpec("BF16", (self.width,))

    def _fp8(self, name: str, outputs: int, inputs: int) -> Iterator[tuple[str, TensorSpec]]:
        yield f"{name}.weight", TensorSpec("F8_E4M3", (outputs, inputs))
        yield f"{name}.scale", TensorSpec(self.scale_dtype, scale_shape((outputs, inputs)))

    def _fp4(self, name: str, outputs: int, inputs: int) -> Iterator[tuple[str, TensorSpec]]:
        yield f"{name}.weight", TensorSpec("I8", (outputs, inputs // 2))
        yield f"{name}.scale", TensorSpec("F8_E8M0", (outputs, inputs // _FP4_GROUP))
