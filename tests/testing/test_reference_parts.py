"""The pieces of the reference against values written by hand, and at the edges of their domain."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from numpy.typing import DTypeLike

from foveal.config import AttentionConfig
from foveal.layers import RopeConfig, YarnConfig
from foveal.testing.generators import distinct_values, random_hidden
from foveal.testing.reference import (
    reference_core_attention,
    reference_entries,
    reference_rope,
    reference_rope_frequencies,
    reference_top_k,
    reference_visibility,
)

YARN = RopeConfig(160000.0, YarnConfig(16.0, 64, 8.0, 0.5))
# Compiled whole: dispatching operation by operation compiles each.
rope = jax.jit(reference_rope, static_argnums=(2, 3), static_argnames=("inverse", "time_axis"))
entries_of = jax.jit(reference_entries, static_argnums=(1, 3), static_argnames=("ratio", "head_dim", "overlap"))
top_k = jax.jit(reference_top_k, static_argnums=2)
core = jax.jit(lambda *args: reference_core_attention(*args, scale=0.8))


# --------------------------------------------------------------------------------------------------------------- RoPE


def test_yarn_frequencies_of_the_published_models():
    rope = RopeConfig(160000.0, YarnConfig(16.0, 65536, 32.0, 1.0))
    frequencies = reference_rope_frequencies(rope, 64)
    assert frequencies.shape == (32,)
    assert frequencies.dtype == np.float64
    expected = {
        0: 1.0, 1: 0.687656045, 2: 0.472870797, 8: 0.0500000007, 15: 0.00363553851, 16: 0.00226562493,
        17: 0.00139680132, 18: 8.49689706e-4, 19: 5.08081983e-4, 20: 2.96977785e-4, 21: 1.68179977e-4,
        22: 9.08678412e-5, 23: 4.54442306e-5, 24: 1.95312532e-5, 25: 5.37231244e-6, 28: 1.74692821e-6,
        31: 5.6805294e-7,
    }  # fmt: skip
    np.testing.assert_allclose(frequencies[list(expected)], list(expected.values()), rtol=3e-7)
    plain = reference_rope_frequencies(RopeConfig(160000.0), 64)
    ramp = [0.90625, 0.8125, 0.71875, 0.625, 0.53125, 0.4375, 0.34375, 0.25, 0.15625]
    np.testing.assert_allclose(frequencies / plain, [1.0] * 16 + ramp + [0.0625] * 7, rtol=1e-12)
    main = reference_rope_frequencies(RopeConfig(10000.0), 64)
    np.testing.assert_allclose(main[:3], [1.0, 0.749894202, 0.562341332], rtol=3e-7)
    np.testing.assert_allclose(main[-3:], [2.37137385e-4, 1.7782794e-4, 1.33352145e-4], rtol=3e-7)


def test_rope_rotates_trailing_interleaved_pairs():
    x = np.arange(1.0, 7.0, dtype=np.float32).reshape(1, 6)
    turned = np.asarray(rope(x, np.array([3]), RopeConfig(10000.0), 4))[0]
    slow = 3 * 10000.0**-0.5
    first = [3 * np.cos(3) - 4 * np.sin(3), 3 * np.sin(3) + 4 * np.cos(3)]
    second = [5 * np.cos(slow) - 6 * np.sin(slow), 5 * np.sin(slow) + 6 * np.cos(slow)]
    np.testing.assert_allclose(turned, [1.0, 2.0, *first, *second], rtol=1e-5)

    q = random_hidden(1, 2, 5, 4 * 24).reshape(2, 5, 4, 24)
    positions = np.array([4, 0, 9, 2, 100])
    turned = rope(q, positions, YARN, 8, time_axis=1)
    alone = rope(q[1, 2], np.full(4, 9), YARN, 8)
    np.testing.assert_allclose(turned[1, 2], alone, atol=1e-6)
    back = rope(turned, positions, YARN, 8, inverse=True, time_axis=1)
    np.testing.assert_allclose(back, q, atol=1e-5)
    with pytest.raises(ValueError, match=r"positions: expected shape \(2,\)"):
        reference_rope(q, positions, RopeConfig(10000.0), 8)


# -------------------------------------------------------------------------------------------------- windows and slots


def test_entries_by_hand():
    """Two features, gates of zero: plain means of the right halves of the right tokens."""
    config = dataclasses.replace(AttentionConfig.tiny(), hidden_size=4, qk_rope_head_dim=2, rms_norm_eps=1e-12)
    h = distinct_values((10, 4), 3)
    params = {
        "c.kv_proj.kernel": np.eye(4, dtype=np.float32),
        "c.gate_proj.kernel": np.zeros((4, 4), np.float32),
        "c.position_bias": np.zeros((4, 4), np.float32),
        "c.kv_norm.scale": np.array([2.0, 3.0], np.float32),
    }
    entries = entries_of(params, "c", h, config, ratio=4, head_dim=2, overlap=True)
    means = np.stack([h[0:4, 2:].mean(0), np.concatenate([h[0:4, :2], h[4:8, 2:]]).mean(0)])
    normed = means / np.sqrt((means**2).mean(-1, keepdims=True)) * np.array([[2.0, 3.0]], np.float32)
    # The only pair has frequency 1, so entry 1 is turned by an angle of 4, the position of its window's first token.
    cos, sin = np.cos(4.0), np.sin(4.0)
    turned = [normed[1, 0] * cos - normed[1, 1] * sin, normed[1, 0] * sin + normed[1, 1] * cos]
    np.testing.assert_allclose(entries, [normed[0], turned], rtol=1e-5)
    short = entries_of(params, "c", h[:3], config, ratio=4, head_dim=2, overlap=True)
    assert short.shape == (0, 2)


def test_visibility_by_hand():
    # Padding, a document of 5 in rows 1-5, one of 4 in rows 6-9; window of 3, entries of 2 tokens.
    segment_ids = np.array([[0, 2, 2, 2, 2, 2, 1, 1, 1, 1]])
    window, entry = reference_visibility(segment_ids, 3, 2)
    seen_rows = [[], [1], [1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [6], [6, 7], [6, 7, 8], [7, 8, 9]]
    # Document 1 starts at row 1: its windows (1, 2) and (3, 4) live in slots 0 and 1. Document 2: slots 3 and 4.
    seen_slots = [[], [], [0], [0], [0, 1], [0, 1], [], [3], [3], [3, 4]]
    assert [list(np.flatnonzero(row)) for row in window[0]] == seen_rows
    assert [list(np.flatnonzero(row)) for row in entry[0]] == seen_slots
    assert window.shape == (1, 10, 10)
    assert entry.shape == (1, 10, 5)
    assert reference_visibility(segment_ids, 3, 0)[1].shape == (1, 10, 0)


def test_visibility_takes_a_returning_id_for_a_new_document():
    window, entry = reference_visibility(np.array([[3, 3, 1, 1, 3, 3, 0, 3]]), 8, 2)
    assert [list(np.flatnonzero(row)) for row in window[0]] == [[0], [0, 1], [2], [2, 3], [4], [4, 5], [], [7]]
    assert [list(np.flatnonzero(row)) for row in entry[0]] == [[], [0], [], [1], [], [2], [], []]


# -------------------------------------------------------------------------------------------------------------- top-k


def test_top_k_rules():
    nan, inf = np.nan, np.inf
    scores = np.array(
        [
            [1.0, 3.0, 2.0, 3.0, 0.5],  # plain
            [2.0, 2.0, 2.0, 2.0, 2.0],  # ties go to the lower slot
            [-0.0, 0.0, -0.0, 0.0, -1.0],  # the two zeros are equal
            [nan, 1.0, nan, 2.0, nan],  # NaN never
            [9.0, 1.0, 9.0, 9.0, 2.0],  # invisible ones never
            [-inf, -inf, 5.0, -inf, inf],  # infinities are scores like others
        ],
        np.float32,
    )
    visible = np.ones(scores.shape, bool)
    visible[4] = [False, True, False, False, True]
    visible[5, 0] = False
    chosen = top_k(scores, visible, 3)
    assert chosen.dtype == jnp.int32
    np.testing.assert_array_equal(chosen, [[1, 2, 3], [0, 1, 2], [0, 1, 2], [1, 3, -1], [1, 4, -1], [1, 2, 4]])
    np.testing.assert_array_equal(top_k(scores, visible, 7)[:2, 4:], [[4, -1, -1]] * 2)
    assert top_k(np.zeros((3, 0), np.float32), np.zeros((3, 0), bool), 2).tolist() == [[-1, -1]] * 3


# ----------------------------------------------------------------------------------------------------- core attention


def core_problem(dtype: DTypeLike = np.float32):
    rng = np.random.default_rng(11)
    q, kv, entries = (rng.normal(size=shape).astype(dtype) for shape in ((5, 2, 4), (5, 4), (3, 4)))
    window_mask = np.tril(np.ones((5, 5), bool))
    entry_mask = rng.random((5, 3)) < 0.5
    window_mask[2], entry_mask[2] = False, False
    return q, kv, entries, window_mask, entry_mask


@jax.jit
def core_gradients(q, kv, entries, window_mask, entry_mask, sinks):
    """The output and the gradients of all operands, of a loss to which the log-sum-exp contributes where it is."""

    def loss(q, kv, entries, sinks):
        out, lse = core(q, kv, entries, window_mask, entry_mask, sinks)
        return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0)), out

    gradients, out = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(q, kv, entries, sinks)
    return out, gradients


def test_core_attention_by_hand():
    q, kv, entries, window_mask, entry_mask = core_problem()
    sinks = np.array([0.7, -1.2], np.float32)
    out, lse = core(q, kv, entries, window_mask, entry_mask, sinks)
    keys = np.concatenate([kv, entries])
    seen = np.concatenate([window_mask, entry_mask], axis=-1)
    for t in (0, 1, 3, 4):
        mass = np.exp(q[t] @ keys[seen[t]].T * 0.8)
        total = mass.sum(1, keepdims=True)
        np.testing.assert_allclose(lse[t], np.log(total[:, 0]), rtol=1e-5)
        expected = mass @ keys[seen[t]] / (total + np.exp(sinks)[:, None])
        np.testing.assert_allclose(out[t], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(out[2], 0.0)
    np.testing.assert_array_equal(lse[2], -np.inf)


def test_core_attention_sinks_at_infinity():
    problem = core_problem()
    none, lse = core(*problem, None)
    out, same = core(*problem, np.array([np.inf, -np.inf], np.float32))
    np.testing.assert_array_equal(out[:, 0], 0.0)
    np.testing.assert_array_equal(out[:, 1], none[:, 1])
    np.testing.assert_array_equal(same, lse)


@pytest.mark.parametrize("sinks", [[np.inf, -np.inf], [300.0, -300.0], [0.3, 2.0]])
@pytest.mark.parametrize("size", [1.0, 200.0])
def test_core_attention_gradients_are_finite(sinks, size):
    q, *others = core_problem()
    _, gradients = core_gradients(q * np.float32(size), *others, np.array(sinks, np.float32))
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    np.testing.assert_array_equal(gradients[0][2], 0.0)


def test_core_attention_gradients_are_right():
    with jax.enable_x64(True):
        q, kv, entries, window_mask, entry_mask = core_problem(np.float64)

        @jax.jit
        def outputs(q, kv, entries, sinks):
            out, lse = core(q, kv, entries, window_mask, entry_mask, sinks)
            return out, jnp.where(jnp.isfinite(lse), lse, 0.0)

        check_grads(outputs, (q, kv, entries, np.array([0.4, 1.5])), order=1, modes=["rev"], rtol=1e-6, atol=1e-6)


def test_core_attention_ignores_nan_that_is_not_seen():
    q, kv, entries, window_mask, entry_mask = core_problem()
    window_mask[:, 4] = False
    entry_mask[:, 1] = [True, False, False, False, False]
    no_sinks = np.full(2, -np.inf, np.float32)
    clean, _ = core_gradients(q, kv, entries, window_mask, entry_mask, no_sinks)
    kv[4], entries[1] = np.nan, np.nan
    out, gradients = core_gradients(q, kv, entries, window_mask, entry_mask, no_sinks)
    assert np.isnan(out[0]).all()
    np.testing.assert_array_equal(out[1:], clean[1:])
    assert np.isfinite(gradients[0][1:]).all()
