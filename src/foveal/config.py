"""Configuration of a DeepSeek-V4 attention stack: sizes, layer types and rotary tables.

Every size is checked here, once, when a config is built; the rest of the package relies on it. The classes are frozen
and hashable, so a config can be a static argument of a jitted function. The numbers are those of the DeepSeek-V4
technical report (arXiv 2606.19348) and of the released `config.json` files. This module does not import JAX.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from foveal.checks import as_float, as_int, described
from foveal.hf_config import naming, read_hf_config, write_hf_config
from foveal.layers import LayerSpec, LayerType, RopeConfig, YarnConfig, as_layer_type, as_layer_types, layer_spec

# Fields that the Flash and Pro releases share.
_RELEASED: dict[str, Any] = {
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "csa_ratio": 4,
    "hca_ratio": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "rope": RopeConfig(10_000.0),
    "compress_rope": RopeConfig(160_000.0, YarnConfig(16.0, 65_536, 32.0, 1.0)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Configuration of a DeepSeek-V4 model's attention: the sizes and the type of every layer.

    Sizes are ints >= 1. Field names follow the released `config.json` where it has the same setting.

    Attributes:
        hidden_size: model width E.
        num_attention_heads: query heads H.
        head_dim: width D of a query head and of the one shared key-value head.
        qk_rope_head_dim: trailing dims R of a head (and of an indexer head) that are rotated; even.
        q_lora_rank: width of the query bottleneck, which the indexer shares.
        o_groups: groups of the output projection; divides `num_attention_heads`.
        o_lora_rank: width of each group's output bottleneck.
        sliding_window: raw keys W that a query sees, itself included.
        layer_types: one `LayerType`, or a string that names it, per layer; any sequence is accepted.
        csa_ratio: tokens m per entry of a CSA layer (4 in the releases); windows overlap, so an entry draws on up to
            2 m tokens.
        hca_ratio: tokens m per entry of an HCA layer (128 in the releases).
        index_n_heads: indexer heads I.
        index_head_dim: width J of an indexer head.
        index_topk: entries K that the indexer selects per query.
        rope: rotary table of the sliding layers ("main").
        compress_rope: rotary table of every rotation in CSA and HCA layers, those of the window included ("compress").
        rms_norm_eps: epsilon of every RMS norm, > 0.
        initializer_range: standard deviation of the initial weights, >= 0.

    Raises:
        ValueError: a field is out of range or contradicts another one; the message names it.
    """

    __no_type_check__ = True  # as in YarnConfig

    hidden_size: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    layer_types: tuple[LayerType, ...]
    csa_ratio: int
    hca_ratio: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    rope: RopeConfig
    compress_rope: RopeConfig
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        """Check every field; make `layer_types` a tuple of `LayerType` and the numbers plain `int` and `float`."""
        for field in dataclasses.fields(self):
            if field.type is int:
                object.__setattr__(self, field.name, as_int(field.name, getattr(self, field.name), 1))
        object.__setattr__(self, "layer_types", as_layer_types("layer_types", self.layer_types))
        eps = as_float("rms_norm_eps", self.rms_norm_eps, "> 0", 0.0)
        std = as_float("initializer_range", self.initializer_range, ">= 0", 0.0, inclusive=True)
        object.__setattr__(self, "rms_norm_eps", eps)
        object.__setattr__(self, "initializer_range", std)
        for name in ("rope", "compress_rope"):
            if not isinstance(getattr(self, name), RopeConfig):
                raise ValueError(f"{name}: expected a RopeConfig, got {described(getattr(self, name))}")
        self._check_relations()

    def _check_relations(self) -> None:
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim: expected an even int (RoPE turns pairs), got {self.qk_rope_head_dim}")
        for name in ("head_dim", "index_head_dim"):
            if self.qk_rope_head_dim > getattr(self, name):
                limit = f"{name} = {getattr(self, name)}"
                raise ValueError(f"qk_rope_head_dim: expected at most {limit}, got {self.qk_rope_head_dim}")
        if self.num_attention_heads % self.o_groups:
            raise ValueError(
                f"o_groups: expected a divisor of num_attention_heads = {self.num_attention_heads} (each group of the "
                f"output projection takes equally many heads), got {self.o_groups}"
            )

    @property
    def num_layers(self) -> int:
        """Number of layers that `layer_types` describes."""
        return len(self.layer_types)

    def layer_type(self, layer_index: int) -> LayerType:
        """The type of one layer, counted from 0.

        Raises:
            ValueError: no such layer. Negative indices are refused: counting from the end hides off-by-one mistakes.
        """
        index = as_int("layer_index", layer_index)
        if not 0 <= index < self.num_layers:
            raise ValueError(
                f"layer_index: expected 0 <= layer_index < {self.num_layers} (the config has {self.num_layers} "
                f"layer_types), got {index}; count from 0, or add the layer to layer_types"
            )
        return self.layer_types[index]

    def layer(self, kind: "int | LayerType | str") -> LayerSpec:
        """The specification of a layer, by its index or its type.

        Raises:
            ValueError: no such layer, or an unknown layer type.
        """
        layer_type = as_layer_type("layer_type", kind) if isinstance(kind, str) else self.layer_type(kind)
        return layer_spec(layer_type, self.csa_ratio, self.hca_ratio, self.rope, self.compress_rope)

    def compress_ratio(self, layer_type: LayerType | str) -> int:
        """Tokens per entry in layers of this type; 0 for sliding layers, which have no entries.

        Raises:
            ValueError: unknown layer type.
        """
        return self.layer(as_layer_type("layer_type", layer_type)).compress_ratio

    def rope_for(self, layer_type: LayerType | str) -> RopeConfig:
        """Configuration of the one rotary table that layers of this type use for everything they rotate.

        Raises:
            ValueError: unknown layer type.
        """
        return self.layer(as_layer_type("layer_type", layer_type)).rope

    @classmethod
    def deepseek_v4_flash(cls) -> "AttentionConfig":
        """DeepSeek-V4-Flash: 43 layers (2 sliding, then CSA and HCA in turn). Its MTP layer is not included."""
        return cls(
            hidden_size=4096,
            num_attention_heads=64,
            q_lora_rank=1024,
            o_groups=8,
            index_topk=512,
            layer_types=(LayerType.SLIDING,) * 2 + (LayerType.CSA, LayerType.HCA) * 20 + (LayerType.CSA,),
            **_RELEASED,
        )

    @classmethod
    def deepseek_v4_pro(cls) -> "AttentionConfig":
        """DeepSeek-V4-Pro: 61 layers (2 HCA, then CSA and HCA in turn). Its MTP layer is not included."""
        return cls(
            hidden_size=7168,
            num_attention_heads=128,
            q_lora_rank=1536,
            o_groups=16,
            index_topk=1024,
            layer_types=(LayerType.HCA,) * 2 + (LayerType.CSA, LayerType.HCA) * 29 + (LayerType.CSA,),
            **_RELEASED,
        )

    @classmethod
    def tiny(cls) -> "AttentionConfig":
        """Three small layers, one of each type, for tests and examples. No released model has these sizes."""
        return cls(
            hidden_size=64,
            num_attention_heads=4,
            head_dim=32,
            qk_rope_head_dim=16,
            q_lora_rank=32,
            o_groups=2,
            o_lora_rank=16,
            sliding_window=8,
            layer_types=(LayerType.SLIDING, LayerType.CSA, LayerType.HCA),
            csa_ratio=4,
            hca_ratio=8,
            index_n_heads=4,
            index_head_dim=32,
            index_topk=4,
            rope=RopeConfig(10_000.0),
            compress_rope=RopeConfig(160_000.0, YarnConfig(16.0, 64, 32.0, 1.0)),
        )

    @classmethod
    def from_hf_config(cls, mapping_or_path: Mapping[str, Any] | str | os.PathLike[str]) -> "AttentionConfig":
        """Read a published DeepSeek-V4 config.

        Three spellings are understood: the released `config.json`, DeepSeek's own `inference/config.json`, and what
        transformers' `DeepseekV4Config.save_pretrained` writes. Layer types, rotary bases and YaRN must be stated. Only
        `rms_norm_eps`, `initializer_range` and the ratios of CSA and HCA have defaults, a ratio only with
        `compress_ratios` or where no layer needs it. MTP layers are left out.

        Args:
            mapping_or_path: the parsed config, the path of a JSON file, or a directory that holds a `config.json`.

        Returns:
            The config, with `num_hidden_layers` layers.

        Raises:
            ValueError: not a DeepSeek-V4 config, a key missing, contradictory, out of range or stated twice; the
                message names it.
            FileNotFoundError: there is no such file; models are not downloaded.
        """
        fields, source = read_hf_config(mapping_or_path)
        with naming(source):
            return cls(**fields)

    def to_hf_config(self) -> dict[str, Any]:
        """The fields of a `config.json` that concern attention, as transformers 5.24 saves them.

        Returns:
            A mapping that `from_hf_config` reads as this config. It lacks the fields that attention does not need
            (those of experts, vocabulary and hyper-connections).
        """
        return write_hf_config({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})


def as_config(value: object) -> AttentionConfig:
    """Return `value` as an `AttentionConfig`, or raise ValueError."""
    if not isinstance(value, AttentionConfig):
        hint = "; AttentionConfig.from_hf_config reads one" if isinstance(value, Mapping) else ""
        raise ValueError(f"config: expected an AttentionConfig, got {type(value).__name__}{hint}")
    return value
