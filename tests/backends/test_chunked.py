"""The chunked backend against the dense one, where its tiles matter."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foveal.backends.chunked import Chunked
from foveal.backends.chunked.plan import ChunkedPlan
from foveal.backends.operands import Operands
from foveal.geometry import Visibility
from foveal.ops import explain
from foveal.testing.generators import random_segment_ids
from tests.backends.chunked_problem import (
    CASES,
    TRACES,
    B,
    W,
    assert_matches_dense,
    attend,
    attend_densely,
    from_segment_ids,
    one_of_each,
    packed,
    plan_of,
    problem,
    unpacked,
)
from tests.support.core_attention import (
    UNOPTIMIZED,
    assert_same,
    both_ways,
)


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


@one_of_each
def test_unpacked_rows_match_dense(name):
    case = CASES[name]
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
