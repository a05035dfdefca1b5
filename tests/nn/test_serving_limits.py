"""What a layer behind a cache refuses, by name, and where it stops when it cannot: capacity, rollback, bad calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from foveal import CompressedAttention, LayerType
from foveal.testing.numerics import assert_close
from tests.nn.serving import CAPACITY, CONFIG, served, text


@pytest.mark.slow
def test_tokens_beyond_the_capacity():
    """Where lengths are known, an error; where they are traced, padding: nothing is written over."""
    for layer_type in LayerType:
        layer, x = served(layer_type), text(8)
        cache = layer.layer.init_cache(3, 26)
        _, cache = layer.append(cache, [x[0, :26], x[1, :24], x[2, :3]])
        with pytest.raises(
            ValueError, match=r"^lengths: expected at most what the cache has room for, 0 of 26, got 4 at 0"
        ):
            layer.layer.decode(cache, jnp.asarray(x[:, :4]))
        more, full = jax.jit(layer.layer.decode)(cache, jnp.asarray(x[:, 24:28]))
        np.testing.assert_array_equal(full.lengths, [26, 26, 7])
        np.testing.assert_array_equal(more[0], 0.0)
        np.testing.assert_array_equal(more[1, 2:], 0.0)
        assert_close(more[1, :2], layer.full(x[1:2])[0, 24:26], np.float32)
        assert (more[2] != 0).any(axis=-1).all()
        # The full row still holds what it held, to the bit.
        for after, before in zip(jax.tree.leaves(full), jax.tree.leaves(cache), strict=True):
            np.testing.assert_array_equal(after[0], before[0])


def test_rollback_goes_as_far_as_promised_and_no_further():
    layer, x = served(LayerType.CSA), text(9)
    cache = layer.layer.init_cache(3, CAPACITY, max_rollback=3)
    _, cache = layer.append(cache, [x[0, :10], x[1, :2], x[2, :0]])
    np.testing.assert_array_equal(cache.undoable, [3, 2, 0])
    with pytest.raises(ValueError, match=r"^count: expected at most what can be taken back, \[3, 2, 0\]"):
        cache.rollback(np.array([0, 0, 1]))
    cache = cache.rollback(np.array([2, 2, 0]))
    np.testing.assert_array_equal(cache.lengths, [8, 0, 0])
    with pytest.raises(ValueError, match=r"^count: expected at most"):
        cache.rollback(2)
    traced = jax.jit(lambda c, n: c.rollback(n))(cache, jnp.array([2, 2, 2]))
    np.testing.assert_array_equal(traced.lengths, [7, 0, 0])
    np.testing.assert_array_equal(traced.undoable, [0, 0, 0])


@pytest.mark.parametrize("layer_type", tuple(LayerType))
def test_drafts_without_room_cost_no_committed_token(layer_type):
    """Room for 10, 8 held, 4 drafted, of which 2 fit: what is accepted counts from the 8, not from the end."""
    layer, x = served(layer_type, sizes=(8,)), text(15)
    accepted = np.array([1, 0, 2])
    _, cache = layer.append(layer.layer.init_cache(3, 10, max_rollback=4), list(x[:, :8]))
    _, drafted = layer.traced(cache, jnp.asarray(text(16)[:, :8]), jnp.full(3, 4))
    np.testing.assert_array_equal(drafted.lengths, 10)
    never = cache
    for after in (
        drafted.truncate(8 + accepted),
        jax.jit(lambda c, n: c.truncate(n))(drafted, jnp.asarray(8 + accepted)),
    ):
        np.testing.assert_array_equal(after.lengths, [9, 8, 10])
        np.testing.assert_array_equal(after.undoable, [3, 2, 4])
    # None accepted: as if nothing had been drafted, to the bit.
    back = drafted.truncate(cache.lengths)
    for step in range(2):
        token = list(x[:, 8 + step : 9 + step])
        (got, back), (want, never) = layer.append(back, token), layer.append(never, token)
        np.testing.assert_array_equal(np.stack(got), np.stack(want))


@pytest.mark.parametrize("layer_type", tuple(LayerType))
def test_a_cache_without_room_for_an_entry_sees_none(layer_type):
    """What stands in the unused slot, NaN included, changes no bit: the slot is nobody's."""
    layer, x, capacity = served(layer_type), text(17), 3
    cache = layer.layer.init_cache(3, capacity)
    poisoned = jax.tree.map(lambda leaf: leaf * jnp.nan if leaf.ndim == 3 else leaf, cache)
    out, cache = layer.append(cache, list(x[:, :capacity]))
    same, _ = layer.append(poisoned, list(x[:, :capacity]))
    np.testing.assert_array_equal(np.stack(out), np.stack(same))
    assert_close(np.stack(out), layer.full(x)[:, :capacity], np.float32)
    slots = [] if cache.compressor is None else [cache.compressor.entries.shape[1]]
    assert slots == [1] * (layer_type is not LayerType.SLIDING)


def trace(layer, cache, x, implementation):
    return jax.eval_shape(functools.partial(layer.decode, implementation=implementation), cache, x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda layer, cache, x: layer.decode(cache, x[:, 0]),
            r"^x: expected floats .*S, 64\), got float32 of shape \(3, 64\)",
        ),
        (lambda layer, cache, x: layer.decode(cache, x.astype(int)), r"^x: expected floats .*, got int"),
        (lambda layer, cache, x: layer.decode(cache, [[1.0]]), r"^x: expected floats .*, got a list; convert it"),
        (lambda layer, cache, x: layer.decode(None, x), r"^cache: expected an AttentionCache, got NoneType"),
        (lambda layer, cache, x: layer.decode(cache, x[:2]), r"^cache: expected one .* for 2 rows, .*'\.?lengths"),
        (
            lambda layer, cache, x: layer.prefill(cache, x, np.array([1, 2])),
            r"^lengths: expected integers \[B\] = \(3,",
        ),
        (
            lambda layer, cache, x: layer.prefill(cache, x, np.zeros(3)),
            r"^lengths: expected integers, got float64 of shape \(3,\)",
        ),
        (lambda layer, cache, x: layer.prefill(cache, x, 2), r"^lengths: expected integers \[B\] = \(3,\), got 2"),
        (
            lambda layer, cache, x: layer.prefill(cache, x, np.array([0, 5, 0])),
            r"^lengths: expected 0 to 4, the tokens",
        ),
        (
            lambda layer, cache, x: layer.prefill(cache, x, np.array([0, -1, 0])),
            r"^lengths: expected 0 to 4, the tokens",
        ),
        (lambda layer, cache, x: trace(layer, cache, x, "splash"), "cannot do this"),
        (
            lambda layer, cache, x: trace(layer, cache, x, "best"),
            "^implementation: expected None or one",
        ),
    ],
)
def test_calls_that_cannot_be(call, message, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    layer = served(LayerType.CSA).layer
    with pytest.raises((ValueError, NotImplementedError), match=message):
        call(layer, layer.init_cache(3, CAPACITY), jnp.asarray(text(0)[:, :4]))


def test_a_cache_of_another_layer(monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    x = jnp.asarray(text(0)[:, :4])
    caches = {kind: served(kind).layer.init_cache(3, CAPACITY) for kind in LayerType}
    for kind in LayerType:
        for other, cache in caches.items():
            if other is not kind:
                with pytest.raises(
                    ValueError, match=rf"^cache: expected one that this {kind.value} layer's .* another"
                ):
                    served(kind).layer.decode(cache, x)
    narrow = CompressedAttention(CONFIG, layer_type=LayerType.HCA, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"^cache: expected .*bfloat16.*, got .*float32"):
        narrow.decode(caches[LayerType.HCA], x)
