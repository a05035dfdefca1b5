"""Released weights into modules."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from foveal.checkpoint import fp8
from foveal.checkpoint.files import CheckpointError, CheckpointFiles, StoredTensor, read_json
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
from foveal.nn.attention import CompressedAttention
from foveal.typing import Array, DTypeLike, Precision

_PLAIN = ("BF16", "F16", "F32")
_SCALES = ("F8_E8M0", "F32")

Placement = jax.sharding.Mesh | jax.sharding.Sharding | None


class Source(NamedTuple):
    """A parameter's tensors.

    Attributes:
        row: which parameter.
        weight: the tensor.
        scale: the scales of its blocks, where it is F8_E4M3.
    """

    row: Row
    weight: StoredTensor
    scale: StoredTensor | None

    @property
    def size(self) -> int:
        """In bytes, scales included."""
        return self.weight.size + (0 if self.scale is None else self.scale.size)

    @property
    def fits_bfloat16(self) -> bool:
        """Whether bfloat16 holds all that the file's numbers can be."""
        return self.weight.dtype == "BF16" or (self.scale is not None and self.scale.dtype == "F8_E8M0")


@dataclasses.dataclass(frozen=True)
class AttentionCheckpoint:
    """What of a checkpoint are layers of attention: found, checked, and not read yet.

    Attributes:
        files: of the checkpoint.
        config: of the model.
        dialect: whose names it has.
        layers: the parameters of each layer that was asked for.
    """

    files: CheckpointFiles
    config: AttentionConfig
    dialect: Dialect
    layers: dict[int, tuple[Source, ...]]

    @property
    def dtype(self) -> DTypeLike:
        """The narrower of bfloat16 and float32 that holds every kernel exactly."""
        kernels = (source for sources in self.layers.values() for source in sources if source.row.is_kernel)
        return jnp.bfloat16 if all(source.fits_bfloat16 for source in kernels) else jnp.float32

    def load(
        self,
        layer: int,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike | None = None,
        precision: Precision = None,
        sharding: Placement = None,
    ) -> CompressedAttention:
        """One of the layers; arguments and errors are those of `load_attention`."""
        dtype = self.dtype if dtype is None else dtype
        abstract = abstract_layer(self.config, layer, dtype, dtype if param_dtype is None else param_dtype, precision)
        graph, state = nnx.split(abstract)
        flat, placements = dict(nnx.to_flat_state(state)), _placements(state, sharding)
        for source in self.layers[layer]:
            path = tuple(source.row.path.split("."))
            value = _read(source, flat[path].shape, flat[path].dtype)
            flat[path] = flat[path].replace(_place(value, placements[path]))
        return nnx.merge(graph, nnx.from_flat_state(flat))


def load_attention(
    path: str | os.PathLike[str],
    config: AttentionConfig | None = None,
    layers: Iterable[int] | None = None,
    *,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
    precision: Precision = None,
    sharding: Placement = None,
) -> dict[int, CompressedAttention]:
    """The attention layers of a DeepSeek-V4 checkpoint.

    Released files (Flash, Pro and their Base variants), transformers' and those of `save_attention` are understood,
    whichever names they have; FP8 weights are dequantised exactly. Only what is asked for is read, a tensor at a time.
    Embeddings, experts and hyper-connections are passed over, and so are MTP layers.

    Args:
        path: a directory with `config.json` and safetensors files, with an index or without. Links in it are followed:
            the Hugging Face cache is made of them.
        config: of the model; read from `config.json` by default.
        layers: indices of the layers to load; all by default.
        dtype: of activations, as in `CompressedAttention`. By default the narrower of bfloat16 and float32 that holds
            every kernel of the file exactly: bfloat16 for the releases, float32 for FP8 with float32 scales.
        param_dtype: of the kernels; `dtype` by default. Sinks, position biases and norm scales are float32 in any case.
        precision: of the matmuls.
        sharding: where the parameters go. A mesh: each by the names of its axes, under the rules in force
            (`flax.core.spmd.logical_axis_rules`). A sharding: all by it. By default, JAX's default device.

    Returns:
        The layers by index, in ascending order.

    Raises:
        CheckpointError: a `ValueError`. Tensors are missing, unexpected, or of another shape or dtype, all of them
            listed in its `problems`; or a file is missing, damaged or hostile.
        ValueError: no such layer, or not the config of a DeepSeek-V4 model.
        FileNotFoundError: there is no `config.json`, and no config was given.
        ImportError: safetensors is missing (`pip install foveal[checkpoint]`).
    """
    _check_sharding(sharding)
    found = find_attention(path, config, layers)
    options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "precision": precision}
    return {layer: found.load(layer, sharding=sharding, **options) for layer in found.layers}


def find_attention(
    path: str | os.PathLike[str], config: AttentionConfig | None = None, layers: Iterable[int] | None = None
) -> AttentionCheckpoint:
    """Finds and checks the tensors of attention layers; reads headers only. See `load_attention`."""
    files = CheckpointFiles(path)
    if config is None:
        config = AttentionConfig.from_hf_config(files.directory)
    elif not isinstance(config, AttentionConfig):
        raise ValueError(f"config: expected an AttentionConfig or None, got {type(config).__name__}")
    if (files.directory / "config.json").exists():
        _check_blocks(files)
    wanted = _wanted(config, layers)
    names = attention_names(files.where)
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


def abstract_layer(
    config: AttentionConfig,
    layer: int,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    precision: Precision = None,
) -> CompressedAttention:
    """A layer whose parameters are shapes: nothing is allocated."""
    return nnx.eval_shape(
        lambda: CompressedAttention(
            config, layer, dtype=dtype, param_dtype=param_dtype, precision=precision, rngs=nnx.Rngs(0)
        )
    )


def parameter_shapes(config: AttentionConfig, layer: int) -> Mapping[str, tuple[int, ...]]:
    """Of a layer's parameters, by dotted path."""
    return _shapes_of_type(dataclasses.replace(config, layer_types=(config.layer_type(layer),)))


@functools.lru_cache(maxsize=16)  # a model has dozens of layers of three types
def _shapes_of_type(config: AttentionConfig) -> Mapping[str, tuple[int, ...]]:
    flat = nnx.to_flat_state(nnx.state(abstract_layer(config, 0), nnx.Param))
    return MappingProxyType({".".join(map(str, path)): variable.shape for path, variable in flat})


class _Finder:
    """Finds the tensors of one layer, and notes what is wrong with them."""

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
        """Of every parameter that is all right."""
        shapes = parameter_shapes(self.config, self.layer)
        rows = rows_of(self.config.layer_type(self.layer))
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
        for name in scale_names(suffix):  # of a weight of which nothing is known there is nothing to say
            self.left.pop(name, None)
        return None

    def _scale(self, suffix: str, shape: tuple[int, int]) -> StoredTensor | None:
        given = [name for name in scale_names(suffix) if name in self.left] or [scale_names(suffix)[0]]
        scale = self._tensor(given[0])  # of two, the other stays and is unexpected
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
        except CheckpointError as error:  # of a whole file: said once, not for each of its tensors
            self.problems |= dict.fromkeys(f"{error.path}: {problem}" for problem in error.problems)
            return None

    def _note(self, name: str, problem: str) -> None:
        self.problems[f"{name}: {problem}"] = None


def _wanted(config: AttentionConfig, layers: Iterable[int] | None) -> list[int]:
    if layers is None:
        return list(range(config.num_layers))
    if isinstance(layers, (str, bytes)) or not isinstance(layers, Iterable):
        raise ValueError(f"layers: expected indices of layers or None, got {layers!r}")
    wanted = list(layers)
    for layer in wanted:
        config.layer_type(layer)  # says which ones there are
    repeated = sorted(layer for layer, count in Counter(wanted).items() if count > 1)
    if repeated:
        raise ValueError(f"layers: expected each layer once, got {repeated} more often")
    return sorted(wanted)


def _check_blocks(files: CheckpointFiles) -> None:
    """Scales of other blocks could have the right shape by chance."""
    quantization = read_json(files.directory / "config.json").get("quantization_config")
    stated = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if stated is not None and stated != [fp8.BLOCK, fp8.BLOCK]:
        problem = f"quantization_config.weight_block_size: expected {[fp8.BLOCK, fp8.BLOCK]}, got {stated!r}"
        raise CheckpointError(files.directory / "config.json", [problem])


def _check_sharding(sharding: object) -> None:
    if sharding is not None and not isinstance(sharding, jax.sharding.Mesh | jax.sharding.Sharding):
        raise ValueError(f"sharding: expected a Mesh, a Sharding or None, got {type(sharding).__name__}")


def _placements(state: Any, sharding: Placement) -> dict[tuple[Any, ...], jax.sharding.Sharding | None]:
    paths = [path for path, _ in nnx.to_flat_state(state)]
    if isinstance(sharding, jax.sharding.Mesh):
        by_axes = dict(nnx.to_flat_state(nnx.get_named_sharding(state, sharding)))
        return {path: by_axes[path].get_value() for path in paths}
    return dict.fromkeys(paths, sharding)


def _read(source: Source, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    weight = source.weight.read()
    stored = weight if source.scale is None else fp8.dequantized(weight, source.scale.read(), dtype)
    return np.ascontiguousarray(source.row.to_module(stored.astype(dtype, copy=False), shape))


def _place(value: np.ndarray, sharding: jax.sharding.Sharding | None) -> Array:
    if sharding is None:
        return jnp.asarray(value)
    # Unlike device_put also where some of the devices belong to other processes.
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
