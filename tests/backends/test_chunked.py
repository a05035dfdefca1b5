"""The chunked backend where its tiles matter: against the dense one, and in its memory."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foveal.backends.chunked import Chunked
from foveal.backends.chunked.plan import ChunkedPlan
from foveal.backends.operands import Operands
from foveal.geometry import Documents, Visibility
from foveal.ops import core_attention, explain
from foveal.testing.generators import random_segment_ids
from tests.support.core_attention import UNOPTIMIZED, assert_same, both_ways, operands, shapes
from tests.support.programs import largest_array

B, H, D, W = 2, 4, 8, 21


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape, and what it is there for."""

    length: int
    ratio: int
    selected: int | None
    entries: str  # how the plan scores them


CASES = {
    "window alone, last tile overlaps": Case(300, 0, None, "none"),
    "few entries, whole tiles": Case(384, 4, None, "few"),
    "few entries, last tile overlaps": Case(300, 4, None, "few"),
    "few entries, selected": Case(300, 4, 5, "few"),
    "few entries, selected, shorter than a tile": Case(50, 3, 4, "few"),
    "streamed, last block overlaps": Case(550, 3, None, "stream"),
    "streamed, whole blocks": Case(512, 2, None, "stream"),
    "streamed, selected": Case(550, 3, 130, "stream"),
    "gathered": Case(550, 3, 7, "gather"),
    "gathered in some tiles": Case(550, 3, 60, "gather"),
}
ONE_OF_EACH = [
    "window alone, last tile overlaps",
    "few entries, selected",
    "streamed, last block overlaps",
    "streamed, selected",
    "gathered",
    "gathered in some tiles",
]


def problem(case: Case, seed: int, dtype: Any = np.float32):
    """Arguments, indices and cotangents of norm 1 for output and log-sum-exp."""
    rng = np.random.default_rng([seed, case.length, case.ratio])
    slots = case.length // case.ratio if case.ratio else 0
    args, cotangents = operands(rng, B, case.length, H, D, slots, dtype)
    indices = None
    if case.selected is not None:  # in any order, with duplicates, with none, out of range and not visible
        indices = rng.integers(-2, slots + 2, (B, case.length, case.selected)).astype(np.int32)
    return args, indices, cotangents


def packed(case: Case, seed: int) -> Visibility:
    """Documents at unaligned starts, padding among them; one is longer than a tile where the row is."""
    ids = random_segment_ids(seed, B, case.length, max_document=90)
    ids[1, case.length // 5 : case.length * 4 // 5] = 1 << 20
    return Visibility(Documents.from_segment_ids(ids), W, case.ratio)


def unpacked(case: Case) -> Visibility:
    return Visibility(Documents.unpacked(B, case.length), W, case.ratio)


TRACES: list[str] = []


def counted(args, visibility, indices, cotangents, implementation):
    TRACES.append(implementation)
    return both_ways(args, visibility, indices, cotangents, implementation)


attend = jax.jit(counted, static_argnums=4, compiler_options=UNOPTIMIZED)


def attend_densely(args, visibility, indices, cotangents):
    """In float32, and whatever is known about the documents by the same program."""
    args, cotangents = jax.tree.map(lambda a: np.asarray(a, np.float32), (args, cotangents))
    ids = np.where(visibility.documents.is_padding, 0, 1 + np.asarray(visibility.documents.document_start))
    documents = Documents.from_segment_ids(ids.astype(np.int32))
    return attend(args, Visibility(documents, W, visibility.compress_ratio), indices, cotangents, "dense")


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
        seen = np.asarray(unpacked(case).entry_counts)[0, plan.query_block - 1 :: plan.query_block]
        assert 0 < (seen > plan.stream_up_to).sum() < len(seen)
    if case.entries == "stream":
        slots = case.length // case.ratio
        assert plan.entry_block < slots
        assert (slots % plan.entry_block == 0) == ("whole blocks" in name)


@pytest.mark.parametrize("name", CASES)
def test_packed_rows_match_dense(name):
    """One program for all documents and indices of a shape, and the right answer for each."""
    case = CASES[name]
    for seed in range(3):
        args, indices, cotangents = problem(case, seed)
        before = len(TRACES)
        got = attend(args, packed(case, seed), indices, cotangents, "chunked")
        assert len(TRACES) == before or seed == 0
        assert_same(got, attend_densely(args, packed(case, seed), indices, cotangents))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["streamed, selected", "gathered in some tiles"])
@settings(max_examples=15)
@given(seed=st.integers(0, 1 << 30), longest=st.sampled_from([5, 60, 300, 550]), padded=st.booleans())
def test_selected_entries_of_any_documents_match_dense(name, seed, longest, padded):
    """Whatever tiles see: a span of slots that is streamed or gathered, none, or that of several documents."""
    case = CASES[name]
    ids = random_segment_ids(seed, B, case.length, max_document=longest)
    ids[1, (case.length - seed % 200) if padded else case.length :] = 0
    visibility = Visibility(Documents.from_segment_ids(ids), W, case.ratio)
    args, indices, cotangents = problem(case, seed)
    got = attend(args, visibility, indices, cotangents, "chunked")
    assert_same(got, attend_densely(args, visibility, indices, cotangents))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_unpacked_rows_match_dense(name):
    case = CASES[name]
    args, indices, cotangents = problem(case, 2)
    got = attend(args, unpacked(case), indices, cotangents, "chunked")
    assert_same(got, attend_densely(args, unpacked(case), indices, cotangents))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_bfloat16_matches_dense(name):
    case = CASES[name]
    args, indices, cotangents = problem(case, 3, jnp.bfloat16)
    got = attend(args, packed(case, 3), indices, cotangents, "chunked")
    assert [a.dtype for a in got[0]] == [jnp.bfloat16, jnp.float32]
    assert_same(got, attend_densely(args, packed(case, 3), indices, cotangents), jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("few entries, selected", (37, 29)),
        ("streamed, selected", (37, 29)),
        ("streamed, selected", (1000, 1000)),
        ("gathered", (1000, 1000)),
    ],
)
def test_sizes_of_tiles_and_blocks_change_nothing(name, sizes, monkeypatch):
    case = CASES[name]
    args, indices, cotangents = problem(case, 4)
    expected = attend(args, packed(case, 4), indices, cotangents, "chunked")
    overrides = dict(zip(("query_block", "entry_block"), sizes, strict=True))
    usual, changed = plan_of(case, packed(case, 4)), plan_of(case, packed(case, 4), **overrides)
    assert changed.query_block == min(sizes[0], case.length) != usual.query_block
    assert changed.entry_block == min(sizes[1], case.length // case.ratio)

    rule, plans = ChunkedPlan.for_operands, []

    def overridden(operands: Operands) -> ChunkedPlan:
        plans.append(rule(operands, **overrides))
        return plans[-1]

    monkeypatch.setattr(ChunkedPlan, "for_operands", overridden)
    # Its own program: the module's has been compiled under the rule.
    run = jax.jit(lambda a, v, i, c: both_ways(a, v, i, c, "chunked"), compiler_options=UNOPTIMIZED)
    assert_same(run(args, packed(case, 4), indices, cotangents), expected)
    assert plans == [changed]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gathered", "gathered in some tiles"])
def test_as_other_platforms_gather(name, monkeypatch):
    """A whole tile at a time, and nothing kept from being computed twice: what a CPU does not do by itself."""
    case, rule = CASES[name], ChunkedPlan.for_operands
    args, indices, cotangents = problem(case, 4)
    expected = attend(args, packed(case, 4), indices, cotangents, "chunked")
    usual = plan_of(case, packed(case, 4))
    assert (usual.gather_block, usual.shield) == (1, True)
    elsewhere = dataclasses.replace(usual, gather_block=usual.query_block, shield=False)
    monkeypatch.setattr(
        ChunkedPlan, "for_operands", lambda request: dataclasses.replace(elsewhere, scale=rule(request).scale)
    )
    run = jax.jit(lambda a, v, i, c: both_ways(a, v, i, c, "chunked"), compiler_options=UNOPTIMIZED)
    assert_same(run(args, packed(case, 4), indices, cotangents), expected)


@pytest.mark.parametrize("name", ["streamed, selected", "gathered in some tiles"])
def test_an_entry_that_nobody_selects_may_be_as_large_as_it_likes(name):
    """Its product with the output's gradient overflows, and a weight of zero times infinity is not a number."""
    case = CASES[name]
    args, indices, cotangents = problem(case, 5)
    q, kv, entries, sinks = args
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


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_tiles_of_nothing_but_padding(name):
    """Whole tiles of queries that see nothing, before and after others that do: zeros, and no NaN in any gradient."""
    case = CASES[name]
    args, indices, cotangents = problem(case, 6)
    ids = np.zeros((B, case.length), np.int32)
    ids[0, 131:170], ids[0, 170:190], ids[1, 150:240] = 3, 5, 2
    visibility = Visibility(Documents.from_segment_ids(ids), W, case.ratio)
    size = plan_of(case, visibility).query_block
    assert not ids[:, : 2 * size].any()
    assert not ids[:, 4 * size :].any()
    assert 4 * size < case.length
    (out, lse), gradients = got = attend(args, visibility, indices, cotangents, "chunked")
    np.testing.assert_array_equal(np.asarray(out)[ids == 0], 0.0)
    np.testing.assert_array_equal(np.asarray(lse)[ids == 0], -np.inf)
    for operand in ("q", "kv"):
        np.testing.assert_array_equal(np.asarray(gradients[operand])[ids == 0], 0.0, err_msg=operand)
    assert all(np.isfinite(g).all() and np.any(g) for g in jax.tree.leaves(gradients))
    assert_same(got, attend_densely(args, visibility, indices, cotangents))


@pytest.mark.parametrize("name", ONE_OF_EACH)
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


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_it_is_the_first_choice(name):
    """By name, and by the program: not the quadratic one's."""
    case = CASES[name]
    args, indices, cotangents = jax.tree.map(jnp.asarray, problem(case, 5))
    q, kv, entries, sinks = args
    visibility = packed(case, 5)
    verdict = explain(q, kv, entries, visibility=visibility, indices=indices, sinks=sinks)
    assert verdict.chosen == Chunked.name == "chunked"
    assert not Chunked.quadratic

    def program(way):
        """Its operations in order, with their shapes, but for the mark that the platform has chosen."""
        jaxpr = jax.make_jaxpr(functools.partial(both_ways, implementation=way))(args, visibility, indices, cotangents)
        operations = re.findall(r"\w+:(\w+\[[\d,]*\]) = (\w+)", str(jaxpr))
        return [operation for operation in operations if operation[1] != "foveal_planned"]

    assert program(None) == program("chunked") != program("dense")


# -------------------------------------------------------------------------------------------------------------- memory


LAYERS = {"HCA": {"ratio": 16, "selected": None}, "CSA": {"ratio": 4, "selected": 64}}


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_memory_grows_linearly(layer):
    """What XLA allocates for forward and backward, exactly. Quadratic would be 16 times, and 268 MB of weights."""

    def temporaries(length: int) -> int:
        args = shapes(length, 4, **LAYERS[layer], window=W, with_documents=True)
        analysis = jax.jit(lambda a, v, i, c: both_ways(a, v, i, c, None)).lower(*args).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    short, long = temporaries(2048), temporaries(8192)
    assert 0 < short < long <= 4.2 * short


@pytest.mark.parametrize("layer", LAYERS)
def test_bfloat16_is_never_widened_as_a_whole(layer):
    """A compiler that has no bfloat16 slices makes a float32 array of all queries for each tile that it reads."""
    length, heads = 2048, 4
    args, visibility, indices, (d_out, d_lse) = shapes(length, heads, **LAYERS[layer], window=W, with_documents=True)
    narrow = [jax.ShapeDtypeStruct(a.shape, jnp.bfloat16) for a in (*args[:3], d_out)]

    def program(operands) -> str:
        compiled = jax.jit(lambda a, v, i, c: both_ways(a, v, i, c, None)).lower(*operands).compile()
        text = compiled.as_text()
        assert text is not None
        return text

    whole = f"f32[1,{length},{heads},{d_out.shape[3]}]"
    assert whole in program((args, visibility, indices, (d_out, d_lse)))
    assert whole not in program(((*narrow[:3], args[3]), visibility, indices, (narrow[3], d_lse)))


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
