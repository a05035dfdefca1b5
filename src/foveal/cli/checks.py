"""The demo's checks: a layer on packed text against each document alone, the dense backend and the reference."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from foveal.cli.layer import Sample, make_layer
from foveal.config import AttentionConfig
from foveal.geometry import Documents, Visibility, pack_documents
from foveal.layers import LayerType
from foveal.nn import CompressedAttention
from foveal.testing.choices import UNDECIDED, selected_entries
from foveal.testing.numerics import assert_close, assert_gradients_close
from foveal.testing.parameters import get_params
from foveal.testing.reference import reference_attention
from foveal.typing import Array

STEPS_PER_LAYER = 4
REFERENCE_DOCUMENTS = 6
"""Maximum number of documents for the reference, which compiles each of them separately."""

_ALONE_TOKENS = 4096  # roughly the most per call: memory must not grow with the number of documents
# The reference runs once per layer: optimising it would take far longer than running it.
_COMPILE_FAST = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_disable_hlo_passes": "constant_folding",
}


class Result(NamedTuple):
    """Results of both passes: outputs and d loss / d hidden, both [B, S, E], and d loss / d parameters by name."""

    out: np.ndarray
    hidden: np.ndarray
    params: dict[str, np.ndarray]


class Agreement(NamedTuple):
    """The differences between two computations.

    Attributes:
        output: max |difference|.
        gradient: max |difference| / max |expected| of the worst tensor among the hidden states and the parameters.
        complaints: the failed assertions of `foveal.testing.numerics`; empty if the two agree.
    """

    output: float
    gradient: float
    complaints: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class LayerCheck:
    """The demo's report on one layer.

    Attributes:
        layer_type: its type.
        window_keys: average number of raw keys that a query sees.
        entries: average number of entries that a query sees; None if the layer has no entries.
        selected: average number of entries that the indexer selects; None if the layer has no indexer.
        undecided: number of queries not compared because rounding decides what the indexer selects for them.
        alone: packed documents against each document alone.
        dense: the chunked implementation, used everywhere else here, against the dense one, on packed documents.
        reference: packed documents against the reference.
        milliseconds: duration of a compiled forward and backward pass over the packed rows.
    """

    layer_type: LayerType
    window_keys: float
    entries: float | None
    selected: float | None
    undecided: int
    alone: Agreement
    dense: Agreement
    reference: Agreement
    milliseconds: float

    @property
    def complaints(self) -> tuple[str, ...]:
        """The complaints of all three comparisons; the layer passes if there are none."""
        return (*self.alone.complaints, *self.dense.complaints, *self.reference.complaints)


def check_layer(
    sample: Sample, config: AttentionConfig, layer_type: LayerType, seed: int, advance: Callable[[str], None]
) -> LayerCheck:
    """Compare one layer with all that it must agree with. Calls `advance` before each of `STEPS_PER_LAYER` steps."""
    advance("packed")
    layer = make_layer(config, layer_type, seed)
    x, documents = sample.packed.values, sample.packed.documents
    real = ~np.asarray(documents.is_padding)
    decided, selected = real, None
    if config.layer(layer_type).has_indexer:
        slots, lead = selected_entries(layer, x, documents)
        selected = float((slots >= 0).sum(-1)[real].mean())
        decided = real & (lead > UNDECIDED)
        sample = _weightless_where(~decided, sample)
    step = compile_step(layer, "chunked")
    cotangents = pack_documents(sample.cotangents, x.shape[1]).values
    packed = step(x, documents, cotangents)
    started = time.perf_counter()
    step(x, documents, cotangents)
    milliseconds = 1e3 * (time.perf_counter() - started)

    advance("each document alone")
    compared = decided | ~real  # padding must come out zero
    alone = _compare(_only(compared, packed), _only(compared, run_alone(step, sample)), "packed vs alone")
    advance("dense")
    expected = compile_step(layer, "dense")(x, documents, cotangents)
    dense = _compare(_only(compared, packed), _only(compared, expected), "chunked vs dense")
    advance("reference")
    ids = _reference_ids(sample.packed.segment_ids)
    few = (ids > 0) & decided
    weights = cotangents * few[:, :, None]
    expected, packed = run_reference(layer, x, ids, weights), step(x, documents, weights)
    reference = _compare(_only(few, packed), _only(few, expected), "packed vs reference")

    visibility = Visibility(documents, config.sliding_window, config.compress_ratio(layer_type))
    return LayerCheck(
        layer_type=layer_type,
        window_keys=float(np.asarray(visibility.window_counts)[real].mean()),
        entries=float(np.asarray(visibility.entry_counts)[real].mean()) if visibility.compress_ratio else None,
        selected=selected,
        undecided=int((real & ~decided).sum()),
        alone=alone,
        dense=dense,
        reference=reference,
        milliseconds=milliseconds,
    )


Step = Callable[[np.ndarray, Documents, np.ndarray], Result]
"""A function of hidden states, documents and cotangents that returns a `Result`."""


def compile_step(layer: CompressedAttention, implementation: str) -> Step:
    """Return a layer's forward and backward pass with one implementation, compiled once per shape."""
    graph, state = nnx.split(layer)

    def loss(state: Any, x: Array, documents: Documents, cotangents: Array) -> tuple[Array, Array]:
        out = nnx.merge(graph, state)(x, documents=documents, implementation=implementation)
        return jnp.vdot(out, cotangents), out

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))

    def step(x: np.ndarray, documents: Documents, cotangents: np.ndarray) -> Result:
        (of_state, of_x), out = jax.block_until_ready(compiled(state, jnp.asarray(x), documents, cotangents))
        return _result(out, of_x, get_params(nnx.merge(graph, of_state)))

    return step


def run_alone(step: Step, sample: Sample) -> Result:
    """Run each document at the start of its own row; the results are placed as in the packed rows."""
    out, hidden = np.zeros_like(sample.packed.values), np.zeros_like(sample.packed.values)
    params: dict[str, np.ndarray] = {}
    for members, rows, width in _batches([len(document) for document in sample.hidden]):
        x, cotangents = (
            _one_a_row([part[member] for member in members], rows, width) for part in (sample.hidden, sample.cotangents)
        )
        lengths = np.zeros(rows, np.int32)
        lengths[: len(members)] = [len(sample.hidden[member]) for member in members]
        result = step(x, Documents.from_lengths(lengths, width), cotangents)
        for own_row, member in enumerate(members):
            row, start, length = sample.packed.placements[member]
            out[row, start : start + length] = result.out[own_row, :length]
            hidden[row, start : start + length] = result.hidden[own_row, :length]
        params = {name: gradient + params.get(name, np.float32(0)) for name, gradient in result.params.items()}
    return Result(out, hidden, params)


def run_reference(layer: CompressedAttention, x: np.ndarray, segment_ids: np.ndarray, cotangents: np.ndarray) -> Result:
    """Run the same pass with the reference; batch rows without any id stay zero."""
    rows = np.flatnonzero(segment_ids.any(axis=1))

    def loss(params: Mapping[str, Array], x: Array) -> tuple[Array, Array]:
        out = reference_attention(params, layer.config, layer.layer_type, x, segment_ids[rows])
        return jnp.vdot(out, cotangents[rows]), out

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True), compiler_options=_COMPILE_FAST)
    (of_params, of_x), few_out = jax.block_until_ready(compiled(get_params(layer), jnp.asarray(x[rows])))
    out, hidden = np.zeros_like(x), np.zeros_like(x)
    out[rows], hidden[rows] = few_out, of_x
    return _result(out, hidden, of_params)


def _result(out: Array | np.ndarray, hidden: Array | np.ndarray, params: Mapping[str, Array]) -> Result:
    return Result(np.asarray(out), np.asarray(hidden), {name: np.asarray(value) for name, value in params.items()})


def _compare(actual: Result, expected: Result, what: str) -> Agreement:
    """Compare two results within the library's float32 tolerances."""
    got, want = ({"hidden": result.hidden, **result.params} for result in (actual, expected))
    checks = (
        lambda: assert_close(actual.out, expected.out, np.float32),
        lambda: assert_gradients_close(got, want, np.float32),
    )
    complaints = []
    for check in checks:
        try:
            check()
        except AssertionError as error:
            complaints.append(f"{what}: {error}")
    worst = max(_of_peak(got[name], want[name]) for name in want)
    return Agreement(float(np.abs(actual.out - expected.out).max()), worst, tuple(complaints))


def _of_peak(got: np.ndarray, want: np.ndarray) -> float:
    difference, peak = float(np.abs(got - want).max()), float(np.abs(want).max())
    return difference / peak if peak else np.inf if difference else 0.0


def _only(compared: np.ndarray, result: Result) -> Result:
    """Return the result with zeros for outputs that are not compared."""
    return result._replace(out=np.where(compared[:, :, None], result.out, np.float32(0)))


def _weightless_where(where: np.ndarray, sample: Sample) -> Sample:
    """Return the sample with zero cotangents where `where` [B, S] is True: those queries do not affect the loss."""
    cotangents = [
        np.where(where[row, start : start + length, None], np.float32(0), document)
        for document, (row, start, length) in zip(sample.cotangents, sample.packed.placements, strict=True)
    ]
    return sample._replace(cotangents=cotangents)


def _reference_ids(segment_ids: np.ndarray) -> np.ndarray:
    """Ids of the first few documents in the row with the fewest, and so the longest, documents; 0 elsewhere."""
    row = int(np.argmin(segment_ids.max(axis=1)))
    few = np.zeros_like(segment_ids)
    few[row] = np.where(segment_ids[row] <= REFERENCE_DOCUMENTS, segment_ids[row], 0)
    return few


def _batches(lengths: Sequence[int]) -> Iterator[tuple[list[int], int, int]]:
    """Yield documents to run together and their common shape: (members, rows, row length). One or two shapes in all.

    A second shape, for short documents, pays off only where many of them would be padded to the longest.
    """
    longest = max(lengths)
    short = max(1, longest // 8)
    widths = [longest] if len(lengths) * longest <= 4 * _ALONE_TOKENS else [short, longest]
    for low, width in zip([0, *widths], widths, strict=False):
        group = [i for i, length in enumerate(lengths) if low < length <= width]
        rows = min(len(group), max(1, _ALONE_TOKENS // width))
        for first in range(0, len(group), max(rows, 1)):
            yield group[first : first + rows], rows, width


def _one_a_row(documents: Sequence[np.ndarray], rows: int, width: int) -> np.ndarray:
    """Place each document at the start of a row: [rows, width, E], zero elsewhere."""
    values = np.zeros((rows, width, documents[0].shape[1]), documents[0].dtype)
    for row, document in enumerate(documents):
        values[row, : len(document)] = document
    return values
