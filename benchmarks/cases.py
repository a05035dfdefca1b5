"""The measured cases, as data."""

from __future__ import annotations

import dataclasses
from typing import Any

from foveal import AttentionConfig, Documents, LayerType, RopeConfig, Visibility, YarnConfig


@dataclasses.dataclass(frozen=True)
class Case:
    """A case to measure: batch 1, unpacked, with the published window and ratios."""

    what: str  # "core" or "layer"
    layer: str  # "hca", "csa" or "sliding"
    length: int
    heads: int
    head_dim: int
    backward: bool
    dtype: str = "float32"
    top_k: int = 512

    @property
    def layer_type(self) -> LayerType:
        """Type of the layer."""
        return {"hca": LayerType.HCA, "csa": LayerType.CSA, "sliding": LayerType.SLIDING}[self.layer]

    @property
    def name(self) -> str:
        """Name of the case in tables and plots."""
        passes = "f+b" if self.backward else "fwd"
        return f"{self.what} {self.layer} S={self.length} {self.heads}x{self.head_dim} {passes} {self.dtype}"

    @property
    def config(self) -> AttentionConfig:
        """Configuration with hidden size 1024, q_lora_rank 256 and an indexer of 16 x 64; RoPE as published."""
        return AttentionConfig(
            hidden_size=1024,
            num_attention_heads=self.heads,
            head_dim=self.head_dim,
            qk_rope_head_dim=64,
            q_lora_rank=256,
            o_groups=4,
            o_lora_rank=256,
            sliding_window=128,
            layer_types=(LayerType.SLIDING, LayerType.CSA, LayerType.HCA),
            csa_ratio=4,
            hca_ratio=128,
            index_n_heads=16,
            index_head_dim=64,
            index_topk=self.top_k,
            rope=RopeConfig(10_000.0),
            compress_rope=RopeConfig(160_000.0, YarnConfig(16.0, 65_536, 32.0, 1.0)),
        )

    @property
    def documents(self) -> Documents:
        """One document of the case's length."""
        return Documents.unpacked(1, self.length)

    @property
    def visibility(self) -> Visibility:
        """The raw keys and entries that each query sees."""
        return Visibility(self.documents, 128, self.config.compress_ratio(self.layer_type))


def _both(**sizes: Any) -> list[Case]:
    return [Case(**sizes, backward=backward) for backward in (False, True)]


def suite(name: str) -> list[Case]:
    """Cases of a suite by name: "quick", "core", "layer", "long" or "bf16"."""
    if name == "quick":
        return [
            c for layer in ("hca", "csa") for c in _both(what="core", layer=layer, length=1024, heads=16, head_dim=128)
        ]
    if name == "core":
        sizes = ((1024, 16, 128), (4096, 16, 128), (1024, 64, 512))
        return [
            case
            for layer in ("hca", "csa")
            for length, heads, dim in sizes
            for case in _both(what="core", layer=layer, length=length, heads=heads, head_dim=dim)
        ]
    if name == "layer":
        return [
            case
            for layer in ("hca", "csa")
            for length in (512, 1024, 2048, 4096)
            for case in _both(what="layer", layer=layer, length=length, heads=16, head_dim=128)
        ]
    if name == "long":  # where peers that materialise scores do not fit
        sizes = ((4096, 64, 512), *((length, 16, 128) for length in (8192, 16384, 32768, 65536)))
        return [
            Case("core", layer, length, heads, dim, backward=True)
            for layer in ("hca", "csa")
            for length, heads, dim in sizes
            if (layer, heads) != ("csa", 64)
        ]
    if name == "bf16":
        return [
            Case("core", layer, 4096, 16, 128, backward=backward, dtype=dtype)
            for layer in ("hca", "csa")
            for backward in (False, True)
            for dtype in ("float32", "bfloat16")
        ]
    raise ValueError(f"suite: expected quick, core, layer, long or bf16, got {name!r}")
