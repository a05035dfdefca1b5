"""The indexer's loss against a dense computation in float64: its value, its gradients, and what has none."""

import dataclasses
import functools
import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foveal.geometry import Documents, Visibility
from foveal.ops import IndexerLoss, core_attention, indexer_loss, select_entries
from foveal.testing.generators import random_segment_ids
from foveal.testing.numerics import assert_close, assert_gradients_close
from foveal.testing.reference import reference_visibility
from tests.support.documents import documents_in
from tests.support.programs import array_sizes

loss_module = importlib.import_module("foveal.ops.indexer_loss")  # the package has its function by that name

B, S, H, D, I, J, M, W = 2, 150, 3, 8, 4, 6, 4, 16  # noqa: E741
C = S // M
STUDENT = ("index_q", "index_weights", "index_keys")
TEACHER = ("q", "kv", "entries", "sinks")
PACKED = random_segment_ids(3, B, S, max_document=60)
FULL = np.ones((B, S), np.int32)


def problem(seed: int, length: int = S) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    slots = length // M
    shapes = {
        "index_q": (B, length, I, J), "index_weights": (B, length, I), "index_keys": (B, slots, J),
        "q": (B, length, H, D), "kv": (B, length, D), "entries": (B, slots, D), "sinks": (H,),
    }  # fmt: skip
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["q"] *= 2.0
    return arrays


def loss_of(arrays, segment_ids, top_k: int | None = None, denominator: Any = "all") -> tuple:
    """As a layer has it: attention and loss over what the indexer selects, or over all that is seen."""
    visibility = Visibility(Documents.from_segment_ids(segment_ids), W, M)
    arrays = jax.tree.map(jnp.asarray, arrays)
    student = [arrays[name] for name in STUDENT]
    indices = None if top_k is None else select_entries(*student, visibility=visibility, top_k=top_k)
    q, kv, entries, sinks = (arrays.get(name) for name in TEACHER)
    _, lse = core_attention(
        q, kv, entries, visibility=visibility, indices=indices, sinks=sinks, return_lse=True, implementation="dense"
    )
    found = indexer_loss(
        *student, q=q, entries=entries, lse=lse, sinks=sinks, visibility=visibility, indices=indices,
        denominator=denominator,
    )  # fmt: skip
    return found.total, (found.count, indices)


compiled = jax.jit(jax.value_and_grad(loss_of, has_aux=True), static_argnums=(2, 3))


def both_ways(*args):
    """Value and gradients, done: the arrays may share their memory with NumPy's, which tests change afterwards."""
    return jax.block_until_ready(compiled(*args))


def by_hand(arrays, visible_window, able, denominator: str) -> tuple[float, int, dict[str, np.ndarray]]:
    """Value, count and gradients of the student: softmaxes of whole rows, in float64, query by query."""
    a = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
    total, count = 0.0, 0
    gradients = {name: np.zeros_like(a[name]) for name in STUDENT}
    for b, t in np.ndindex(able.shape[:2]):
        chosen = np.flatnonzero(able[b, t])
        if not len(chosen):
            continue
        count += 1
        logits = a["q"][b, t] @ a["entries"][b, chosen].T / math.sqrt(D)
        keys = logits
        if denominator == "all":
            window = a["q"][b, t] @ a["kv"][b, visible_window[b, t]].T / math.sqrt(D)
            keys = np.concatenate([logits, window, *([a["sinks"][:, None]] if "sinks" in a else [])], axis=1)
        weights = np.exp(logits - keys.max(axis=1, keepdims=True))
        weights /= np.exp(keys - keys.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True)
        teacher = weights.sum(axis=0) / weights.sum()
        dots = a["index_q"][b, t] @ a["index_keys"][b, chosen].T
        scores = a["index_weights"][b, t] @ np.maximum(dots, 0)
        student = np.exp(scores - scores.max())
        student /= student.sum()
        total += (teacher * np.log(teacher / student)).sum()
        d_dots = a["index_weights"][b, t][:, None] * (dots > 0) * (student - teacher)
        gradients["index_q"][b, t] = d_dots @ a["index_keys"][b, chosen]
        gradients["index_weights"][b, t] = np.maximum(dots, 0) @ (student - teacher)
        gradients["index_keys"][b, chosen] += d_dots.T @ a["index_q"][b, t]
    return total, count, gradients


def able_entries(segment_ids, indices) -> np.ndarray:
    """bool [B, S, C]: what the loss is over."""
    if indices is None:
        return reference_visibility(segment_ids, W, M)[1]
    able = np.zeros((B, S, C + 1), bool)
    np.put_along_axis(able, np.where(np.asarray(indices) < 0, C, indices), True, axis=2)
    return able[:, :, :C]


def assert_as_by_hand(found, arrays, segment_ids, denominator: str = "all", dtype: Any = np.float32, atol=0.0) -> int:
    """Hold value, count and gradients that `both_ways` gave against float64; the number of queries that count."""
    (total, (count, indices)), gradients = found
    window = reference_visibility(segment_ids, W, M)[0]
    expected = by_hand(arrays, window, able_entries(segment_ids, indices), denominator)
    assert total.dtype == jnp.float32
    if dtype == jnp.bfloat16:
        assert_close(np.array([total]), np.array(expected[:1]), dtype)
    else:
        np.testing.assert_allclose(total, expected[0], rtol=1e-5, atol=atol)
    assert count == expected[1]
    assert {gradients[name].dtype for name in STUDENT} == {np.dtype(dtype)}
    assert_gradients_close({name: gradients[name] for name in STUDENT}, expected[2], dtype)
    for name in TEACHER:
        np.testing.assert_array_equal(gradients[name], 0.0, err_msg=name)
    return expected[1]


@pytest.mark.parametrize("denominator", ["all", "entries"])
@pytest.mark.parametrize("top_k", [None, 5, 100])
@pytest.mark.parametrize("segment_ids", [FULL, PACKED], ids=["unpacked", "packed"])
def test_value_and_gradients_match_float64(segment_ids, top_k, denominator):
    arrays = problem(1)
    found = both_ways(arrays, segment_ids, top_k, denominator)
    assert assert_as_by_hand(found, arrays, segment_ids, denominator) > B * S / 2


@pytest.mark.parametrize("top_k", [None, 5])
@settings(max_examples=15)
@given(seed=st.integers(0, 1 << 30), longest=st.sampled_from([3, 9, 40, 150]))
def test_packed_rows_of_any_documents_match_float64(top_k, seed, longest):
    segment_ids, arrays = random_segment_ids(seed, B, S, max_document=longest), problem(seed)
    assert_as_by_hand(both_ways(arrays, segment_ids, top_k, "all"), arrays, segment_ids, atol=1e-6)


@pytest.mark.parametrize("denominator", ["all", "entries"])
@pytest.mark.parametrize("top_k", [None, 5])
def test_blocks_change_nothing(top_k, denominator, monkeypatch):
    """Of 7 queries and 5 entries, the last of which begin within those before."""
    arrays, plan_of = problem(2), loss_module.LossPlan.for_shapes
    (want, (want_count, _)), expected = both_ways(arrays, PACKED, top_k, denominator)

    def small(*args):
        return dataclasses.replace(plan_of(*args), queries=7, entries=5)

    monkeypatch.setattr(loss_module.LossPlan, "for_shapes", small)
    run = functools.partial(loss_of, segment_ids=PACKED, top_k=top_k, denominator=denominator)
    (total, (count, _)), gradients = jax.jit(jax.value_and_grad(run, has_aux=True))(arrays)
    np.testing.assert_allclose(total, want, rtol=1e-5)
    assert count == want_count
    assert_gradients_close(gradients, expected, np.float32)


def test_sinks_of_any_size():
    """+inf leaves a head nothing to teach, and all of them no query; -inf and none are the same."""
    arrays = problem(3)
    (none, _), _ = both_ways({k: v for k, v in arrays.items() if k != "sinks"}, FULL, None, "all")
    (no_sink, _), _ = both_ways(arrays | {"sinks": np.full(H, -np.inf, np.float32)}, FULL, None, "all")
    np.testing.assert_allclose(none, no_sink, rtol=1e-6)
    one_off = arrays | {"sinks": np.array([0.5, np.inf, -1.0], np.float32)}
    found = both_ways(one_off, FULL, None, "all")
    rest = one_off | {"q": np.delete(one_off["q"], 1, axis=2), "sinks": np.delete(one_off["sinks"], 1)}
    assert_as_by_hand(found, rest, FULL)
    (total, (count, _)), gradients = both_ways(arrays | {"sinks": np.full(H, np.inf, np.float32)}, FULL, None, "all")
    assert (total, count) == (0.0, 0.0)
    assert not any(np.any(gradients[name]) for name in STUDENT)


def test_attention_that_is_all_on_the_window_still_teaches():
    """Weights of 1e-60 are nothing in float32, their shares are."""
    arrays = problem(4)
    arrays["kv"] = 12 * arrays["q"].sum(axis=2)  # every query's own key has by far the largest logit
    window, entries = reference_visibility(FULL, W, M)
    (total, _), _ = both_ways(arrays, FULL, None, "all")
    np.testing.assert_allclose(total, by_hand(arrays, window, entries, "all")[0], rtol=1e-4)


@pytest.mark.parametrize("top_k", [None, 5])
def test_what_padding_and_unseen_slots_hold_does_not_matter(top_k):
    arrays = problem(5)
    (total, (count, _)), expected = both_ways(arrays, PACKED, top_k, "all")
    padding = PACKED == 0
    unseen = ~reference_visibility(PACKED, W, M)[1].any(axis=1)
    assert padding.any()
    assert unseen.any()
    for name in ("index_q", "index_weights", "q", "kv"):
        arrays[name][padding] = np.nan
    for name in ("index_keys", "entries"):
        arrays[name][unseen] = np.nan
    (again, (count_again, _)), gradients = both_ways(arrays, PACKED, top_k, "all")
    assert (again, count_again) == (total, count)
    for name in STUDENT:
        np.testing.assert_array_equal(gradients[name], expected[name], err_msg=name)


@pytest.mark.parametrize("value", [3e38, -3e38])
@pytest.mark.parametrize("top_k", [None, 5])
def test_large_keys_that_a_query_does_not_see_do_not_matter(top_k, value):
    """Finite, but their dots are not. The first slot is nobody's here, and -1 must not stand for it."""
    ids = np.repeat([[0, 2]] * B, [4, S - 4], axis=1)
    arrays = problem(11)
    (total, _), expected = both_ways(arrays, ids, top_k, "all")
    arrays["index_keys"][:, 0] = value
    (again, _), gradients = both_ways(arrays, ids, top_k, "all")
    assert again == total
    for name in STUDENT:
        np.testing.assert_array_equal(gradients[name], expected[name], err_msg=name)


def test_a_query_that_selected_nothing_gives_nothing():
    """As one that holds NaN."""
    arrays = problem(12)
    arrays["index_q"][0, 100], arrays["index_weights"][1, 70] = np.nan, np.nan
    (total, (count, indices)), gradients = both_ways(arrays, FULL, 5, "all")
    assert (np.asarray(indices)[[0, 1], [100, 70]] == -1).all()
    assert count == B * (S - 3) - 2
    assert np.isfinite(total)
    assert all(np.isfinite(g).all() for g in gradients.values())


@pytest.mark.parametrize("top_k", [None, 5])
def test_a_teacher_that_is_not_a_number_shows(top_k):
    """A broken model must not look like an indexer that has nothing to learn."""
    arrays = problem(13)
    sinks, entries, q = arrays["sinks"].copy(), arrays["entries"].copy(), arrays["q"].copy()
    sinks[1], entries[0, 3, 2], q[1, 90, 0, 1] = np.nan, np.nan, np.nan
    for broken in ({"sinks": sinks}, {"entries": entries}, {"q": q}):
        assert np.isnan(both_ways(arrays | broken, FULL, top_k, "all")[0][0])


@jax.jit
def loss_of_indices(arrays, indices):
    """Total and count, and the gradients of the student, where the log-sum-exps are zeros."""
    teacher = {name: arrays[name] for name in TEACHER if name != "kv"} | {"lse": jnp.zeros((B, S, H), jnp.float32)}
    visibility = Visibility(Documents.from_segment_ids(PACKED), W, M)

    def total(student):
        found = indexer_loss(*student, **teacher, visibility=visibility, indices=indices)
        return found.total, found.count

    return jax.value_and_grad(total, has_aux=True)([arrays[name] for name in STUDENT])


@pytest.mark.parametrize("dtype", [np.int8, np.int64])
def test_indices_are_a_set_of_slots_that_a_query_sees(dtype):
    """Out of range, invisible and -1 are ignored, and a duplicate counts once, as in core attention."""
    visibility = Visibility(documents_in(PACKED), W, M)
    first, end = (np.asarray(bound)[:, :, None] for bound in visibility.entry_range)

    def with_others(*others):
        slots = [np.where(first < end, first, -1), np.where(end - first > 1, end - 1, -1)]
        return np.concatenate([*slots, *(np.broadcast_to(other, first.shape) for other in others)], axis=2)

    largest = np.iinfo(dtype).max
    expected = loss_of_indices(problem(14), with_others(-1, -1, -1, -1, -1).astype(np.int32))
    with jax.enable_x64(True):
        got = loss_of_indices(problem(14), with_others(C, end, first, -2, min(largest, 1 << 32)).astype(dtype))
    assert float(expected[0][1]) > B * S / 2
    assert np.isfinite(got[0][0])
    np.testing.assert_allclose(got[0][0], expected[0][0], rtol=1e-6)
    assert got[0][1] == expected[0][1]
    assert_gradients_close(got[1], expected[1], np.float32)


def test_packed_documents_are_those_alone():
    arrays = problem(6)
    ids = np.repeat([[1, 2, 3]] * B, [61, 49, 40], axis=1)
    (total, (count, _)), _ = both_ways(arrays, ids, None, "all")
    parts = []
    for start, stop in ((0, 61), (61, 110), (110, 150)):
        # A document's windows begin at its first row, wherever in the row that is.
        slots = slice(start // M, start // M + (stop - start) // M)
        part = {"sinks": arrays["sinks"]}
        for name in (*STUDENT, *TEACHER[:3]):
            part[name] = arrays[name][:, slots if name in ("index_keys", "entries") else slice(start, stop)]
        parts.append(jax.jit(loss_of)(part, np.ones((B, stop - start), np.int32)))
    np.testing.assert_allclose(total, sum(float(p[0]) for p in parts), rtol=1e-5)
    assert count == sum(float(p[1][0]) for p in parts)


def test_bfloat16():
    arrays = {name: jnp.asarray(a, jnp.bfloat16) for name, a in problem(7).items()}
    rounded = {name: np.asarray(a, np.float32) for name, a in arrays.items()}
    assert_as_by_hand(both_ways(arrays, PACKED, 5, "all"), rounded, PACKED, dtype=jnp.bfloat16)


def test_a_sum_that_is_scaled_scales_its_gradients():
    @jax.jit
    @jax.grad
    def gradients(arrays, factor):
        total, (count, _) = loss_of(arrays, FULL, 5)
        return factor * IndexerLoss(total, count).mean

    once, thrice = (gradients(problem(8), factor) for factor in (1.0, 3.0))
    for name in STUDENT:
        assert np.any(once[name])
        np.testing.assert_allclose(thrice[name], 3 * once[name], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("length", [0, 3])
def test_rows_too_short_for_an_entry(length):
    total, (count, _) = jax.jit(loss_of)(problem(9, length), np.ones((B, length), np.int32))
    assert (total, count) == (0.0, 0.0)
    assert IndexerLoss(total, count).mean == 0.0


# ------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("top_k", [None, 16])
def test_no_array_has_queries_times_entries(top_k):
    length, heads, dim = 1 << 15, 4, 8
    slots = length // M
    visibility = Visibility(Documents.unpacked(1, length), W, M)

    def loss(student, q, entries, lse, indices):
        found = indexer_loss(
            *student, q=q, entries=entries, lse=lse, sinks=None, visibility=visibility, indices=indices
        )
        return found.total

    of = jax.ShapeDtypeStruct
    student = of((1, length, heads, dim), "float32"), of((1, length, heads), "float32"), of((1, slots, dim), "float32")
    others = of((1, length, heads, dim), "float32"), of((1, slots, dim), "float32"), of((1, length, heads), "float32")
    indices = None if top_k is None else of((1, length, top_k), "int32")
    program = jax.make_jaxpr(jax.value_and_grad(loss))(student, *others, indices)
    assert length * heads * dim <= max(array_sizes(program.jaxpr)) < length * slots / 64


# ----------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("index_keys", jnp.zeros((B, C + 1, J))),
        ("index_weights", jnp.zeros((B, S, I + 1))),
        ("entries", jnp.zeros((B, C, D + 1))),
        ("lse", jnp.zeros((B, S))),
        ("sinks", jnp.zeros(H + 1)),
        ("q", jnp.zeros((B, S + 1, H, D))),
        ("index_q", jnp.zeros((B, S, J))),
        ("indices", jnp.zeros((B, S + 1, 3), jnp.int32)),
        ("indices", jnp.zeros((B, S, 3))),
        ("denominator", "window"),
    ],
)
def test_mistakes_are_named(name, wrong, unchecked_annotations):
    arrays: dict[str, Any] = jax.tree.map(jnp.asarray, problem(10))
    del arrays["kv"]
    arrays |= {"lse": jnp.zeros((B, S, H)), "visibility": Visibility(Documents.unpacked(B, S), W, M), name: wrong}
    student = [arrays.pop(name) for name in STUDENT]
    kind = {"indices": "integers", "denominator": '"all" or "entries"'}.get(name, "floats")
    with pytest.raises(ValueError, match=f"^{name}: expected {kind}"):
        indexer_loss(*student, **arrays)
