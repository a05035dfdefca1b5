"""The checks of `foveal verify` on one layer of a checkpoint."""

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

_LEAST_SHARE = 0.8  # of equal entries: with bfloat16 rounding above 0.95, by chance about a quarter


class Expected(NamedTuple):
    """The outputs that a layer is compared with.

    Attributes:
        output: float32 [1, S, E].
        choice: the entries that an indexer selects, [1, S, K], -1 for none; None without an indexer.
        independent: whether another implementation made the choice. Only then is an equal choice evidence.
    """

    output: np.ndarray
    choice: np.ndarray | None
    independent: bool


Outputs = Callable[[np.ndarray, str], Expected]
"""A function of hidden states [1, S, E] and a dtype's name that returns the expected outputs."""


class Range(NamedTuple):
    """The smallest and the largest of some numbers."""

    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of a layer's weights.

    Attributes:
        tensors: number of tensors in the files, scales included.
        bytes: size of these tensors.
        stored: dtypes of the kernels, as safetensors spells them.
        as_released: whether number, shapes and dtypes are those of a release, with scales in F8_E8M0 or F32.
        not_finite: names of parameters that hold NaN or infinities.
        zero: names of kernels and norm scales that are all zeros.
        kernels: range of the kernels' root mean squares.
        norms: range of the norm scales' root mean squares.
        sinks: range of the sinks.
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
    """Differences of outputs for the same random hidden states, in units of the expected root mean square.

    Attributes:
        worst: max |difference|.
        relative: ||difference|| / ||expected||.
        queries: number of queries compared.
        same_entries: share of the selected entries that both sides select, over queries that see more entries than are
            selected and where rounding does not decide; None if only one side reports its selection.
        complaints: what is wrong; empty if the outputs agree.
    """

    worst: float
    relative: float
    queries: int
    same_entries: float | None
    complaints: tuple[str, ...]


def statistics(found: AttentionCheckpoint, layer: int, module: CompressedAttention) -> Statistics:
    """Compute the statistics of a loaded layer's weights."""
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
    """Return random hidden states that bfloat16 represents exactly, float32 [1, S, E]."""
    hidden = random_hidden(seed, 1, tokens, config.hidden_size)
    return np.asarray(jnp.asarray(hidden).astype(jnp.bfloat16).astype(jnp.float32))


def least_tokens(config: AttentionConfig, layers: Iterable[int] | None) -> int:
    """Return the least number of tokens that exceeds the sliding window and gives these layers (or all) two entries."""
    kinds = {config.layer_type(layer) for layer in (range(config.num_layers) if layers is None else layers)}
    return max(config.sliding_window + 1, *(2 * config.compress_ratio(kind) for kind in kinds))


def entry_counts(config: AttentionConfig, tokens: int) -> np.ndarray:
    """Return the number of entries that each query of a CSA layer sees, int [1, S]."""
    documents = Documents.unpacked(1, tokens)
    return np.asarray(Visibility(documents, config.sliding_window, config.csa_ratio).entry_counts)


def with_short_choice(config: AttentionConfig, tokens: int) -> AttentionConfig:
    """Return the config with `index_topk` small enough that the indexer has a choice among the entries of `tokens`."""
    quarter = max(1, int(entry_counts(config, tokens).max()) // 4)
    return dataclasses.replace(config, index_topk=min(config.index_topk, quarter))


def by_reference(module: CompressedAttention) -> Outputs:
    """Return a function that runs foveal's independent reference with a float32 layer's parameters, in float32."""
    compiled = jax.jit(lambda params, x: reference_attention(params, module.config, module.layer_type, x))

    def outputs(hidden: np.ndarray, dtype: str) -> Expected:
        del dtype
        # The reference does not report its selection; equal outputs show that it is the float32 layer's.
        return Expected(np.asarray(compiled(get_params(module), hidden)), _choice(module, hidden)[0], independent=False)

    return outputs


def compare(module: CompressedAttention, expected: Outputs, hidden: np.ndarray, dtype: str) -> Comparison:
    """Compare a layer's outputs with the expected ones.

    A query for which the two indexers select different entries is not compared. In float32 they may differ only where
    rounding decides which entry comes last; in bfloat16, in a small share of the entries.
    """
    got = np.asarray(_forward(module, hidden), np.float32)
    want, their_choice, independent = expected(hidden, dtype)
    complaints, compared, share = [], np.ones(got.shape[:2], bool), None
    if module.spec.has_indexer and their_choice is not None:
        choices = _compare_choices(module, hidden, their_choice)
        complaints = choices.complaints(dtype)
        # A side that does not report its selection may select something else where rounding decides.
        compared = choices.same if independent else choices.same & choices.decided
        share = choices.share if independent else None
    count = int(compared.sum())
    if not count:
        complaints.append("the indexers select the same entries for no query")
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
    """The selections of two indexers compared, for every query [1, S].

    Attributes:
        same: whether they select the same entries.
        decided: whether more than rounding decides what the first one selects.
        choosing: whether there are more entries than are selected.
        share: share of the selected entries that both select, averaged over the queries that choose and are decided.
    """

    same: np.ndarray
    decided: np.ndarray
    choosing: np.ndarray
    share: float

    def complaints(self, dtype: str) -> list[str]:
        """Return what is wrong with the selections of a layer that computes in `dtype`."""
        found = []
        other = int((~self.same & self.decided).sum())
        if dtype == "float32" and other:
            found.append(f"the indexer selects other entries for {other} queries, and not because of rounding")
        if self.share < _LEAST_SHARE:
            found.append(f"selected entries: expected {_LEAST_SHARE:.0%} or more the same, got {self.share:.1%}")
        if self.choosing.any() and not (self.choosing & self.decided).any():
            found.append("only rounding decides what the indexer selects, for every query that has a choice")
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
