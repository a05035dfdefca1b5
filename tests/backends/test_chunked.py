"""The chunked backend where its tiles matter: against the dense one, in programs of all kinds, and in its memory."""

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from foveal.backends.chunked import Chunked
from foveal.backends.chunked.plan import ChunkedPlan
from foveal.backends.operands import Operands
from foveal.geometry import Documents, Visibility
from foveal.ops import core_attention, explain
from foveal.testing.generators import random_segment_ids
from foveal.testing.numerics import assert_close, assert_gradients_close
from tests.support.core_attention import (
    NAMES,
    UNOPTIMIZED,
    assert_same,
    both_ways,
    operands,
    program_for_a_tpu,
    shapes,
)
from tests.support.programs import equations, largest_array

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


# -------------------------------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_cut_as_its_name_says(name):
    case = CASES[name]
    plan = plan_of(case, unpacked(case))
    assert plan.entries == case.entries
    assert plan.query_block == case.length if "shorter" in name else 2 * plan.query_block < case.length
    if "tile overlaps" in name or "whole tiles" in name:
        assert (case.length % plan.query_block != 0) == ("overlaps" in name)
    if name == "gathered in some tiles":
        seen = np.arange(plan.query_block, case.length + 1, plan.query_block) // case.ratio
        assert 0 < (seen > plan.stream_up_to).sum() < len(seen)
    slots = case.length // case.ratio if case.ratio else 0
    if case.entries == "few":
        assert slots == 96 or "shorter" in name, "not the most there can be"
    if case.entries == "stream":
        assert plan.entry_block < slots
        assert (slots % plan.entry_block == 0) == ("whole blocks" in name)


@pytest.mark.parametrize("name", CASES)
def test_packed_rows_match_dense(name):
    """One program for all documents and indices of a shape, and the right answer for each."""
    case = CASES[name]
    for seed in range(3):
        args, indices, cotangents = problem(case, seed)
        before = TRACES.count("chunked")
        assert_matches_dense(args, packed(case, seed), indices, cotangents)
        assert TRACES.count("chunked") == before or seed == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["streamed, selected", "gathered in some tiles"])
@settings(max_examples=15)
@given(seed=st.integers(0, 1 << 30), longest=st.sampled_from([5, 60, 300, 550]), padded=st.booleans())
def test_selected_entries_of_any_documents_match_dense(name, seed, longest, padded):
    """Whatever tiles see: a span of slots that is streamed or gathered, none, or that of several documents."""
    case = CASES[name]
    ids = random_segment_ids(seed, B, case.length, max_document=longest)
    ids[1, (case.length - seed % 200) if padded else case.length :] = 0
    args, indices, cotangents = problem(case, seed)
    assert_matches_dense(args, Visibility(from_segment_ids(ids), W, case.ratio), indices, cotangents)


def test_an_unpacked_window_alone_matches_dense():
    """With entries: below, in bfloat16 as constants of a program, and in float32 within `jax.shard_map`."""
    case = CASES["window alone, last tile overlaps"]
    args, indices, cotangents = problem(case, 2)
    assert_matches_dense(args, unpacked(case), indices, cotangents)


@one_of_each
def test_bfloat16_matches_dense(name):
    args, indices, cotangents = problem(CASES[name], 3, jnp.bfloat16)
    results, _ = assert_matches_dense(args, packed(CASES[name], 3), indices, cotangents)
    assert [a.dtype for a in results] == [jnp.bfloat16, jnp.float32]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "changes"),
    [
        ("few entries, selected", (37, 29), {}),
        ("streamed, selected", (37, 29), {}),
        ("streamed, selected", (1000, 1000), {}),
        ("gathered in some tiles", (1000, 1000), {}),
        # As on other platforms: a whole tile gathers at a time, and nothing is kept from being computed twice.
        ("gathered in some tiles", (None, None), {"gather_block": 64, "shield": False}),
    ],
)
def test_another_plan_changes_nothing(name, sizes, changes, monkeypatch):
    case, rule, plans = CASES[name], ChunkedPlan.for_operands, []
    args, indices, cotangents = problem(case, 4)
    expected = attend(args, packed(case, 4), indices, cotangents, "chunked")
    overrides = dict(zip(("query_block", "entry_block"), sizes, strict=True))
    usual, other = plan_of(case, packed(case, 4)), plan_of(case, packed(case, 4), **overrides)
    if changes:
        assert (usual.query_block, usual.gather_block, usual.shield) == (64, 1, True)
    else:
        assert other.query_block == min(sizes[0], case.length) != usual.query_block
        assert other.entry_block == min(sizes[1], case.length // case.ratio)

    def overridden(operands: Operands) -> ChunkedPlan:
        plans.append(dataclasses.replace(rule(operands, **overrides), **changes))
        return plans[-1]

    monkeypatch.setattr(ChunkedPlan, "for_operands", overridden)
    # Its own program: the module's has been compiled under the rule.
    run = jax.jit(lambda a, v, i, c: both_ways(a, v, i, c, "chunked"), compiler_options=UNOPTIMIZED)
    assert_same(run(args, packed(case, 4), indices, cotangents), expected)
    assert plans == [dataclasses.replace(other, **changes)] != [usual]


@pytest.mark.parametrize("name", ["streamed, selected", "gathered in some tiles"])
def test_an_entry_that_nobody_selects_may_be_as_large_as_it_likes(name):
    """Its product with the output's gradient overflows, and a weight of zero times infinity is not a number."""
    case = CASES[name]
    (q, kv, entries, sinks), indices, cotangents = problem(case, 5)
    large = np.array(entries)
    large[:, 20] = 3e38
    assert indices is not None
    others = np.where(indices == 20, -1, indices).astype(np.int32)
    cotangents = jax.tree.map(lambda c: 100 * c, cotangents)
    (_, expected), (_, got) = (
        attend((q, kv, values, sinks), packed(case, 5), others, cotangents, "chunked") for values in (entries, large)
    )
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(got))
    for operand in ("q", "kv"):
        np.testing.assert_allclose(got[operand], expected[operand], rtol=1e-5, atol=1e-5, err_msg=operand)


@one_of_each
def test_tiles_of_nothing_but_padding(name):
    """Whole tiles of queries that see nothing, before and after others that do: zeros, and no NaN in any gradient."""
    case = CASES[name]
    args, indices, cotangents = problem(case, 6)
    ids = np.zeros((B, case.length), np.int32)
    ids[0, 131:170], ids[0, 170:190], ids[1, 150:240] = 3, 5, 2
    visibility = Visibility(from_segment_ids(ids), W, case.ratio)
    size = plan_of(case, visibility).query_block
    assert not ids[:, : 2 * size].any()
    assert not ids[:, 4 * size :].any()
    assert 4 * size < case.length
    (out, lse), gradients = assert_matches_dense(args, visibility, indices, cotangents)
    np.testing.assert_array_equal(np.asarray(out)[ids == 0], 0.0)
    np.testing.assert_array_equal(np.asarray(lse)[ids == 0], -np.inf)
    for operand in ("q", "kv"):
        np.testing.assert_array_equal(np.asarray(gradients[operand])[ids == 0], 0.0, err_msg=operand)
    assert all(np.isfinite(g).all() and np.any(g) for g in jax.tree.leaves(gradients))


@one_of_each
def test_large_logits(name):
    """Logits of thousands, the largest in any block: weights overflow unless the peak follows from block to block."""
    case = CASES[name]
    (q, *keys_and_sinks), indices, cotangents = problem(case, 7)
    args = (q * np.float32(1e3), *keys_and_sinks)
    (out, lse), gradients = attend(args, packed(case, 7), indices, cotangents, "chunked")
    (want, want_lse), _ = attend_densely(args, packed(case, 7), indices, cotangents)
    peak = np.abs(np.asarray(lse)[np.isfinite(lse)]).max()
    assert peak > 1e3
    # A logit of thousands is known to 1e-3 in float32, and a softmax over such no better.
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-6 * peak)
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-2)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))


@one_of_each
def test_it_is_the_first_choice(name):
    """By name, and by the program: not the quadratic one's."""
    args, indices, cotangents = jax.tree.map(jnp.asarray, problem(CASES[name], 5))
    q, kv, entries, sinks = args
    visibility = packed(CASES[name], 5)
    verdict = explain(q, kv, entries, visibility=visibility, indices=indices, sinks=sinks)
    assert verdict.chosen == Chunked.name == "chunked"
    assert not Chunked.quadratic

    def program(way):
        """Its operations in order, with their shapes, but for the mark that the platform has chosen."""
        jaxpr = jax.make_jaxpr(functools.partial(both_ways, implementation=way))(args, visibility, indices, cotangents)
        operations = re.findall(r"\w+:(\w+\[[\d,]*\]) = (\w+)", str(jaxpr))
        return [operation for operation in operations if operation[1] != "foveal_planned"]

    assert program(None) == program("chunked") != program("dense")


# ------------------------------------------------------------------------------------------------------------ programs


@every_way
@pytest.mark.parametrize("constant", [("kv", "entries"), ("q",)], ids=["keys", "queries"])
def test_bfloat16_arrays_may_be_constants_of_a_program(name, constant):
    """As a function that closes over them makes them: the compiler then works out ahead of time what it can."""
    case = CASES[name]
    args, indices, cotangents = jax.tree.map(jnp.asarray, problem(case, 8, jnp.bfloat16))
    every: dict[str, Any] = dict(zip(NAMES, args, strict=True))
    call: dict[str, Any] = {"visibility": unpacked(case), "indices": indices, "return_lse": True}
    free = {name: array for name, array in every.items() if name not in constant}

    @functools.partial(jax.jit, compiler_options=UNOPTIMIZED)
    def run(free, cotangents):
        results, pull = jax.vjp(lambda free: core_attention(**every | free, **call, implementation="chunked"), free)
        return results, *pull(cotangents)

    (out, lse), gradients = run(free, cotangents)
    (want, want_lse), expected = attend_densely(args, unpacked(case), indices, cotangents)
    assert_close(out, want, jnp.bfloat16)
    assert_close(lse, want_lse, np.float32)
    assert_gradients_close(gradients, {name: expected[name] for name in free}, jnp.bfloat16)


@every_way
def test_within_shard_map(name):
    """Batch and heads apart: the gradient of the keys, which all heads share, is summed over the devices."""
    case = CASES[name]
    args, indices, cotangents = problem(case, 9)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    heads, rows = P("data", None, "tensor"), P("data")

    def locally(q, kv, entries, sinks, indices):
        visibility = Visibility(Documents.unpacked(*q.shape[:2]), W, case.ratio)
        return core_attention(
            q, kv, entries, visibility=visibility, indices=indices, sinks=sinks, return_lse=True,
            implementation="chunked",
        )  # fmt: skip

    specs: Any = heads, rows, rows, P("tensor"), P() if indices is None else rows
    apart: Any = jax.shard_map(locally, mesh=mesh, in_specs=specs, out_specs=(heads, heads))

    @functools.partial(jax.jit, compiler_options=UNOPTIMIZED)
    def run(args, cotangents):
        results, pull = jax.vjp(lambda *args: apart(*args, indices), *args)
        return results, dict(zip(NAMES, pull(cotangents), strict=True))

    assert_same(run(args, cotangents), attend_densely(args, unpacked(case), indices, cotangents))


def test_queries_have_one_layout_on_tpus():
    """XLA would keep them in two, one for each pass: at 65536 rows of Flash's layer 4 GiB more."""
    args, visibility, _, cotangents = shapes(256, 2, 4, window=W, with_documents=False)
    run, args = functools.partial(both_ways, implementation="chunked"), (args, visibility, None, cotangents)
    on_a_tpu, here = program_for_a_tpu(run, *args), jax.make_jaxpr(run)(*args)
    assert "layout_constraint" in {e.primitive.name for e in equations(on_a_tpu.jaxpr)}
    assert "layout_constraint" not in {e.primitive.name for e in equations(here.jaxpr)}


# -------------------------------------------------------------------------------------------------------------- memory


LAYERS = {"HCA": {"ratio": 16, "selected": None}, "CSA": {"ratio": 4, "selected": 64}}


@functools.cache
def compiled(layer: str, length: int, dtype: Any) -> tuple[int, str]:
    """Bytes that XLA allocates for forward and backward, and the program."""
    args, visibility, indices, (d_out, d_lse) = shapes(length, 4, **LAYERS[layer], window=W, with_documents=True)
    *arrays, d_out = (jax.ShapeDtypeStruct(a.shape, dtype) for a in (*args[:3], d_out))
    run = jax.jit(lambda a, v, i, c: both_ways(a, v, i, c, None))
    program = run.lower((*arrays, args[3]), visibility, indices, (d_out, d_lse)).compile()
    analysis, text = program.memory_analysis(), program.as_text()
    assert analysis is not None
    assert text is not None
    return analysis.temp_size_in_bytes, text


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_memory_grows_linearly(layer):
    """Exactly. Quadratic would be 16 times, and 268 MB of weights."""
    (short, _), (long, _) = (compiled(layer, length, jnp.float32) for length in (2048, 8192))
    assert 0 < short < long <= 4.2 * short


@pytest.mark.parametrize("layer", LAYERS)
def test_bfloat16_is_never_widened_as_a_whole(layer):
    """A compiler that has no bfloat16 slices makes a float32 array of all queries for each tile that it reads."""
    whole = "f32[1,2048,4,16]"
    assert whole in compiled(layer, 2048, jnp.float32)[1]
    assert whole not in compiled(layer, 2048, jnp.bfloat16)[1]


@pytest.mark.parametrize(("ratio", "selected", "with_documents"), [(4, 16, True), (16, None, True), (4, None, False)])
def test_no_array_has_queries_times_keys(ratio, selected, with_documents):
    """With S = 4096, S x C is 1 to 4 million elements, and the largest thing that is needed q's 131072."""
    length, heads = 4096, 2
    slots, own = length // ratio, length * heads * 16
    args = shapes(length, heads, ratio, window=W, selected=selected, with_documents=with_documents)
    assert own <= largest_array(functools.partial(both_ways, implementation=None), *args) < length * slots / 2
    forward = largest_array(lambda a, v, i, _: core_attention(*a[:3], visibility=v, indices=i, sinks=a[3]), *args)
    assert own <= forward < length * slots / 2
    assert largest_array(functools.partial(both_ways, implementation="dense"), *args) >= length * (length + slots)


@pytest.mark.parametrize(
    ("ratio", "selected", "columns"),
    [
        pytest.param(64, None, 2 * 64, id="logits of few entries"),
        pytest.param(4, None, 2 * 128, id="logits of the window"),
        pytest.param(4, 64, 2 * 64, id="logits of the selected entries, or the entries themselves"),
        pytest.param(4, 512, 1024, id="which entries are selected"),
    ],
)
def test_no_array_has_what_all_queries_look_at(ratio, selected, columns):
    """A tile's at a time, though all of it grows linearly with S too: it is what runs out of memory first.

    columns: of the smallest array that there must not be, with S = 4096 rows.
    """
    length, heads, dim = 4096, 2, 16
    args, visibility, indices, cotangents = shapes(
        length, heads, ratio, window=128, selected=selected, with_documents=True
    )
    needed = length * max(heads * dim, selected or 0)  # q, or the indices
    both = functools.partial(both_ways, implementation=None)
    assert needed <= largest_array(both, args, visibility, indices, cotangents) < 1.5 * needed < length * columns
