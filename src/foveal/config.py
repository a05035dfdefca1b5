"""What a DeepSeek-V4 attention stack is made of: sizes, layer types and rotary tables.

Every size is checked here, once, when a config is built; the rest of the package relies on it. The classes are frozen
and hashable, so a config can be a static argument of a jitted function. The numbers are those of the DeepSeek-V4
technical report (arXiv 2606.19348) and of the released `config.json` files. This module does not import JAX.
"""

import dataclasses
import enum
import os
from collections.abc import Iterable, Mapping
from typing import Any

from foveal.checks import as_float, as_int, described


class LayerType(enum.StrEnum):
    """The kinds of layers, by what they attend to beyond the sliding window, with transformers' names as values.

    Wherever a layer type is taken, "sliding", "csa" and "hca" stand for them; upper and lower case are the same.
    """

    SLIDING = "sliding_attention"
    CSA = "compressed_sparse_attention"
    HCA = "heavily_compressed_attention"

    @classmethod
    def _missing_(cls, value: object) -> "LayerType | None":
        name = value.lower() if isinstance(value, str) else None
        return next((known for known in cls if name in (known.value, known.name.lower())), None)


_LAYER_TYPE_NAMES = (
    f"{', '.join(repr(str(known)) for known in LayerType)} (or {', '.join(known.name.lower() for known in LayerType)})"
)


def as_layer_type(name: str, value: object) -> LayerType:
    """The layer type that an argument, `name` in the ValueError, says."""
    try:
        return LayerType(value)  # pyright: ignore[reportArgumentType]  (an unknown value is the point)
    except ValueError:
        raise ValueError(f"{name}: expected one of {_LAYER_TYPE_NAMES}, got {described(value)}") from None


def _as_layer_types(name: str, values: object) -> tuple[LayerType, ...]:
    if isinstance(values, (str, Mapping)) or not isinstance(values, Iterable):
        raise ValueError(f"{name}: expected a sequence with one layer type per layer, got {described(values)}")
    layer_types = tuple(as_layer_type(f"{name}[{index}]", value) for index, value in enumerate(values))
    if not layer_types:
        raise ValueError(f"{name}: expected at least one layer type, got none; known ones are {_LAYER_TYPE_NAMES}")
    return layer_types


@dataclasses.dataclass(frozen=True)
class YarnConfig:
    """YaRN frequency scaling of a rotary table. It never scales cos and sin: DeepSeek-V4 uses no mscale.

    Attributes:
        factor: by how much the slow frequencies are divided, >= 1.
        original_max_position_embeddings: the context length that the unscaled table was trained for.
        beta_fast: turns within that length above which a frequency is kept.
        beta_slow: turns within that length below which a frequency is divided by `factor`; 0 < beta_slow < beta_fast.

    Raises:
        ValueError: a field is out of range; the message names it.
    """

    # Run-time type checkers leave __init__ alone: __post_init__ takes ints for floats and its errors say more.
    __no_type_check__ = True

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float

    def __post_init__(self) -> None:
        """Check the ranges; make the numbers plain `float` and `int`."""
        length = as_int("original_max_position_embeddings", self.original_max_position_embeddings, 1)
        object.__setattr__(self, "factor", as_float("factor", self.factor, ">= 1", 1.0, inclusive=True))
        object.__setattr__(self, "original_max_position_embeddings", length)
        object.__setattr__(self, "beta_slow", as_float("beta_slow", self.beta_slow, "> 0", 0.0))
        bound = f"> beta_slow = {self.beta_slow}"
        object.__setattr__(self, "beta_fast", as_float("beta_fast", self.beta_fast, bound, self.beta_slow))


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """One rotary table.

    Attributes:
        theta: the base of the frequencies, > 1.
        yarn: YaRN scaling, or None for plain frequencies.

    Raises:
        ValueError: a field is out of range; the message names it.
    """

    __no_type_check__ = True  # as in YarnConfig

    theta: float
    yarn: YarnConfig | None = None

    def __post_init__(self) -> None:
        """Check the ranges; make `theta` a plain `float`."""
        object.__setattr__(self, "theta", as_float("theta", self.theta, "> 1", 1.0))
        if self.yarn is not None and not isinstance(self.yarn, YarnConfig):
            raise ValueError(f"yarn: expected a YarnConfig or None, got {described(self.yarn)}")


# What the Flash and Pro releases share.
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
    """The attention of a DeepSeek-V4 model: every layer's sizes and what each layer attends to.

    Sizes are ints >= 1. Field names are those of the released `config.json`.

    Attributes:
        hidden_size: model width E.
        num_attention_heads: query heads H.
        head_dim: width D of a query head and of the one shared key-value head.
        qk_rope_head_dim: trailing dims R of a head (and of an indexer head) that are rotated; even.
        q_lora_rank: width of the query bottleneck, which the indexer shares.
        o_groups: groups of the output projection; divides `num_attention_heads`.
        o_lora_rank: width of each group's output bottleneck.
        sliding_window: raw keys W that a query sees, itself included.
        layer_types: one per layer; strings that name a `LayerType` are accepted, and any sequence.
        csa_ratio: tokens m that one entry of a CSA layer adds (4 in the releases).
        hca_ratio: tokens m that one entry of an HCA layer summarises (128 in the releases).
        index_n_heads: indexer heads I.
        index_head_dim: width J of an indexer head.
        index_topk: entries K that the indexer selects per query.
        rope: rotary table of the sliding layers ("main").
        compress_rope: rotary table of every rotation in CSA and HCA layers, those of the window included ("compress").
        rms_norm_eps: epsilon of every RMS norm, > 0.
        initializer_range: standard deviation of freshly drawn weights, >= 0.

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
        object.__setattr__(self, "layer_types", _as_layer_types("layer_types", self.layer_types))
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
        """How many layers `layer_types` describes."""
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

    def compress_ratio(self, layer_type: LayerType | str) -> int:
        """Tokens per entry in layers of this type; 0 for sliding layers, which have no entries.

        Raises:
            ValueError: unknown layer type.
        """
        ratios = {LayerType.SLIDING: 0, LayerType.CSA: self.csa_ratio, LayerType.HCA: self.hca_ratio}
        return ratios[as_layer_type("layer_type", layer_type)]

    def rope_for(self, layer_type: LayerType | str) -> RopeConfig:
        """The one rotary table that layers of this type use for everything they rotate.

        Raises:
            ValueError: unknown layer type.
        """
        sliding = as_layer_type("layer_type", layer_type) is LayerType.SLIDING
        return self.rope if sliding else self.compress_rope

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
        transformers' `DeepseekV4Config.save_pretrained` writes. Nothing that changes the numbers is guessed: layer
        types, rotary bases and YaRN must be stated. MTP layers are left out.

        Args:
            mapping_or_path: the parsed config, the path of a JSON file, or a directory that holds a `config.json`.

        Returns:
            The config, with `num_hidden_layers` layers.

        Raises:
            ValueError: not a DeepSeek-V4 config, a key missing, contradictory, out of range or stated twice; the
                message names it.
            FileNotFoundError: there is no such file; models are not downloaded.
        """
        from foveal.hf_config import read_hf_config  # imports this module

        return read_hf_config(mapping_or_path, cls)

    def to_hf_config(self) -> dict[str, Any]:
        """The attention keys of a `config.json`, as transformers 5.24 saves them.

        Returns:
            What `from_hf_config` reads as this config. Keys that attention does not need (of experts, vocabulary and
            hyper-connections) are not in it.
        """
        from foveal.hf_config import write_hf_config  # imports this module

        return write_hf_config(self)


def as_config(value: object) -> AttentionConfig:
    """An `AttentionConfig`, or a ValueError."""
    if not isinstance(value, AttentionConfig):
        hint = "; AttentionConfig.from_hf_config reads one" if isinstance(value, Mapping) else ""
        raise ValueError(f"config: expected an AttentionConfig, got {type(value).__name__}{hint}")
    return value


def layer_types_from_compress_ratios(
    compress_ratios: Iterable[int], *, num_layers: int | None = None, csa_ratio: int = 4, hca_ratio: int = 128
) -> tuple[LayerType, ...]:
    """Translate the `compress_ratios` of a published config, one int per layer, into layer types.

    Args:
        compress_ratios: 0 for a sliding layer, `csa_ratio` for CSA, `hca_ratio` for HCA. Published lists go on with
            the ratios of the MTP layers.
        num_layers: how many layers to take; the rest of the list is ignored. None takes all.
        csa_ratio: the ratio that means CSA.
        hca_ratio: the ratio that means HCA.

    Returns:
        One `LayerType` per layer.

    Raises:
        ValueError: the list is empty, shorter than `num_layers` or holds an unknown ratio, or the two ratios are equal
            so that a ratio does not tell the layer type.
    """
    csa_ratio, hca_ratio = as_int("csa_ratio", csa_ratio, 1), as_int("hca_ratio", hca_ratio, 1)
    if csa_ratio == hca_ratio:
        raise ValueError(
            f"compress_ratios: expected csa_ratio != hca_ratio, got {csa_ratio} for both, so that a ratio does not "
            "tell CSA from HCA; give layer_types instead"
        )
    if isinstance(compress_ratios, (str, Mapping)) or not isinstance(compress_ratios, Iterable):
        raise ValueError(
            f"compress_ratios: expected a sequence of ints, one per layer, got {described(compress_ratios)}"
        )
    ratios = list(compress_ratios)
    count = len(ratios) if num_layers is None else as_int("num_layers", num_layers, 1)
    if not ratios or len(ratios) < count:
        raise ValueError(f"compress_ratios: expected one ratio for each of {count or 'the'} layers, got {len(ratios)}")
    known = {0: LayerType.SLIDING, csa_ratio: LayerType.CSA, hca_ratio: LayerType.HCA}
    layer_types = []
    for index, value in enumerate(ratios[:count]):
        ratio = as_int(f"compress_ratios[{index}]", value)
        if ratio not in known:
            raise ValueError(
                f"compress_ratios[{index}]: expected 0 (sliding), {csa_ratio} (CSA) or {hca_ratio} (HCA), got {ratio}; "
                "for a model with other ratios state them (csa_ratio and hca_ratio; compress_rates in a config file)"
            )
        layer_types.append(known[ratio])
    return tuple(layer_types)
