"""What `foveal verify` looks at in one layer of a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from foveal.checkpoint.find import AttentionCheckpoint
from foveal.checkpoint.release import attention_tensors
from foveal.cli.layer import UNDECIDED, selected_entries
from foveal.config import AttentionConfig, LayerType
from foveal.geometry import Documents, Visibility
from foveal.nn import CompressedAttention
from foveal.testing.generators import random_hidden
from foveal.testing.numerics import assert_close
from foveal.testing.parameters import get_params
from foveal.testing.reference import reference_attention

DTYPES = ("float32", "bfloat16")

_LEAST_SHARE = 0.8  # of entries: bfloat16 has 0.95 and more, an indexer that is wrong the share that chance gives it
_MOST_UNDECIDED = 0.5


class Expected(NamedTuple):
    """What something else computes.

    Attributes:
        output: float32 [1, S, E].
        choice: the entries that an indexer selects, [1, S, K], -1 for none; None without an indexer.
        independent: whether the choice is of another implementation, so that to have the same means something.
    """

    output: np.ndarray
    choice: np.ndarray | None
    independent: bool


Outputs = Callable[[np.ndarray, str], Expected]
"""Of hidden states [1, S, E] and the name of a dtype."""


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
        stored: the dtypes of the kernels, as safetensors spells them.
        as_released: whether number, shapes and dtypes are those of a release, its scales being F8_E8M0 or F32.
        not_finite: names of parameters that hold NaN or infinities.
        zero: names of kernels and norm scales that hold nothing but zeros.
        kernels: root mean squares, of one kernel each.
        norms: root mean squares of the norm scales.
        sinks: the sinks themselves.
    """

    tensors: int
    bytes: int
    stored: tuple[str, ...]
    as_released: bool
    not_finite: tuple[str, ...]
    zero: tuple[str, ...]
    kernels: Range
    norms: Range
    sinks: Range


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Of outputs for the same random hidden states, in units of their root mean square.

    Attributes:
        worst: max |difference|.
        relative: ||difference|| / ||expected||.
        same_entries: of the entries selected for queries that see more, the share that both select; None where only one
            side says what it selects.
        complaints: what is wrong, nothing if they agree.
    """

    worst: float
    relative: float
    same_entries: float | None
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
        stored=tuple(sorted({source.weight.dtype for source in sources if source.row.is_kernel})),
        as_released=as_released,
        not_finite=tuple(name for name, array in arrays.items() if not np.isfinite(array).all()),
        zero=tuple(name for name, array in arrays.items() if name.endswith(("kernel", "scale")) and not array.any()),
        kernels=_range(_rms(array) for name, array in arrays.items() if name.endswith("kernel")),
        norms=_range(_rms(array) for name, array in arrays.items() if name.endswith("scale")),
        sinks=_range(arrays["sinks"]),
    )


def hidden_states(config: AttentionConfig, tokens: int, seed: int) -> np.ndarray:
    """Random numbers that bfloat16 holds, float32 [1, S, E]."""
    hidden = random_hidden(seed, 1, tokens, config.hidden_size)
    return np.asarray(jnp.asarray(hidden).astype(jnp.bfloat16).astype(jnp.float32))


def least_tokens(config: AttentionConfig) -> int:
    """How many hidden states it takes that a layer leaves its window and has entries, and a choice to make."""
    kinds = set(config.layer_types)
    needs = [config.sliding_window + 1]
    needs += [config.compress_ratio(kind) * 2 for kind in kinds if kind is not LayerType.SLIDING]
    return max(needs)


def with_short_choice(config: AttentionConfig, tokens: int) -> AttentionConfig:
    """The config with so few entries selected that there is a choice to make among those of `tokens`."""
    return dataclasses.replace(config, index_topk=min(config.index_topk, max(1, tokens // config.csa_ratio // 4)))


def by_reference(module: CompressedAttention) -> Outputs:
    """The outputs of foveal's independent reference for a float32 layer's parameters, always in float32."""
    compiled = jax.jit(lambda params, x: reference_attention(params, module.config, module.layer_type, x))

    def outputs(hidden: np.ndarray, dtype: str) -> Expected:
        del dtype
        # The reference does not say what it selects. That it is what the float32 layer does shows in the outputs.
        return Expected(np.asarray(compiled(get_params(module), hidden)), _choice(module, hidden)[0], independent=False)

    return outputs


def compare(module: CompressedAttention, expected: Outputs, hidden: np.ndarray, dtype: str) -> Comparison:
    """A layer against something that computes the same.

    A query whose indexer selects other entries is not compared. In float32 that may happen only where rounding decides
    which entry is the last one; in bfloat16 for a small share of the entries.
    """
    got = np.asarray(_forward(module, hidden), np.float32)
    want, their_choice, independent = expected(hidden, dtype)
    complaints, same, share = [], np.ones(got.shape[:2], bool), None
    if module.layer_type is LayerType.CSA and their_choice is not None:
        choices = _compare_choices(module, hidden, their_choice)
        same, complaints = choices.same, choices.complaints(dtype)
        share = choices.share if independent else None
    if not same.any():
        return Comparison(np.nan, np.nan, share, (*complaints, "no query whose indexer selects the same entries"))
    got, want = got[same], want[same]
    if not (np.isfinite(got).all() and np.isfinite(want).all()):
        return Comparison(np.nan, np.nan, share, (*complaints, "outputs are not finite"))
    unit = max(_rms(want), float(np.finfo(np.float32).tiny))
    try:
        assert_close(got / unit, want / unit, dtype)
    except AssertionError as error:
        complaints = [*complaints, str(error)]
    difference = np.abs(got - want) / unit
    return Comparison(float(difference.max()), _rms(difference), share, tuple(complaints))


class _Choices(NamedTuple):
    """Two indexers side by side: for which queries they select the same [1, S], what share, and how sure the first is.

    `share` and `undecided` are of queries that see more entries than are selected.
    """

    same: np.ndarray
    share: float
    undecided: float
    other: int

    def complaints(self, dtype: str) -> list[str]:
        found = []
        if dtype == "float32" and self.other:
            found.append(f"the indexer selects other entries for {self.other} queries, and not by rounding")
        if self.share < _LEAST_SHARE:
            found.append(
                f"the indexer selects the same entries in {self.share:.1%} of cases, {_LEAST_SHARE:.0%} expected"
            )
        if dtype == "float32" and self.undecided > _MOST_UNDECIDED:
            found.append(f"for {self.undecided:.1%} of the queries all that the indexer goes by is rounding")
        return found


def _compare_choices(module: CompressedAttention, hidden: np.ndarray, theirs: np.ndarray) -> _Choices:
    ours, lead = _choice(module, hidden)
    assert ours is not None
    config = module.config
    visibility = Visibility(Documents.unpacked(*hidden.shape[:2]), config.sliding_window, config.csa_ratio)
    choosing = np.asarray(visibility.entry_counts)[0] > config.index_topk
    pairs = [({*one[one >= 0]}, {*other[other >= 0]}) for one, other in zip(ours[0], theirs[0], strict=True)]
    same = np.array([[one == other for one, other in pairs]])
    common = [len(one & other) / len(one | other) for (one, other), chose in zip(pairs, choosing, strict=True) if chose]
    undecided = lead <= UNDECIDED
    return _Choices(
        same,
        float(np.mean(common)) if common else 1.0,
        float(undecided[0][choosing].mean()) if choosing.any() else 0.0,
        int((~same & ~undecided).sum()),
    )


@nnx.jit
def _forward(module: CompressedAttention, hidden: Any) -> Any:
    return module(hidden)


def _choice(module: CompressedAttention, hidden: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
    if module.layer_type is not LayerType.CSA:
        return None, np.full(hidden.shape[:2], np.inf)
    return selected_entries(module, hidden, Documents.unpacked(*hidden.shape[:2]))


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64)))) if values.size else 0.0


def _range(values: Any) -> Range:
    numbers = np.array(list(values), np.float64)
    return Range(float(numbers.min()), float(numbers.max()))  # NaN if one of them is
