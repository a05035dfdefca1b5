"""What is not a number stays with those who see it, in gradients too, and through every implementation."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx

from foveal import AttentionConfig, CompressedAttention, Documents, LayerType, Visibility, core_attention
from tests.support.core_attention import IMPLEMENTATIONS

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
IDS = jnp.array([[1] * 21 + [2] * 29])


@every_implementation
@pytest.mark.parametrize("layer_type", list(LayerType))
def test_nan_in_one_document_moves_no_bit_of_anothers_gradient(layer_type, implementation):
    """The poisoned document's queries are NaN too, and 0 * NaN is NaN: their zero weights must not reach a key."""
    config = AttentionConfig.tiny()
    layer = CompressedAttention(config, layer_type=layer_type, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (1, 50, config.hidden_size))

    @jax.jit
    def gradient(x):
        return jax.grad(lambda x: (layer(x, IDS, implementation=implementation)[:, 21:] ** 2).sum())(x)

    clean, poisoned = gradient(x), gradient(x.at[0, 5].set(jnp.nan))
    assert np.abs(clean[:, 21:]).max() > 0
    np.testing.assert_array_equal(clean[:, 21:], poisoned[:, 21:])


@every_implementation
@pytest.mark.parametrize("poisoned", ["key", "query"])
def test_a_lost_query_with_large_logits_gives_its_keys_no_gradient(poisoned, implementation):
    """Logits of 200: a weight recomputed without its log-sum-exp would overflow, and infinity times zero is NaN."""
    length = 40
    q, kv = jnp.full((1, length, 1, 4), 10.0), jnp.full((1, length, 4), 10.0)
    if poisoned == "key":
        kv = kv.at[0, 3].set(jnp.nan)
    else:
        q = q.at[0, 3].set(jnp.nan)
    visibility = Visibility(Documents.unpacked(1, length), 4)

    @jax.jit
    def gradient(kv):
        def loss(kv):
            return core_attention(q, kv, visibility=visibility, implementation=implementation)[:, 10:].sum()

        return jax.grad(loss)(kv)

    found = np.asarray(gradient(kv))
    assert np.isfinite(found).all()
    assert np.abs(found[0, 10:]).max() > 0


@every_implementation
def test_no_selected_slots_at_all_leaves_the_window(implementation):
    """K = 0, with more entries than would be scored together with the window."""
    length, rng = 512, np.random.default_rng(0)
    q, kv, entries = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((1, length, 1, 4), (1, length, 4), (1, 128, 4))
    )
    documents = Documents.unpacked(1, length)
    none = jnp.zeros((1, length, 0), jnp.int32)
    found = core_attention(
        q, kv, entries, visibility=Visibility(documents, 8, 4), indices=none, implementation=implementation
    )
    alone = core_attention(q, kv, visibility=Visibility(documents, 8), implementation=implementation)
    np.testing.assert_allclose(found, alone, rtol=1e-6, atol=1e-6)


def test_what_is_no_array_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as users call it
    visibility = Visibility(Documents.unpacked(1, 4), 2)
    with pytest.raises(ValueError, match=r"^sinks: expected floats \[H\] = \(1,\), got a list"):
        core_attention(jnp.zeros((1, 4, 1, 2)), jnp.zeros((1, 4, 2)), visibility=visibility, sinks=[0.0])  # pyright: ignore[reportArgumentType, reportCallIssue]


@every_implementation
def test_infinity_in_a_query_shows_whatever_the_signs_of_the_keys(implementation):
    """Also where every logit is -inf, which must not be taken for a query that sees nothing."""
    q, kv = np.ones((1, 9, 1, 8), np.float32), np.ones((1, 9, 8), np.float32)
    q[0, 0, 0, 2], kv[0, 0, 2] = np.inf, -1.0
    visibility = Visibility(Documents.unpacked(1, 9), 4)
    out, lse = core_attention(
        jnp.asarray(q), jnp.asarray(kv), visibility=visibility, return_lse=True, implementation=implementation
    )
    assert np.isnan(out[0, 0]).all()
    assert np.isnan(lse[0, 0]).all()
    assert np.isfinite(out[0, 1:]).all()
