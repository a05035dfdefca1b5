"""What is not a number stays with those who see it, in gradients too, and through every implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from foveal import AttentionConfig, CompressedAttention, Documents, LayerType, Visibility, core_attention
from tests.support.core_attention import IMPLEMENTATIONS

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
attend = jax.jit(core_attention, static_argnames=("implementation", "return_lse"))


@functools.cache
def layer_of(layer_type: LayerType):
    return nnx.split(CompressedAttention(AttentionConfig.tiny(), layer_type=layer_type, rngs=nnx.Rngs(0)))


@every_implementation
@pytest.mark.parametrize("layer_type", list(LayerType))
def test_nan_in_one_document_moves_no_bit_of_anothers_gradient(layer_type, implementation):
    """The poisoned document's queries are NaN too, and 0 * NaN is NaN: their zero weights must not reach a key."""
    graph, state = layer_of(layer_type)
    x = np.random.default_rng(1).normal(size=(1, 50, AttentionConfig.tiny().hidden_size)).astype(np.float32)
    ids, poison = np.array([[1] * 21 + [2] * 29]), x.copy()
    poison[0, 5] = np.nan

    @jax.jit
    def gradient(x):
        layer = nnx.merge(graph, state)
        return jax.grad(lambda x: (layer(x, ids, implementation=implementation)[:, 21:] ** 2).sum())(x)

    clean, poisoned = gradient(x), gradient(poison)
    assert np.abs(clean[:, 21:]).max() > 0
    np.testing.assert_array_equal(clean[:, 21:], poisoned[:, 21:])


@functools.partial(jax.jit, static_argnums=2)
def gradient_of_later_queries(q, kv, implementation):
    def loss(kv):
        visibility = Visibility(Documents.unpacked(*kv.shape[:2]), 4)
        return core_attention(q, kv, visibility=visibility, implementation=implementation)[:, 10:].sum()

    return jax.grad(loss)(kv)


@every_implementation
@pytest.mark.parametrize("poisoned", ["key", "query"])
def test_a_lost_query_with_large_logits_gives_its_keys_no_gradient(poisoned, implementation):
    """Logits of 200: a weight recomputed without its log-sum-exp would overflow, and infinity times zero is NaN."""
    q, kv = np.full((1, 40, 1, 4), 10.0, np.float32), np.full((1, 40, 4), 10.0, np.float32)
    (kv if poisoned == "key" else q)[0, 3] = np.nan
    found = np.asarray(gradient_of_later_queries(q, kv, implementation))
    assert np.isfinite(found).all()
    assert np.abs(found[0, 10:]).max() > 0


@every_implementation
def test_no_selected_slots_at_all_leaves_the_window(implementation):
    """K = 0, with more entries than would be scored together with the window."""
    length, rng = 512, np.random.default_rng(0)
    shapes = (1, length, 1, 4), (1, length, 4), (1, 128, 4)
    q, kv, entries = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    documents = Documents.unpacked(1, length)
    none = np.zeros((1, length, 0), np.int32)
    with_entries = Visibility(documents, 8, 4)
    found = attend(q, kv, entries, visibility=with_entries, indices=none, implementation=implementation)
    alone = attend(q, kv, visibility=Visibility(documents, 8), implementation=implementation)
    np.testing.assert_allclose(found, alone, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("unchecked_annotations")
def test_what_is_no_array_is_refused_by_name():
    visibility = Visibility(Documents.unpacked(1, 4), 2)
    with pytest.raises(ValueError, match=r"^sinks: expected floats \[H\] = \(1,\), got a list"):
        core_attention(jnp.zeros((1, 4, 1, 2)), jnp.zeros((1, 4, 2)), visibility=visibility, sinks=[0.0])  # pyright: ignore[reportArgumentType, reportCallIssue]


@every_implementation
def test_infinity_in_a_query_shows_whatever_the_signs_of_the_keys(implementation):
    """Also where every logit is -inf, which must not be taken for a query that sees nothing."""
    q, kv = np.ones((1, 9, 1, 8), np.float32), np.ones((1, 9, 8), np.float32)
    q[0, 0, 0, 2], kv[0, 0, 2] = np.inf, -1.0
    visibility = Visibility(Documents.unpacked(1, 9), 4)
    out, lse = attend(q, kv, visibility=visibility, return_lse=True, implementation=implementation)
    assert np.isnan(out[0, 0]).all()
    assert np.isnan(lse[0, 0]).all()
    assert np.isfinite(out[0, 1:]).all()
