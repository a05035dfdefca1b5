"""What `foveal verify` looks at in one layer of a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from foveal.checkpoint.load import AttentionCheckpoint
from foveal.checkpoint.release import attention_tensors
from foveal.cli.layer import UNDECIDED, selected_entries
from foveal.config import AttentionConfig, LayerType
from foveal.geometry import Documents
from foveal.nn import CompressedAttention
from foveal.testing.generators import random_hidden
from foveal.testing.numerics import assert_close
from foveal.testing.parameters import get_params
from foveal.testing.reference import reference_attention

DTYPES = ("float32", "bfloat16")

Outputs = Callable[[np.ndarray, str], tuple[np.ndarray, np.ndarray | None]]
"""Hidden states and a dtype to outputs [1, S, E], and the entries selected [1, S, K] where the indexer is known."""


class Range(NamedTuple):
    """The least and the greatest of some numbers."""

    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Of a layer's weights.

    Attributes:
        tensors: in the files, scales included.
        bytes: of these.
        as_released: whether names, dtypes and shapes are those of a released checkpoint.
        not_finite: names of parameters that hold NaN or infinities.
        kernels: root mean squares, of one kernel each.
        norms: root mean squares of the norm scales.
        sinks: the sinks themselves.
    """

    tensors: int
    bytes: int
    as_released: bool
    not_finite: tuple[str, ...]
    kernels: Range
    norms: Range
    sinks: Range


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Of outputs for the same random hidden states, in units of their root mean square.

    Attributes:
        worst: max |difference|.
        relative: ||difference|| / ||expected||.
        same_choice: the share of queries whose indexer selects the same entries; None without an indexer.
        complaints: what is wrong, nothing if they agree.
    """

    worst: float
    relative: float
    same_choice: float | None
    complaints: tuple[str, ...]


def statistics(found: AttentionCheckpoint, layer: int, module: CompressedAttention) -> Statistics:
    """Of one layer, loaded."""
    sources = found.layers[layer]
    held = {tensor.name: tensor for source in sources for tensor in (source.weight, source.scale) if tensor}
    scales = {source.scale.dtype for source in sources if source.scale}
    expected = attention_tensors(found.config, layer, found.dialect, min(scales, default="F8_E8M0"))
    as_released = sorted((tensor.dtype, tensor.shape) for tensor in held.values()) == sorted(expected.values())
    arrays = {name: np.asarray(value, np.float32) for name, value in get_params(module).items()}
    return Statistics(
        tensors=len(held),
        bytes=sum(tensor.size for tensor in held.values()),
        as_released=as_released,
        not_finite=tuple(name for name, array in arrays.items() if not np.isfinite(array).all()),
        kernels=_range(_rms(array) for name, array in arrays.items() if name.endswith("kernel")),
        norms=_range(_rms(array) for name, array in arrays.items() if name.endswith("scale")),
        sinks=_range(arrays["sinks"]),
    )


def hidden_states(config: AttentionConfig, tokens: int, seed: int) -> np.ndarray:
    """Random numbers that bfloat16 holds, float32 [1, S, E]."""
    hidden = random_hidden(seed, 1, tokens, config.hidden_size)
    return np.asarray(jnp.asarray(hidden).astype(jnp.bfloat16).astype(jnp.float32))


def with_short_choice(config: AttentionConfig, tokens: int) -> AttentionConfig:
    """The config with so few entries selected that there is a choice to make among those of `tokens`."""
    return dataclasses.replace(config, index_topk=min(config.index_topk, max(1, tokens // config.csa_ratio // 4)))


def by_reference(module: CompressedAttention) -> Outputs:
    """The outputs of foveal's independent reference for a float32 layer's parameters, always in float32."""
    compiled = jax.jit(lambda params, x: reference_attention(params, module.config, module.layer_type, x))

    def outputs(hidden: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray | None]:
        del dtype
        # The reference does not say what it selects; that it is what the layer does shows in the outputs.
        return np.asarray(compiled(get_params(module), hidden)), _choice(module, hidden)[0]

    return outputs


def compare(module: CompressedAttention, expected: Outputs, hidden: np.ndarray, dtype: str) -> Comparison:
    """A layer against something that computes the same.

    A query whose indexer selects other entries is not compared. In float32 that may happen only where rounding decides
    which entry is the last one.
    """
    got = np.asarray(_forward(module, hidden), np.float32)
    want, their_choice = expected(hidden, dtype)
    complaints, same, share = [], np.ones(got.shape[:2], bool), None
    if module.layer_type is LayerType.CSA and their_choice is not None:
        choice, lead = _choice(module, hidden)
        same = _as_sets(choice, got.shape[1]) == _as_sets(their_choice, got.shape[1])
        share = float(same.mean())
        other = int((~same & (lead > UNDECIDED)).sum())
        if dtype == "float32" and other:
            complaints.append(f"the indexer selects other entries for {other} of {same.size} queries")
    if not same.any():
        return Comparison(np.nan, np.nan, share, (*complaints, "no query whose indexer selects the same entries"))
    got, want = got[same], want[same]
    unit = max(_rms(want), float(np.finfo(np.float32).tiny))
    try:
        assert_close(got / unit, want / unit, dtype)
    except AssertionError as error:
        complaints.append(str(error))
    difference = np.abs(got - want) / unit
    return Comparison(float(difference.max()), _rms(difference), share, tuple(complaints))


@nnx.jit
def _forward(module: CompressedAttention, hidden: Any) -> Any:
    return module(hidden)


def _choice(module: CompressedAttention, hidden: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
    if module.layer_type is not LayerType.CSA:
        return None, np.full(hidden.shape[:2], np.inf)
    return selected_entries(module, hidden, Documents.unpacked(*hidden.shape[:2]))


def _as_sets(slots: np.ndarray | None, length: int) -> np.ndarray:
    """[1, S] of frozen sets."""
    assert slots is not None
    sets = np.empty((1, length), object)
    sets[0] = [frozenset(row[row >= 0].tolist()) for row in slots[0]]
    return sets


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64)))) if values.size else 0.0


def _range(values: Any) -> Range:
    numbers = list(values)
    return Range(float(min(numbers)), float(max(numbers)))
