"""Cases of the chunked backend, each cut into tiles in another way."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from foveal.backends.chunked.plan import ChunkedPlan
from foveal.backends.operands import Operands
from foveal.geometry import Documents, Visibility
from foveal.testing.generators import random_segment_ids
from tests.support.core_attention import UNOPTIMIZED, assert_same, both_ways, operands

B, H, D, W = 2, 2, 8, 21


class Case(NamedTuple):
    """A shape, and what it is there for."""

    length: int
    ratio: int
    selected: int | None
    entries: str  # how the plan scores them


CASES = {
    "window alone, last tile overlaps": Case(300, 0, None, "none"),
    "few entries, last tile overlaps": Case(290, 3, None, "few"),
    "few entries, selected": Case(290, 3, 5, "few"),
    "few entries, selected, shorter than a tile": Case(50, 3, 4, "few"),
    "streamed, last block overlaps": Case(550, 3, None, "stream"),
    "streamed, whole blocks, whole tiles": Case(512, 2, None, "stream"),
    "streamed, selected": Case(550, 3, 130, "stream"),
    "gathered in some tiles": Case(550, 3, 15, "gather"),
}
WITH_ENTRIES = [
    "few entries, selected", "streamed, last block overlaps", "streamed, selected", "gathered in some tiles"
]  # fmt: skip
every_way = pytest.mark.parametrize("name", WITH_ENTRIES)
one_of_each = pytest.mark.parametrize("name", ["window alone, last tile overlaps", *WITH_ENTRIES])


def problem(case: Case, seed: int, dtype: Any = np.float32):
    """Arguments, indices and cotangents of norm 1 for output and log-sum-exp."""
    rng = np.random.default_rng([seed, case.length, case.ratio])
    slots = case.length // case.ratio if case.ratio else 0
    args, cotangents = operands(rng, B, case.length, H, D, slots, dtype)
    indices = None
    if case.selected is not None:  # in any order, with duplicates, with none, out of range and not visible
        indices = rng.integers(-2, slots + 2, (B, case.length, case.selected)).astype(np.int32)
    return args, indices, cotangents


from_segment_ids = jax.jit(Documents.from_segment_ids)


def packed(case: Case, seed: int) -> Visibility:
    """Documents at unaligned starts, padding among them; one is longer than a tile where the row is."""
    ids = random_segment_ids(seed, B, case.length, max_document=90)
    ids[1, case.length // 5 : case.length * 4 // 5] = 1 << 20
    return Visibility(from_segment_ids(ids), W, case.ratio)


def unpacked(case: Case) -> Visibility:
    return Visibility(Documents.unpacked(B, case.length), W, case.ratio)


TRACES: list[str] = []


def counted(args, visibility, indices, cotangents, implementation):
    TRACES.append(implementation)
    return both_ways(args, visibility, indices, cotangents, implementation)


attend = jax.jit(counted, static_argnums=4, compiler_options=UNOPTIMIZED)


def attend_densely(args, visibility, indices, cotangents):
    """In float32, and by one program, whatever is known about the documents and however many entries are selected."""
    args, cotangents = jax.tree.map(lambda a: np.asarray(a, np.float32), (args, cotangents))
    if indices is not None:
        indices = np.pad(indices, ((0, 0), (0, 0), (0, 130 - indices.shape[2])), constant_values=-1)
    documents = Documents(document_start=visibility.documents.document_start)
    return attend(args, Visibility(documents, W, visibility.compress_ratio), indices, cotangents, "dense")


def assert_matches_dense(args, visibility, indices, cotangents):
    """Returns the results."""
    got = attend(args, visibility, indices, cotangents, "chunked")
    assert_same(got, attend_densely(args, visibility, indices, cotangents), args[0].dtype)
    return got


def plan_of(case: Case, visibility: Visibility, **overrides: int) -> ChunkedPlan:
    (q, kv, entries, sinks), indices, _ = problem(case, 0)
    entries = kv[:, :0] if entries is None else entries
    arrays: dict[str, Any] = {"q": q, "kv": kv, "entries": entries, "sinks": sinks, "indices": indices}
    arrays = {name: None if array is None else jnp.asarray(array) for name, array in arrays.items()}
    operands = Operands(**arrays, visibility=visibility, tainted=None, scale=D**-0.5, precision=None)
    return ChunkedPlan.for_operands(operands, **overrides)
