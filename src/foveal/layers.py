"""Layer types and their specifications; configurations of rotary tables. This module does not import JAX."""

import dataclasses
import enum
from collections.abc import Iterable, Mapping

from foveal.checks import as_float, as_int, described


class LayerType(enum.StrEnum):
    """The layer types, by what they attend to beyond the sliding window. Their values are transformers' names.

    Every argument that takes a layer type also takes "sliding", "csa" or "hca", in upper or lower case.
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
    """Return the `LayerType` that `value` names, or raise a ValueError about the argument `name`."""
    try:
        return LayerType(value)  # pyright: ignore[reportArgumentType]  (an unknown value is the point)
    except ValueError:
        raise ValueError(f"{name}: expected one of {_LAYER_TYPE_NAMES}, got {described(value)}") from None


def as_layer_types(name: str, values: object) -> tuple[LayerType, ...]:
    """Return the layer types that `values` lists, one per layer, or raise a ValueError about the argument `name`."""
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
        factor: divisor of the slow frequencies, >= 1.
        original_max_position_embeddings: the context length that the unscaled table was trained for.
        beta_fast: number of turns over that length above which a frequency is left unscaled.
        beta_slow: number of turns over that length below which it is divided by `factor`; 0 < beta_slow < beta_fast.

    Raises:
        ValueError: a field is out of range; the message names it.
    """

    # Keeps run-time type checkers off __init__: __post_init__ takes ints for floats and its errors say more.
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
    """Configuration of one rotary table.

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


class Pooling(enum.StrEnum):
    """Ways to pool the tokens of a window into an entry."""

    NONE = "none"
    """No entries."""
    GATED = "gated"
    """A softmax over the window's own tokens (arXiv 2606.19348, equations 20-23)."""
    OVERLAPPED = "overlapped"
    """A softmax over the tokens of the window and of the one before it (equations 9-12)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """The specification of a layer type: everything that sets its layers apart from those of other types.

    Attributes:
        layer_type: the type.
        compress_ratio: m, tokens per entry; 0 without entries.
        pooling: how a window's tokens become an entry.
        has_indexer: whether each query attends to selected entries instead of all that it sees.
        rope: the rotary table of every rotation in the layer.
        projections: values, and as many gates, that each token contributes per dim of an entry: 0, 1 or 2.
        has_entries: whether there is a compressor.
        overlap: whether an entry also draws on the window before its own.
    """

    layer_type: LayerType
    compress_ratio: int
    pooling: Pooling
    has_indexer: bool
    rope: RopeConfig
    projections: int = dataclasses.field(init=False)
    has_entries: bool = dataclasses.field(init=False)
    overlap: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Derive the fields that follow from the pooling."""
        projections = {Pooling.NONE: 0, Pooling.GATED: 1, Pooling.OVERLAPPED: 2}[self.pooling]
        object.__setattr__(self, "projections", projections)
        object.__setattr__(self, "has_entries", projections > 0)
        object.__setattr__(self, "overlap", self.pooling is Pooling.OVERLAPPED)


def layer_spec(
    layer_type: LayerType, csa_ratio: int, hca_ratio: int, rope: RopeConfig, compress_rope: RopeConfig
) -> LayerSpec:
    """The specification of a DeepSeek-V4 layer type, given a model's ratios and rotary tables."""
    ratio, pooling, table = {
        LayerType.SLIDING: (0, Pooling.NONE, rope),
        LayerType.CSA: (csa_ratio, Pooling.OVERLAPPED, compress_rope),
        LayerType.HCA: (hca_ratio, Pooling.GATED, compress_rope),
    }[layer_type]
    return LayerSpec(
        layer_type=layer_type,
        compress_ratio=ratio,
        pooling=pooling,
        has_indexer=layer_type is LayerType.CSA,
        rope=table,
    )


def layer_types_from_compress_ratios(
    compress_ratios: Iterable[int], *, num_layers: int | None = None, csa_ratio: int = 4, hca_ratio: int = 128
) -> tuple[LayerType, ...]:
    """Translate the `compress_ratios` of a published config, one int per layer, into layer types.

    Args:
        compress_ratios: 0 for a sliding layer, `csa_ratio` for CSA, `hca_ratio` for HCA. Published lists end with
            the ratios of the MTP layers.
        num_layers: number of layers to take; the rest of the list is ignored. None takes all.
        csa_ratio: the ratio that means CSA.
        hca_ratio: the ratio that means HCA.

    Returns:
        One `LayerType` per layer.

    Raises:
        ValueError: the list is empty, shorter than `num_layers` or holds an unknown ratio, or the two ratios are equal
            and therefore do not identify the layer type.
    """
    csa_ratio, hca_ratio = as_int("csa_ratio", csa_ratio, 1), as_int("hca_ratio", hca_ratio, 1)
    if csa_ratio == hca_ratio:
        raise ValueError(
            f"compress_ratios: expected csa_ratio != hca_ratio, got {csa_ratio} for both, which makes CSA "
            "and HCA indistinguishable; give layer_types instead"
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
