"""Finding a checkpoint's attention tensors and checking their names, dtypes and shapes. Reads headers only."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from foveal.checkpoint import fp8
from foveal.checkpoint.files import CONFIG, CheckpointError, CheckpointFiles, StoredTensor, read_json
from foveal.checkpoint.layers import parameter_shapes
from foveal.checkpoint.names import (
    AttentionName,
    Dialect,
    Row,
    attention_names,
    dialect_of,
    layer_prefix,
    module_of,
    rows_of,
    scale_names,
)
from foveal.config import AttentionConfig

_PLAIN = ("BF16", "F16", "F32")
_SCALES = ("F8_E8M0", "F32")
# The only quantisation accepted in a config: other block sizes or codes could have the right shapes by chance.
_QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [fp8.BLOCK, fp8.BLOCK]}


class Source(NamedTuple):
    """The tensors that hold a parameter.

    Attributes:
        row: the parameter's row in the table of names.
        weight: the tensor.
        scale: the scales of its blocks if it is F8_E4M3, else None.
    """

    row: Row
    weight: StoredTensor
    scale: StoredTensor | None

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """The weight and, if there is one, its scale."""
        return (self.weight,) if self.scale is None else (self.weight, self.scale)


@dataclasses.dataclass(frozen=True)
class AttentionCheckpoint:
    """The attention layers of a checkpoint: found and checked, but not read yet.

    Attributes:
        files: the checkpoint's files.
        config: the model's config.
        dialect: the dialect of its names.
        layers: the sources of each requested layer's parameters, by layer index.
    """

    files: CheckpointFiles
    config: AttentionConfig
    dialect: Dialect
    layers: dict[int, tuple[Source, ...]]


def open_checkpoint(
    path: str | os.PathLike[str], config: AttentionConfig | None = None
) -> tuple[CheckpointFiles, AttentionConfig]:
    """Return a checkpoint's files and config; the config is read from the checkpoint if none is given.

    Raises:
        CheckpointError: there is no checkpoint or no config, or it is damaged.
        ValueError: the config is not that of a DeepSeek-V4 model, or an argument has the wrong type.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"path: expected a path, got {type(path).__name__}")
    files = CheckpointFiles(path)
    stated = files.directory / CONFIG
    if os.path.lexists(stated):
        _check_quantization(stated)
    if config is None:
        if not os.path.lexists(stated):
            raise CheckpointError(path, [f"expected a {CONFIG} beside the files, or a config, got neither"])
        config = AttentionConfig.from_hf_config(stated)
    elif not isinstance(config, AttentionConfig):
        raise ValueError(f"config: expected an AttentionConfig or None, got {type(config).__name__}")
    return files, config


def find_attention(
    path: str | os.PathLike[str], config: AttentionConfig | None = None, layers: Iterable[int] | None = None
) -> AttentionCheckpoint:
    """Find and check the tensors of attention layers; see `foveal.load_attention`."""
    files, config = open_checkpoint(path, config)
    wanted = _wanted(config, layers)
    names = attention_names(files.where)
    if wanted and not names:
        some = "; it has " + ", ".join(sorted(files.where)[:3]) if files.where else ""
        problem = (
            f"expected tensors layers.N.attn.*, model.layers.N.attn.* or model.layers.N.self_attn.*, got none{some}"
        )
        raise CheckpointError(files.path, [problem])
    dialect = dialect_of(names)
    by_layer: dict[int, list[AttentionName]] = defaultdict(list)
    for name in names:
        by_layer[name.layer].append(name)
    problems: dict[str, None] = {}
    if layers is None:
        beyond = (name for layer in sorted(set(by_layer) - set(wanted)) for name in by_layer[layer])
        problems |= dict.fromkeys(f"{name.full}: unexpected, the model has {len(wanted)} layers" for name in beyond)
    sources = {layer: _Finder(files, config, dialect, layer, by_layer[layer], problems).sources() for layer in wanted}
    if problems:
        raise CheckpointError(files.path, problems)
    return AttentionCheckpoint(files, config, dialect, sources)


class _Finder:
    """A search for one layer's tensors that records what is wrong with them."""

    def __init__(
        self,
        files: CheckpointFiles,
        config: AttentionConfig,
        dialect: Dialect,
        layer: int,
        names: Sequence[AttentionName],
        problems: dict[str, None],
    ) -> None:
        self.files, self.config, self.dialect, self.layer, self.problems = files, config, dialect, layer, problems
        self.left: dict[str, str] = {}  # the names that no parameter has claimed yet
        prefixes = Counter(name.full.removesuffix(name.suffix) for name in names if name.module == module_of(dialect))
        self.prefix = max(prefixes, key=lambda prefix: prefixes[prefix], default=layer_prefix(dialect, layer))
        for name in names:
            if name.module != module_of(dialect):
                self._note(name.full, f"unexpected among {dialect} names")
            elif name.suffix in self.left:
                self._note(name.full, f"the same as {self.left[name.suffix]}")
            else:
                self.left[name.suffix] = name.full

    def sources(self) -> tuple[Source, ...]:
        """Return the sources of all parameters without problems, and note the problems of the others."""
        if not self.left:
            self._note(f"{self.prefix}*", f"missing, all of layer {self.layer}")
            return ()
        shapes = parameter_shapes(self.config, self.layer)
        rows = rows_of(self.config.layer(self.layer))
        found = tuple(source for row in rows if (source := self._source(row, shapes[row.path])) is not None)
        for name in self.left.values():
            self._note(name, "unexpected")
        return found

    def _source(self, row: Row, shape: tuple[int, ...]) -> Source | None:
        suffix, expected = row.suffix(self.dialect), row.file_shape(shape)
        weight = self._tensor(suffix)
        if weight is not None and weight.dtype == "F8_E4M3" and row.is_kernel:
            right = self._check_shape(weight, expected)
            scale = self._scale(suffix, fp8.scale_shape((expected[0], expected[1])))
            return Source(row, weight, scale) if right and scale is not None else None
        if weight is not None and weight.dtype in _PLAIN:
            return Source(row, weight, None) if self._check_shape(weight, expected) else None
        if weight is not None:
            kinds = ", ".join(_PLAIN) + (" or F8_E4M3" if row.is_kernel else "")
            self._note(weight.name, f"expected {kinds}, got {weight.dtype}")
            self._check_shape(weight, expected)
        for name in scale_names(suffix):  # without a valid weight, do not report its scales as unexpected
            self.left.pop(name, None)
        return None

    def _scale(self, suffix: str, shape: tuple[int, int]) -> StoredTensor | None:
        given = [name for name in scale_names(suffix) if name in self.left] or [scale_names(suffix)[0]]
        scale = self._tensor(given[0])  # if there are two, the other one is reported as unexpected
        if scale is None:
            return None
        right = self._check_shape(scale, shape)
        if scale.dtype not in _SCALES:
            self._note(scale.name, f"expected {' or '.join(_SCALES)}, got {scale.dtype}")
            right = False
        return scale if right else None

    def _check_shape(self, tensor: StoredTensor, expected: tuple[int, ...]) -> bool:
        if tensor.shape != expected:
            self._note(tensor.name, f"expected shape {list(expected)}, got {list(tensor.shape)}")
        return tensor.shape == expected

    def _tensor(self, suffix: str) -> StoredTensor | None:
        name = self.left.pop(suffix, None)
        if name is None:
            self._note(self.prefix + suffix, "missing")
            return None
        try:
            return self.files.tensor(name)
        except CheckpointError as error:  # concerns the whole file: report it once, not once per tensor
            file = os.path.relpath(error.path, self.files.directory)
            self.problems |= dict.fromkeys(f"{file}: {problem}" for problem in error.problems)
            return None

    def _note(self, name: str, problem: str) -> None:
        self.problems[f"{name}: {problem}"] = None


def _wanted(config: AttentionConfig, layers: Iterable[int] | None) -> list[int]:
    if layers is None:
        return list(range(config.num_layers))
    if isinstance(layers, (str, bytes)) or not isinstance(layers, Iterable):
        raise ValueError(f"layers: expected indices of layers or None, got {layers!r}")
    wanted = []
    for layer in layers:
        try:
            config.layer_type(layer)
        except ValueError:
            raise ValueError(f"layers: expected ints from 0 to {config.num_layers - 1}, got {layer!r}") from None
        wanted.append(int(layer))
    repeated = sorted(layer for layer, count in Counter(wanted).items() if count > 1)
    if repeated:
        raise ValueError(f"layers: expected each layer once, got {repeated} more than once")
    return sorted(wanted)


def _check_quantization(config: Path) -> None:
    stated = read_json(config).get("quantization_config")
    if stated is None:
        return
    if not isinstance(stated, dict):
        raise CheckpointError(config, [f"quantization_config: expected an object, got {type(stated).__name__}"])
    problems = [
        f"quantization_config.{key}: expected {expected!r}, got {stated[key]!r}"
        for key, expected in _QUANTIZATION.items()
        if stated.get(key) is not None and stated[key] != expected
    ]
    if problems:
        raise CheckpointError(config, problems)
