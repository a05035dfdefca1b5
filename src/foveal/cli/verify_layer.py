"""What `foveal verify` looks at in one layer of a checkpoint."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from foveal.checkpoint.find import AttentionCheckpoint
from foveal.checkpoint.release import attention_tensors
from foveal.config import AttentionConfig
from foveal.geometry import Documents, Visibility
from foveal.nn import CompressedAttention
from foveal.testing.choices import UNDECIDED, selected_entries
from foveal.testing.generators import random_hidden
from foveal.testing.numerics import assert_close
from foveal.testing.parameters import get_params
from foveal.testing.reference import reference_attention

DTYPES = ("float32", "bfloat16")

_LEAST_SHARE = 0.8  # of entries: rounding to bfloat16 leaves more than 0.95, chance about a quarter


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
        queries: how many were compared.
        same_entries: of the entries selected for queries that see more, and not by rounding, the share that both
            select; None where only one side says what it selects.
        complaints: what is wrong, nothing if they agree.
    """

    worst: float
    relative: float
    queries: int
    same_entries: float | None
    complaints: tuple[str, ...]


def statistics(found: AttentionCheckpoint, layer: int, module: CompressedAttention) -> Statistics:
    """Of one layer, loaded."""
    sources = found.layers[layer]
    held = [tensor for source in sources for tensor in source.tensors]
    scales = {source.scale.dtype for source in sources if source.scale}
    expected = attention_tensors(found.config, layer, found.dialect, min(scales, default="F8_E8M0"))
    as_released = sorted((tensor.dtype, tensor.shape) for tensor in held) == sorted(expected.values())
    arrays = {name: np.asarray(value, np.float32) for name, value in get_params(module).items()}
    return Statistics(
        tensors=len(held),
        bytes=sum(tensor.size for tensor in held),
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


def least_tokens(config: AttentionConfig, layers: Iterable[int] | None) -> int:
    """How many hidden states it takes that these layers (or all) leave their window and have entries to choose from."""
    kinds = {config.layer_type(layer) for layer in (range(config.num_layers) if layers is None else layers)}
    return max(config.sliding_window + 1, *(2 * config.compress_ratio(kind) for kind in kinds))


def entry_counts(config: AttentionConfig, tokens: int) -> np.ndarray:
    """How many entries each query of a CSA layer sees, int [1, S]."""
    documents = Documents.unpacked(1, tokens)
    return np.asarray(Visibility(documents, config.sliding_window, config.csa_ratio).entry_counts)


def with_short_choice(config: AttentionConfig, tokens: int) -> AttentionConfig:
    """The config with so few entries selected that there is a choice to make among those of `tokens`."""
    quarter = max(1, int(entry_counts(config, tokens).max()) // 4)
    return dataclasses.replace(config, index_topk=min(config.index_topk, quarter))


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
    complaints, compared, share = [], np.ones(got.shape[:2], bool), None
    if module.spec.has_indexer and their_choice is not None:
        choices = _compare_choices(module, hidden, their_choice)
        complaints = choices.complaints(dtype)
        # Who does not say what it selects may select something else where rounding decides.
        compared = choices.same if independent else choices.same & choices.decided
        share = choices.share if independent else None
    count = int(compared.sum())
    if not count:
        complaints.append("no query whose indexer selects the same entries")
        return Comparison(np.nan, np.nan, 0, share, tuple(complaints))
    got, want = got[compared], want[compared]
    if not (np.isfinite(got).all() and np.isfinite(want).all()):
        return Comparison(np.nan, np.nan, count, share, (*complaints, "outputs are not finite"))
    unit = max(_rms(want), float(np.finfo(np.float32).tiny))
    try:
        assert_close(got / unit, want / unit, dtype)
    except AssertionError as error:
        complaints.append(str(error))
    difference = np.abs(got - want) / unit
    return Comparison(float(difference.max()), _rms(difference), count, share, tuple(complaints))


class _Choices(NamedTuple):
    """Two indexers side by side, for every query [1, S].

    Attributes:
        same: whether they select the same entries.
        decided: whether more than rounding decides what the first one selects.
        choosing: whether there are more entries than are selected.
        share: of the entries that one selects where it decides and has a choice, those that the other selects too.
    """

    same: np.ndarray
    decided: np.ndarray
    choosing: np.ndarray
    share: float

    def complaints(self, dtype: str) -> list[str]:
        found = []
        other = int((~self.same & self.decided).sum())
        if dtype == "float32" and other:
            found.append(f"the indexer selects other entries for {other} queries, and not by rounding")
        if self.share < _LEAST_SHARE:
            found.append(f"of the selected entries {self.share:.1%} are the same, expected {_LEAST_SHARE:.0%} or more")
        if self.choosing.any() and not (self.choosing & self.decided).any():
            found.append("for no query anything but rounding decides what the indexer selects")
        return found


def _compare_choices(module: CompressedAttention, hidden: np.ndarray, theirs: np.ndarray) -> _Choices:
    ours, lead = _choice(module, hidden)
    assert ours is not None
    choosing = entry_counts(module.config, hidden.shape[1]) > module.config.index_topk
    pairs = [({*one[one >= 0]}, {*other[other >= 0]}) for one, other in zip(ours[0], theirs[0], strict=True)]
    decided = lead > UNDECIDED
    counted = (choosing & decided)[0]
    shares = [len(one & other) / max(len(one), len(other)) for one, other in itertools.compress(pairs, counted)]
    same = np.array([[one == other for one, other in pairs]])
    return _Choices(same, decided, choosing, float(np.mean(shares)) if shares else 1.0)


@nnx.jit
def _forward(module: CompressedAttention, hidden: Any) -> Any:
    return module(hidden)


def _choice(module: CompressedAttention, hidden: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
    if not module.spec.has_indexer:
        return None, np.full(hidden.shape[:2], np.inf)
    return selected_entries(module, hidden, Documents.unpacked(*hidden.shape[:2]))


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64)))) if values.size else 0.0


def _range(values: Any) -> Range:
    numbers = np.array(list(values), np.float64)
    return Range(float(numbers.min()), float(numbers.max()))  # NaN if one of them is
