"""What a layer behind a cache refuses, by name, and where it stops when it cannot: capacity, rollback, bad calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from foveal import LayerType
from foveal.testing.numerics import assert_close
from tests.nn.layers import LAYER_TYPES, build, every_layer_type
from tests.nn.serving import served, text

ROOM, ROLLBACK = 26, 4


@functools.cache
def limited(layer_type):
    """A layer whose chunks are padded to the room of its cache, that cache, and decoding without lengths."""
    layer = served(layer_type, sizes=(ROOM,))
    return layer, layer.layer.init_cache(3, ROOM, max_rollback=ROLLBACK), jax.jit(layer.layer.decode)


@pytest.mark.slow
@every_layer_type
def test_tokens_beyond_the_capacity(layer_type):
    """Where lengths are known, an error; where they are traced, padding: nothing is written over."""
    (layer, cache, decode), x = limited(layer_type), text(8)
    _, cache = layer.append(cache, [x[0, :26], x[1, :24], x[2, :3]])
    with pytest.raises(
        ValueError, match=r"^lengths: expected at most what the cache has room for, 0 of 26, got 4 at 0"
    ):
        layer.layer.decode(cache, jnp.asarray(x[:, :4]))
    more, full = decode(cache, x[:, 24:28])
    np.testing.assert_array_equal(full.lengths, [26, 26, 7])
    np.testing.assert_array_equal(more[0], 0.0)
    np.testing.assert_array_equal(more[1, 2:], 0.0)
    assert_close(more[1, :2], layer.full(x[1:2])[0, 24:26], np.float32)
    assert (more[2] != 0).any(axis=-1).all()
    # The full row still holds what it held, to the bit.
    for after, before in zip(jax.tree.leaves(full), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(np.asarray(after)[0], np.asarray(before)[0])


def test_rollback_goes_as_far_as_promised_and_no_further():
    (layer, cache, _), x = limited(LayerType.CSA), text(9)
    _, cache = layer.append(cache, [x[0, :10], x[1, :2], x[2, :0]])
    np.testing.assert_array_equal(cache.undoable, [4, 2, 0])
    with pytest.raises(ValueError, match=r"^count: expected at most what can be taken back, \[4, 2, 0\]"):
        cache.rollback(np.array([0, 0, 1]))
    cache = cache.rollback(np.array([3, 2, 0]))
    np.testing.assert_array_equal(cache.lengths, [7, 0, 0])
    with pytest.raises(ValueError, match=r"^count: expected at most"):
        cache.rollback(2)
    traced = jax.jit(lambda c, n: c.rollback(n))(cache, np.array([2, 2, 2]))
    np.testing.assert_array_equal(traced.lengths, [6, 0, 0])
    np.testing.assert_array_equal(traced.undoable, [0, 0, 0])


@every_layer_type
def test_drafts_without_room_cost_no_committed_token(layer_type):
    """Room for 26, 24 held, 4 drafted, of which 2 fit: what is accepted counts from the 24, not from the end."""
    (layer, cache, decode), x = limited(layer_type), text(15)
    accepted = np.array([1, 0, 2])
    _, cache = layer.append(cache, list(x[:, :24]))
    _, drafted = decode(cache, text(16)[:, :4])
    np.testing.assert_array_equal(drafted.lengths, 26)
    never = cache
    truncate = jax.jit(lambda c, n: c.truncate(n))
    for after in (drafted.truncate(24 + accepted), truncate(drafted, 24 + accepted)):
        np.testing.assert_array_equal(after.lengths, [25, 24, 26])
        np.testing.assert_array_equal(after.undoable, [3, 2, 4])
    # None accepted: as if nothing had been drafted, to the bit.
    back = drafted.truncate(cache.lengths)
    for n in (24, 25):
        token = list(x[:, n : n + 1])
        (got, back), (want, never) = layer.append(back, token), layer.append(never, token)
        np.testing.assert_array_equal(np.stack(got), np.stack(want))


@every_layer_type
def test_a_cache_without_room_for_an_entry_sees_none(layer_type):
    """What stands in the unused slot, NaN included, changes no bit: the slot is nobody's."""
    (layer, _, _), x, capacity = limited(layer_type), text(17), 3
    cache = layer.layer.init_cache(3, capacity)
    poisoned = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan) if leaf.ndim == 3 else leaf, cache)
    out, cache = layer.append(cache, list(x[:, :capacity]))
    same, _ = layer.append(poisoned, list(x[:, :capacity]))
    np.testing.assert_array_equal(np.stack(out), np.stack(same))
    assert_close(np.stack(out), layer.full(x)[:, :capacity], np.float32)
    slots = [] if cache.compressor is None else [cache.compressor.entries.shape[1]]
    assert slots == [1] * (layer_type is not LayerType.SLIDING)


def trace(method, cache, x, implementation):
    return jax.eval_shape(functools.partial(method, implementation=implementation), cache, x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f, cache, x: f(cache, x[:, 0]), r"^x: expected floats .*S, 64\), got float32 of shape \(3, 64\)"),
        (lambda f, cache, x: f(cache, x.astype(int)), r"^x: expected floats .*, got int"),
        (lambda f, cache, x: f(cache, [[1.0]]), r"^x: expected floats .*, got a list; convert it"),
        (lambda f, cache, x: f(None, x), r"^cache: expected an AttentionCache, got NoneType"),
        (lambda f, cache, x: f(cache, x[:2]), r"^cache: expected one .* for 2 rows, .*'\.?lengths"),
        (lambda f, cache, x: f(cache, x, np.array([1, 2])), r"^lengths: expected integers \[B\] = \(3,"),
        (
            lambda f, cache, x: f(cache, x, np.zeros(3)),
            r"^lengths: expected integers, got float64 of shape \(3,\)",
        ),
        (lambda f, cache, x: f(cache, x, 2), r"^lengths: expected integers \[B\] = \(3,\), got 2"),
        (lambda f, cache, x: f(cache, x, np.array([0, 5, 0])), r"^lengths: expected 0 to 4, the tokens"),
        (lambda f, cache, x: f(cache, x, np.array([0, -1, 0])), r"^lengths: expected 0 to 4, the tokens"),
        (lambda f, cache, x: trace(f, cache, x, "splash"), "cannot do this"),
        (lambda f, cache, x: trace(f, cache, x, "best"), "^implementation: expected None or one"),
    ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_calls_that_cannot_be(call, message):
    layer = served(LayerType.CSA).layer
    for method in (layer.prefill, layer.decode):
        with pytest.raises((ValueError, NotImplementedError), match=message):
            call(method, layer.init_cache(3, ROOM), jnp.asarray(text(0)[:, :4]))


@pytest.mark.usefixtures("unchecked_annotations")
def test_a_cache_of_another_layer():
    x = jnp.asarray(text(0)[:, :4])
    caches = {kind: served(kind).layer.init_cache(3, ROOM) for kind in LAYER_TYPES}
    for kind in LAYER_TYPES:
        for other, cache in caches.items():
            if other is not kind:
                message = rf"^cache: expected one that this {kind.value} layer's .* another"
                with pytest.raises(ValueError, match=message):
                    served(kind).layer.decode(cache, x)
    with pytest.raises(ValueError, match=r"^cache: expected .*bfloat16.*, got .*float32"):
        build(LayerType.HCA, dtype=jnp.bfloat16).decode(caches[LayerType.HCA], x)
