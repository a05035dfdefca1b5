"""The cache as a data structure: sizes, shapes, what it refuses, and that nothing of it is lost in a file."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from foveal import AttentionCache, AttentionConfig, CacheStack, LayerType

CONFIG = AttentionConfig.tiny()


def filled(layer_type, seed=0, **sizes):
    """A cache whose every array holds numbers of its own."""
    rng = np.random.default_rng(seed)
    cache = AttentionCache.init(CONFIG, layer_type, **{"batch": 3, "capacity": 40, "max_rollback": 4, **sizes})
    cache = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 100).astype(leaf.dtype), cache)
    return dataclasses.replace(cache, lengths=jnp.array([9, 0, 31]), undoable=jnp.array([4, 0, 2]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_rollback", [0, 3])
@pytest.mark.parametrize("layer_type", tuple(LayerType))
def test_bytes_are_those_of_the_formula(layer_type, max_rollback, dtype):
    batch, capacity, width = 3, 101, jnp.dtype(dtype).itemsize
    cache = AttentionCache.init(
        CONFIG, layer_type, batch=batch, capacity=capacity, max_rollback=max_rollback, dtype=dtype
    )
    dim, index_dim, m = CONFIG.head_dim, CONFIG.index_head_dim, CONFIG.csa_ratio
    want = dict.fromkeys(("entries", "index_keys", "compressor_state", "indexer_state"), 0)
    want |= {"window": (CONFIG.sliding_window + max_rollback) * dim * width, "lengths": 8}
    if layer_type is LayerType.HCA:
        want["entries"] = capacity // CONFIG.hca_ratio * dim * width
        want["compressor_state"] = 2 * (CONFIG.hca_ratio + max_rollback) * dim * 4
    if layer_type is LayerType.CSA:
        want["entries"] = capacity // m * dim * width
        want["compressor_state"] = 2 * (2 * m + max_rollback) * 2 * dim * 4
        want["index_keys"] = capacity // m * index_dim * width
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


def test_no_capacity_for_an_entry():
    cache = AttentionCache.init(CONFIG, LayerType.HCA, batch=1, capacity=CONFIG.hca_ratio - 1)
    assert cache.compressor is not None
    assert cache.compressor.entries.shape == (1, 0, CONFIG.head_dim)


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


def test_traced_numbers_saturate_before_they_are_narrowed(monkeypatch):
    """As far back as a row can go, however wide the integer that asks for more."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # unsigned integers are not of the annotation
    cache = filled(LayerType.CSA)
    for count in (3_000_000_000, 2**32, np.array([2**31, 2**33, 2**40])):
        np.testing.assert_array_equal(jax.jit(lambda c, n=count: c.rollback(n))(cache).lengths, [5, 0, 29])
    wide = jnp.full((3,), 4_294_967_295, jnp.uint32)
    np.testing.assert_array_equal(jax.jit(lambda c, n: c.rollback(n))(cache, wide).lengths, [5, 0, 29])
    np.testing.assert_array_equal(jax.jit(lambda c, o: c.reorder(o))(cache, wide).lengths, [31, 31, 31])


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Orbax closes its event loops when the process ends
def test_a_stack_comes_back_from_orbax_as_it_was(tmp_path):
    stack = CacheStack(tuple(filled(kind, seed) for seed, kind in enumerate(LayerType)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "cache", stack)
        checkpointer.wait_until_finished()
        like = jax.eval_shape(lambda: CacheStack.init(CONFIG, batch=3, capacity=40, max_rollback=4))
        restored = checkpointer.restore(tmp_path / "cache", like)
    assert isinstance(restored, CacheStack)
    assert jax.tree.structure(restored) == jax.tree.structure(stack)
    for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(stack), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"batch": -1}, r"^batch: expected an int >= 0 and below 2\*\*31, got -1"),
        ({"capacity": 1.5}, r"^capacity: expected an int >= 0 and below 2\*\*31, got 1.5"),
        ({"capacity": 2**31}, r"^capacity: expected an int >= 0 and below 2\*\*31, got 2147483648"),
        ({"max_rollback": True}, r"^max_rollback: expected an int >= 0 .*, got True"),
        ({"layer_type": "hca"}, r"^layer_type: expected one of .*, got 'hca'"),
    ],
)
def test_sizes_that_cannot_be(sizes, message, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message):
        AttentionCache.init(CONFIG, **{"layer_type": LayerType.HCA, "batch": 1, "capacity": 8, **sizes})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.reset(np.array([1, 0, 0])), r"^rows: expected bool \[B\] = \(3,\), got int64 of shape \(3,\)"),
        (lambda c: c.reset(np.array([True])), r"^rows: expected bool \[B\] = \(3,\), got bool of shape \(1,\)"),
        (lambda c: c.reset([True] * 3), r"^rows: expected bool \[B\] = \(3,\), got \[True, True, True\]"),
        (lambda c: c.reorder(np.array([0, 3])), r"^order: expected rows of the 3 there are, got \[0, 3\]"),
        (lambda c: c.reorder(np.array([-1])), r"^order: expected rows of the 3 there are, got \[-1\]"),
        (lambda c: c.reorder(np.array([0.0])), r"^order: expected integers \[N\], got float64 of shape \(1,\)"),
        (lambda c: c.reorder(2), r"^order: expected integers \[N\], got 2"),
        (lambda c: c.rollback(-1), r"^count: expected no negative number, got -1"),
        (lambda c: c.rollback(1), r"^count: expected at most what can be taken back, \[4, 0, 2\]"),
        (lambda c: c.rollback(np.array([5, 0, 0])), r"^count: expected at most .*max_rollback is 4\), got \[5, 0, 0\]"),
        (lambda c: c.rollback(np.array([1, 0])), r"^count: expected an integer or integers \[B\] = \(3,\)"),
        (lambda c: c.rollback(0.5), r"^count: expected an integer or integers \[B\], got 0.5"),
        (
            lambda c: c.rollback([[1], [1, 2]]),
            r"^count: expected an integer or integers \[B\], got \[\[1\], \[1, 2\]\]",
        ),
        (lambda c: c.recent_keys(CONFIG.sliding_window + 1), r"^count: expected at most the sliding window, 8, got 9"),
        (lambda c: c.rollback(True), r"^count: expected an integer or integers \[B\], got True"),
    ],
)
def test_changes_that_cannot_be(change, message, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message):
        change(filled(LayerType.CSA))
