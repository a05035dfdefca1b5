"""Names and layouts of a layer's parameters in checkpoints: one table, used for loading and for saving.

A row is a parameter of `CompressedAttention`. Linear kernels are [in, out] in modules and [out, in] in files; the
grouped output projection is [G, in, out] in modules and [G * out, in] in files. In modules, as in those of
transformers, the indexer is part of the compressor; in DeepSeek's files the indexer has its own compressor.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from foveal.config import AttentionConfig
from foveal.layers import LayerSpec


class Dialect(enum.StrEnum):
    """The naming scheme of a checkpoint.

    `DEEPSEEK`: the released files, `layers.0.attn.wq_a.weight`. `TRANSFORMERS`: the modules of transformers' model,
    `model.layers.0.self_attn.q_a_proj.weight`. `TRANSFORMERS_SAVED`: what `save_pretrained` of transformers 5.24
    writes, DeepSeek's names under `model.` except for `attn.norm.weight`.
    """

    DEEPSEEK = "deepseek"
    TRANSFORMERS = "transformers"
    TRANSFORMERS_SAVED = "transformers-saved"


def as_dialect(dialect: Dialect | str) -> Dialect:
    """Return the dialect of a name.

    Raises:
        ValueError: there is no such dialect.
    """
    if dialect not in tuple(Dialect):
        raise ValueError(f"dialect: expected one of {', '.join(map(repr, map(str, Dialect)))}, got {dialect!r}")
    return Dialect(dialect)


class Layout(enum.Enum):
    """The conversion of a file's array to the module's."""

    SAME = enum.auto()
    LINEAR = enum.auto()
    """[out, in] becomes [in, out]."""
    GROUPED = enum.auto()
    """[G * out, in] becomes [G, in, out]."""


class Stored(enum.StrEnum):
    """The dtype in the released files, as safetensors spells it. F8_E4M3 comes with one scale per block."""

    F8 = "F8_E4M3"
    BF16 = "BF16"
    F32 = "F32"


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter.

    Attributes:
        path: dotted path in the module.
        deepseek: name after `layers.N.attn.` in the released files.
        transformers: name after `model.layers.N.self_attn.` in transformers' modules.
        saved: name after `model.layers.N.attn.` in the files that transformers saves.
        maxtext: name after `self_attention-` in MaxText's parameters; {c} is csa_compressor or hca_compressor.
        layout: layout of the file's array. MaxText's kernels are laid out as the module's.
        stored: dtype in the released files.
        maxtext_heads: number of heads into which MaxText splits the kernel's outputs, or the `AttentionConfig` field
            that holds it; None if it does not split them.
    """

    path: str
    deepseek: str
    transformers: str
    saved: str
    maxtext: str
    layout: Layout
    stored: Stored
    maxtext_heads: str | int | None = None

    @property
    def is_kernel(self) -> bool:
        """Whether it is a matmul operand, which has `param_dtype`. Other parameters are always float32."""
        return self.layout is not Layout.SAME

    def is_in(self, layer: LayerSpec) -> bool:
        """Whether layers of this type have the parameter."""
        if self.path.startswith("compressor.indexer."):
            return layer.has_indexer
        return layer.has_entries or not self.path.startswith("compressor.")

    def suffix(self, dialect: Dialect) -> str:
        """Return the name after the layer's prefix."""
        names = {
            Dialect.DEEPSEEK: self.deepseek,
            Dialect.TRANSFORMERS: self.transformers,
            Dialect.TRANSFORMERS_SAVED: self.saved,
        }
        return names[dialect]

    def file_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape in files of a parameter with this shape in the module."""
        if self.layout is Layout.GROUPED:
            groups, inputs, outputs = shape
            return groups * outputs, inputs
        return tuple(shape[::-1]) if self.layout is Layout.LINEAR else tuple(shape)

    def to_module(self, stored: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Convert a file's array to the module's, of shape `shape`; a view where possible."""
        if self.layout is Layout.GROUPED:
            groups, inputs, outputs = shape
            return stored.T.reshape(inputs, groups, outputs).swapaxes(0, 1)
        return stored.T if self.layout is Layout.LINEAR else stored

    def to_file(self, value: np.ndarray) -> np.ndarray:
        """Convert a module's array to the file's, contiguous; the inverse of `to_module`."""
        turned = value.swapaxes(-1, -2) if self.is_kernel else value
        return np.ascontiguousarray(turned).reshape(self.file_shape(value.shape))


_LINEAR, _GROUPED, _SAME = Layout.LINEAR, Layout.GROUPED, Layout.SAME
_F8, _BF16, _F32 = Stored.F8, Stored.BF16, Stored.F32
_C, _I = "compressor.", "compressor.indexer."

# fmt: off
ROWS: tuple[Row, ...] = (
    #   module, DeepSeek, transformers' modules, transformers' files, MaxText, layout, released dtype
    Row("q_a_proj.kernel", "wq_a.weight", "q_a_proj.weight", "wq_a.weight", "wq_a-kernel", _LINEAR, _F8),
    Row("q_a_norm.scale", "q_norm.weight", "q_a_norm.weight", "q_norm.weight", "q_norm-scale", _SAME, _BF16),
    Row("q_b_proj.kernel", "wq_b.weight", "q_b_proj.weight", "wq_b.weight", "wq_b-kernel", _LINEAR, _F8,
        maxtext_heads="num_attention_heads"),
    Row("kv_proj.kernel", "wkv.weight", "kv_proj.weight", "wkv.weight", "wkv-kernel", _LINEAR, _F8, maxtext_heads=1),
    Row("kv_norm.scale", "kv_norm.weight", "kv_norm.weight", "norm.weight", "kv_norm-scale", _SAME, _BF16),
    Row("sinks", "attn_sink", "sinks", "attn_sink", "sinks", _SAME, _F32),
    Row("o_a_proj.kernel", "wo_a.weight", "o_a_proj.weight", "wo_a.weight", "o_a_proj-kernel", _GROUPED, _F8),
    Row("o_b_proj.kernel", "wo_b.weight", "o_b_proj.weight", "wo_b.weight", "o_b_proj-kernel", _LINEAR, _F8),

    Row(_C + "kv_proj.kernel", "compressor.wkv.weight", _C + "kv_proj.weight", "compressor.wkv.weight",
        "{c}-kv_proj-kernel", _LINEAR, _BF16),
    Row(_C + "gate_proj.kernel", "compressor.wgate.weight", _C + "gate_proj.weight", "compressor.wgate.weight",
        "{c}-gate_proj-kernel", _LINEAR, _BF16),
    Row(_C + "position_bias", "compressor.ape", _C + "position_bias", "compressor.ape",
        "{c}-position_bias", _SAME, _F32),
    Row(_C + "kv_norm.scale", "compressor.norm.weight", _C + "kv_norm.weight", "compressor.norm.weight",
        "{c}-kv_norm-scale", _SAME, _BF16),

    Row(_I + "q_b_proj.kernel", "indexer.wq_b.weight", _I + "q_b_proj.weight", "indexer.wq_b.weight",
        "{c}-indexer-q_proj-kernel", _LINEAR, _F8),
    Row(_I + "scorer.weights_proj.kernel", "indexer.weights_proj.weight", _I + "scorer.weights_proj.weight",
        "indexer.weights_proj.weight", "{c}-indexer-weights_proj-kernel", _LINEAR, _BF16),
    Row(_I + "kv_proj.kernel", "indexer.compressor.wkv.weight", _I + "kv_proj.weight", "indexer.compressor.wkv.weight",
        "{c}-indexer-kv_proj-kernel", _LINEAR, _BF16),
    Row(_I + "gate_proj.kernel", "indexer.compressor.wgate.weight", _I + "gate_proj.weight",
        "indexer.compressor.wgate.weight", "{c}-indexer-gate_proj-kernel", _LINEAR, _BF16),
    Row(_I + "position_bias", "indexer.compressor.ape", _I + "position_bias", "indexer.compressor.ape",
        "{c}-indexer-position_bias", _SAME, _F32),
    Row(_I + "kv_norm.scale", "indexer.compressor.norm.weight", _I + "kv_norm.weight", "indexer.compressor.norm.weight",
        "{c}-indexer-kv_norm-scale", _SAME, _BF16),
)
# fmt: on

SCALE_SUFFIXES = (".scale", ".weight_scale_inv")
"""Endings that replace `.weight` in the name of a weight's scales: that of the releases and that of transformers."""

_PREFIXES = {
    Dialect.DEEPSEEK: "layers.{}.attn.",
    Dialect.TRANSFORMERS: "model.layers.{}.self_attn.",
    Dialect.TRANSFORMERS_SAVED: "model.layers.{}.attn.",
}
# transformers saves its base model without `model.`, and other tools save DeepSeek's names with it.
_ATTENTION = re.compile(r"(?:model\.)?layers\.(0|[1-9][0-9]{0,8})\.(attn|self_attn)\.(.+)", re.DOTALL)


class AttentionName(NamedTuple):
    """A tensor's name, split into its parts.

    Attributes:
        full: the name itself.
        layer: the layer's index.
        module: "attn" or "self_attn".
        suffix: the name after the module.
    """

    full: str
    layer: int
    module: str
    suffix: str


def rows_of(layer: LayerSpec) -> tuple[Row, ...]:
    """Return the rows of the parameters that a layer of this type has."""
    return tuple(row for row in ROWS if row.is_in(layer))


def layer_prefix(dialect: Dialect, layer: int) -> str:
    """Return the prefix of the names of a layer's attention."""
    return _PREFIXES[dialect].format(layer)


def full_name(row: Row, dialect: Dialect, layer: int) -> str:
    """Return the name of a parameter in a checkpoint."""
    return layer_prefix(dialect, layer) + row.suffix(dialect)


def scale_names(weight: str) -> tuple[str, ...]:
    """Return the names that the scales of a quantised weight may have."""
    return tuple(weight.removesuffix(".weight") + suffix for suffix in SCALE_SUFFIXES)


def scale_name(weight: str, dialect: Dialect) -> str:
    """Return the name of a quantised weight's scales in this dialect."""
    return scale_names(weight)[0 if dialect is Dialect.DEEPSEEK else 1]


def attention_names(names: Iterable[str]) -> list[AttentionName]:
    """Select the names that belong to a layer's attention, in any dialect; MTP layers (`mtp.`) are left out."""
    found = ((name, _ATTENTION.fullmatch(name)) for name in names)
    return [AttentionName(name, int(match[1]), match[2], match[3]) for name, match in found if match]


def dialect_of(names: Sequence[AttentionName]) -> Dialect:
    """Return the dialect that most of these names are in; the first one where several fit equally well."""

    def fit(dialect: Dialect) -> tuple[int, int]:
        known = {row.suffix(dialect) for row in ROWS}
        suffixes = [name.suffix for name in names if name.module == module_of(dialect)]
        return len(suffixes), sum(suffix in known for suffix in suffixes)

    return max(Dialect, key=fit)


def module_of(dialect: Dialect) -> str:
    """Return the name of a layer's attention module: "attn" or "self_attn"."""
    return _PREFIXES[dialect].split(".")[-2]


def maxtext_path(row: Row, layer: LayerSpec) -> tuple[str, ...]:
    """Return a parameter's path below `self_attention` in MaxText's parameters."""
    compressor = "csa_compressor" if layer.has_indexer else "hca_compressor"
    return tuple(row.maxtext.format(c=compressor).split("-"))


def maxtext_shape(row: Row, config: AttentionConfig, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape in MaxText of a parameter with this shape in the module."""
    if row.maxtext_heads is None:
        return tuple(shape)
    heads = getattr(config, row.maxtext_heads) if isinstance(row.maxtext_heads, str) else row.maxtext_heads
    inputs, outputs = shape
    return inputs, heads, outputs // heads
