"""The cache as a data structure: sizes, shapes, what it refuses, and that nothing of it is lost in a file."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from foveal import AttentionCache, AttentionConfig, CacheStack, LayerType
from tests.support.trees import assert_equal_leaves

CONFIG = AttentionConfig.tiny()


def filled(layer_type, seed=0, config=CONFIG, **sizes):
    """A cache whose every array holds numbers of its own."""
    rng = np.random.default_rng(seed)
    cache = AttentionCache.init(config, layer_type, **{"batch": 3, "capacity": 40, "max_rollback": 4, **sizes})
    cache = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 100).astype(leaf.dtype), cache)
    return dataclasses.replace(cache, lengths=jnp.array([9, 0, 31]), undoable=jnp.array([4, 0, 2]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("capacity", "max_rollback"), [(101, 0), (101, 3), (8, 0), (7, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("layer_type", tuple(LayerType))
def test_bytes_are_those_of_the_formula(layer_type, capacity, max_rollback, dtype):
    batch, width = 3, jnp.dtype(dtype).itemsize
    sizes = {"batch": batch, "capacity": capacity, "max_rollback": max_rollback}
    cache = AttentionCache.init(CONFIG, layer_type, **sizes, dtype=dtype)
    dim, index_dim, m = CONFIG.head_dim, CONFIG.index_head_dim, CONFIG.csa_ratio
    want = dict.fromkeys(("entries", "index_keys", "compressor_state", "indexer_state"), 0)
    want |= {"window": (CONFIG.sliding_window + max_rollback) * dim * width, "lengths": 8}
    if layer_type is LayerType.HCA:
        want["entries"] = max(capacity // CONFIG.hca_ratio, 1) * dim * width
        want["compressor_state"] = 2 * (CONFIG.hca_ratio + max_rollback) * dim * 4
    if layer_type is LayerType.CSA:
        want["entries"] = max(capacity // m, 1) * dim * width
        want["compressor_state"] = 2 * (2 * m + max_rollback) * 2 * dim * 4
        want["index_keys"] = max(capacity // m, 1) * index_dim * width
        want["indexer_state"] = 2 * (2 * m + max_rollback) * 2 * index_dim * 4
    assert cache.bytes_by_part() == {name: batch * size for name, size in want.items()}
    assert cache.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) == batch * sum(want.values())
    assert cache.batch == batch


def test_no_two_arrays_are_one_buffer():
    """Each can be donated."""
    for layer_type in LayerType:
        cache = AttentionCache.init(CONFIG, layer_type, batch=2, capacity=16)
        pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)]
        assert len(set(pointers)) == len(pointers)


def test_reset_leaves_the_other_rows():
    cache = filled(LayerType.CSA)
    some = cache.reset(np.array([True, False, False]))
    np.testing.assert_array_equal(some.lengths, [0, 0, 31])
    np.testing.assert_array_equal(some.undoable, [0, 0, 2])
    np.testing.assert_array_equal(cache.reset().lengths, [0, 0, 0])
    traced = jax.jit(lambda c, rows: c.reset(rows))(cache, jnp.array([False, False, True]))
    np.testing.assert_array_equal(traced.lengths, [9, 0, 0])


@pytest.mark.parametrize("order", [[2, 0, 1], [2, 2, 0, 1, 2], [1], []])
def test_reorder_moves_all_that_a_row_has(order):
    cache = filled(LayerType.CSA)
    order = np.array(order, int)
    for got in (cache.reorder(order), jax.jit(lambda c, o: c.reorder(o))(cache, jnp.asarray(order))):
        for moved, old in zip(jax.tree.leaves(got), jax.tree.leaves(cache), strict=True):
            np.testing.assert_array_equal(moved, np.asarray(old)[order])
        assert (got.capacity, got.max_rollback) == (40, 4)


def test_lists_do_for_small_vectors(monkeypatch):
    stack = CacheStack((filled(LayerType.SLIDING), filled(LayerType.CSA)))
    assert_equal_leaves(stack.reset([True, False, False]), stack.reset(np.array([True, False, False])))
    assert_equal_leaves(stack.reorder([1, 0]), stack.reorder(np.array([1, 0])))
    assert_equal_leaves(stack.rollback([1, 0, 2]), stack.rollback(np.array([1, 0, 2])))
    assert_equal_leaves(stack.truncate([8, 0, 30]), stack.truncate(np.array([8, 0, 30])))
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # to annotations neither of these is an int
    traced = jax.jit(lambda s, n: s.rollback([n, 0, np.int64(1)]).truncate((9, 0, n)))(stack, 1)
    np.testing.assert_array_equal(traced.lengths, [8, 0, 29])


def test_traced_numbers_saturate_before_they_are_narrowed(monkeypatch):
    """As far back as a row can go, however wide the integer that asks for more."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # unsigned integers are not of the annotation
    cache = filled(LayerType.CSA)
    wide = jnp.full((3,), 4_294_967_295, jnp.uint32)
    np.testing.assert_array_equal(jax.jit(lambda c, n: c.rollback(n))(cache, wide).lengths, [5, 0, 29])
    np.testing.assert_array_equal(jax.jit(lambda c, o: c.reorder(o))(cache, wide).lengths, [31, 31, 31])
    np.testing.assert_array_equal(jax.jit(lambda c, n: c.truncate(n))(cache, wide).lengths, [9, 0, 31])


@pytest.mark.parametrize("taken", [0, [0, 0, 0], [4, 0, 2], [1, 0, 2], [3, 0, 1]], ids=str)
def test_truncating_to_a_length_is_rolling_back_to_it(taken):
    stack = CacheStack(tuple(filled(kind) for kind in LayerType))
    lengths = np.asarray(stack.lengths) - taken
    want = stack.rollback(taken if taken == 0 else np.array(taken))
    assert_equal_leaves(stack.truncate(lengths), want)
    assert_equal_leaves(jax.jit(lambda s, n: s.truncate(n))(stack, jnp.asarray(lengths)), want)
    np.testing.assert_array_equal(want[0].undoable, np.array([4, 0, 2]) - taken)


def test_a_traced_truncation_goes_as_far_as_it_can():
    """Not above the length, and not below what can be taken back: of lengths 9, 0, 31 at most 4, 0, 2."""
    truncate = jax.jit(lambda cache, lengths: cache.truncate(lengths))
    cache = filled(LayerType.HCA)
    for lengths, want in (([7, 0, 30], [7, 0, 30]), ([12, 1, 40], [9, 0, 31]), ([0, 0, -5], [5, 0, 29])):
        after = truncate(cache, jnp.array(lengths))
        np.testing.assert_array_equal(after.lengths, want)
        np.testing.assert_array_equal(after.undoable, np.array([4, 0, 2]) - np.array([9, 0, 31]) + want)
    np.testing.assert_array_equal(truncate(cache, jnp.array(8)).lengths, [8, 0, 29])


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Orbax closes its event loops when the process ends
@pytest.mark.parametrize("max_rollback", [0, 3])
@pytest.mark.parametrize("capacity", [0, 1, 3, 127, 384])
def test_a_stack_comes_back_from_orbax_even_too_short_for_an_entry(capacity, max_rollback, tmp_path):
    sizes = {"batch": 3, "capacity": capacity, "max_rollback": max_rollback}
    config = dataclasses.replace(CONFIG, csa_ratio=4, hca_ratio=128)
    stack = CacheStack(tuple(filled(kind, seed, config, **sizes) for seed, kind in enumerate(LayerType)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "cache", stack)
        checkpointer.wait_until_finished()
        like = jax.eval_shape(lambda: CacheStack.init(config, **sizes))
        restored = checkpointer.restore(tmp_path / "cache", like)
    assert isinstance(restored, CacheStack)
    assert_equal_leaves(restored, stack)


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"batch": -1}, r"^batch: expected an int >= 0 and <= 2147483647, got -1"),
        ({"capacity": 1.5}, r"^capacity: expected an int >= 0 and <= 2147483647, got 1.5"),
        ({"capacity": 2**31}, r"^capacity: expected an int >= 0 and <= 2147483647, got 2147483648"),
        ({"max_rollback": True}, r"^max_rollback: expected an int >= 0 .*, got True"),
        ({"layer_type": "hac"}, r"^layer_type: expected one of .*, got 'hac'"),
    ],
)
def test_sizes_that_cannot_be(sizes, message):
    with pytest.raises(ValueError, match=message):
        AttentionCache.init(CONFIG, **{"layer_type": LayerType.HCA, "batch": 1, "capacity": 8, **sizes})


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.reset(np.array([1, 0, 0])), r"^rows: expected bools, got int64 of shape \(3,\)"),
        (lambda c: c.reset([1, 0, 0]), r"^rows: expected bools, got \[1, 0, 0\]"),
        (lambda c: c.reset([True]), r"^rows: expected bools \[B\] = \(3,\), got shape \(1,\)"),
        (lambda c: c.reorder([0, 3]), r"^order: expected row numbers >= 0 and < 3, got 3 at 1"),
        (lambda c: c.reorder(np.array([-1])), r"^order: expected row numbers >= 0 and < 3, got -1 at 0"),
        (lambda c: c.reorder(np.array([0.0])), r"^order: expected integers, got float64 of shape \(1,\)"),
        (lambda c: c.reorder([True, False]), r"^order: expected integers, got \[True, False\]"),
        (lambda c: c.reorder(2), r"^order: expected integers \[B\], got 2"),
        (lambda c: c.rollback(-1), r"^count: expected no negative number, got -1"),
        (lambda c: c.rollback(1), r"^count: expected at most what can be taken back, \[4, 0, 2\] .*, got 1 at 1"),
        (lambda c: c.rollback([5, 0, 0]), r"^count: expected at most .*\(max_rollback is 4\), got 5 at 0"),
        (lambda c: c.rollback(2**32), r"^count: expected int32 values, got 4294967296"),
        (lambda c: c.rollback([1, 0]), r"^count: expected an integer or integers \[B\] = \(3,\), got \[1, 0\]"),
        (lambda c: c.rollback(0.5), r"^count: expected integers, got 0.5"),
        (lambda c: c.rollback([[1], [1, 2]]), r"^count: expected integers, got \[\[1\], \[1, 2\]\]"),
        (lambda c: c.rollback(True), r"^count: expected integers, got True"),
        (lambda c: c.truncate([10, 0, 31]), r"^lengths: expected at most what .*, \[9, 0, 31\], got 10 at 0"),
        (lambda c: c.truncate(1), r"^lengths: expected at most what the rows have, \[9, 0, 31\], got 1 at 1"),
        (lambda c: c.truncate([4, 0, 31]), r"^lengths: expected at least what .*, \[5, 0, 29\] .*4\), got 4 at 0"),
        (lambda c: c.truncate([9, -1, 31]), r"^lengths: expected no negative number, got -1 at 1"),
        (lambda c: c.truncate([9, 0]), r"^lengths: expected an integer or integers \[B\] = \(3,\), got \[9, 0\]"),
        (lambda c: c.truncate(9.0), r"^lengths: expected integers, got 9.0"),
        (lambda c: c.recent_keys(CONFIG.sliding_window + 1), r"^count: expected an int >= 0 and <= 8, got 9"),
    ],
)
def test_changes_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        change(filled(LayerType.CSA))
