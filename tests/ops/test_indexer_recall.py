"""The indexer's recall against a count by hand, in float64, query by query."""

import functools
import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from foveal.geometry import Documents, Visibility
from foveal.ops import core_attention, indexer_recall
from foveal.testing.generators import random_segment_ids
from foveal.testing.reference import reference_visibility

recall_module = importlib.import_module("foveal.ops.indexer_recall")  # the package has its function by that name

B, S, H, D, M, W = 2, 150, 3, 8, 4, 16
C = S // M
PACKED = random_segment_ids(3, B, S, max_document=90)


def problem(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"q": (B, S, H, D), "kv": (B, S, D), "entries": (B, C, D), "sinks": (H,)}
    return {name: 2 * rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def choice(seed: int, able: np.ndarray, top_k: int) -> np.ndarray:
    """Of each query top_k visible slots at random, ascending, then -1."""
    rng = np.random.default_rng(seed)
    slots = np.full((*able.shape[:2], top_k), -1, np.int32)
    for b, t in np.ndindex(able.shape[:2]):
        seen = np.flatnonzero(able[b, t])
        picked = np.sort(rng.choice(seen, min(top_k, len(seen)), replace=False))
        slots[b, t, : len(picked)] = picked
    return slots


def recall_of(arrays, ids, indices):
    visibility = Visibility(Documents.from_segment_ids(ids), W, M)
    _, lse = core_attention(**arrays, visibility=visibility, return_lse=True, implementation="dense")
    arrays = {name: arrays[name] for name in ("q", "entries", "sinks")}
    return indexer_recall(indices, **arrays, lse=lse, visibility=visibility)


recall = jax.jit(recall_of)


def best_by_hand(arrays, window: np.ndarray, able: np.ndarray, top_k: int) -> dict[tuple[int, ...], set[int]]:
    """Of each query with a choice the slots that attention weighs most."""
    a = {name: array.astype(np.float64) for name, array in arrays.items()}
    best = {}
    for b, t in np.ndindex(able.shape[:2]):
        seen = np.flatnonzero(able[b, t])
        if len(seen) > top_k:
            of_entries = np.exp(a["q"][b, t] @ a["entries"][b, seen].T / math.sqrt(D))
            of_window = np.exp(a["q"][b, t] @ a["kv"][b, window[b, t]].T / math.sqrt(D))
            total = of_entries.sum(axis=1) + of_window.sum(axis=1) + np.exp(a["sinks"])
            weight = (of_entries / total[:, None]).sum(axis=0)
            best[b, t] = set(seen[np.argsort(-weight, kind="stable")[:top_k]].tolist())
    return best


@functools.partial(jax.jit, static_argnums=3)
def recall_in_blocks(arrays, ids, indices, elements):
    """As `recall`, traced with other blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recall_module, "_ELEMENTS", elements)
        return recall_of(arrays, ids, indices)


@pytest.mark.parametrize("ids", [np.ones((B, S), np.int32), PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize("top_k", [1, 7])
@pytest.mark.parametrize("elements", [1 << 22, 1 << 12], ids=["one block", "blocks"])
def test_it_counts_what_a_count_by_hand_counts(ids, top_k, elements):
    recall = functools.partial(recall_in_blocks, elements=elements)
    arrays = problem(top_k)
    window, able = reference_visibility(ids, W, M)
    indices = choice(5, able, top_k)
    best = best_by_hand(arrays, window, able, top_k)
    found = recall(arrays, ids, indices)
    assert len(best) > 40
    assert float(found.count) == top_k * len(best)
    assert float(found.found) == sum(len(slots & set(indices[at].tolist())) for at, slots in best.items())
    assert 0 < found.mean < 0.7  # what luck finds

    for at, slots in best.items():
        indices[at] = sorted(slots)
    assert float(recall(arrays, ids, indices.copy()).mean) == 1.0


@pytest.mark.parametrize("dtype", [np.int8, np.int64])
def test_indices_are_a_set_of_slots_that_a_query_sees(dtype):
    """Out of range, invisible and -1 find nothing, and a duplicate finds once, as in core attention."""
    able = reference_visibility(PACKED, W, M)[1]
    arrays, indices = problem(2), choice(6, able, 5)
    expected = recall(arrays, PACKED, np.where(np.arange(5) < 2, indices, -1))
    others = indices.astype(dtype)
    others[:, :, 2], others[:, :, 3], others[:, :, 4] = indices[:, :, 0], C, min(np.iinfo(dtype).max, 1 << 32)
    with jax.enable_x64(True):
        found = recall(arrays, PACKED, others)
    assert float(expected.found) > 0
    assert (float(found.found), float(found.count)) == (float(expected.found), float(expected.count))


def test_what_no_query_sees_does_not_count():
    ids, top_k = PACKED.copy(), 5
    ids[:, -20:] = 0
    able = reference_visibility(ids, W, M)[1]
    arrays, indices = problem(1), choice(2, able, top_k)
    expected = recall(arrays, ids, indices)
    poisoned = {name: array.copy() for name, array in arrays.items()}
    poisoned["q"][:, -20:] = np.nan
    poisoned["kv"][:, -20:] = np.nan
    poisoned["entries"][:, ~able.any(axis=(0, 1))] = np.nan
    found = recall(poisoned, ids, indices)
    assert (float(found.found), float(found.count)) == (float(expected.found), float(expected.count))


@pytest.mark.parametrize("top_k", [C, C + 3])
def test_without_a_choice_nothing_is_missed(top_k):
    ids = np.ones((B, S), np.int32)
    indices = choice(1, reference_visibility(ids, W, M)[1], top_k)
    found = recall(problem(1), ids, indices)
    assert (float(found.found), float(found.count), float(found.mean)) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("rows", [0, M - 1])
def test_rows_without_an_entry_have_no_choice(rows):
    q, entries, lse = (jnp.zeros(shape) for shape in ((B, rows, H, D), (B, rows // M, D), (B, rows, H)))
    visibility = Visibility(Documents.unpacked(B, rows), W, M)
    run = jax.jit(functools.partial(indexer_recall, visibility=visibility))
    found = run(jnp.full((B, rows, 4), -1), q=q, entries=entries, lse=lse, sinks=None)
    assert float(found.count) == 0.0


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("indices", jnp.zeros((B, S - 1, 3), jnp.int32)),
        ("indices", jnp.zeros((B, S, 3))),
        ("q", jnp.zeros((B, S - 1, H, D))),
        ("entries", jnp.zeros((B, C - 1, D))),
        ("lse", jnp.zeros((B, S - 1, H))),
        ("sinks", jnp.zeros(9)),
    ],
)
def test_shapes_that_do_not_fit_are_named(name, wrong, unchecked_annotations):
    arguments: dict[str, Any] = {
        "indices": jnp.zeros((B, S, 3), jnp.int32), "q": jnp.zeros((B, S, H, D)), "entries": jnp.zeros((B, C, D)),
        "lse": jnp.zeros((B, S, H)), "sinks": jnp.zeros(H),
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        indexer_recall(**arguments | {name: wrong}, visibility=Visibility(Documents.unpacked(B, S), W, M))
