"""RoPE: the published frequencies to the bit, which dims turn and how, and by what angle at a million tokens."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from foveal.config import AttentionConfig
from foveal.layers import LayerType, RopeConfig, YarnConfig
from foveal.ops import RopeTable, apply_rope, rope_frequencies, rope_table
from foveal.testing.generators import distinct_values
from foveal.testing.numerics import assert_close
from foveal.testing.reference import reference_rope, reference_rope_frequencies

FLASH = AttentionConfig.deepseek_v4_flash()
MAIN, COMPRESS = FLASH.rope, FLASH.compress_rope
SMALL_YARN = RopeConfig(160000.0, YarnConfig(16.0, 64, 8.0, 0.5))
RNG = np.random.default_rng(1)

rotate = jax.jit(apply_rope, static_argnames="inverse")
table_of = jax.jit(rope_table, static_argnums=(1, 2))


def rows(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32)[None]


def turned_by_hand(x: np.ndarray, positions: np.ndarray, frequency: np.ndarray) -> np.ndarray:
    """The definition in float64: pair i is dims (2 i, 2 i + 1) of the last 2 len(frequency), x is [B, T, ..., D]."""
    angle = positions.astype(np.float64)[..., None] * frequency.astype(np.float64)
    angle = angle.reshape(*angle.shape[:2], *(1,) * (x.ndim - 3), -1)
    out, lead = x.astype(np.float64), x.shape[-1] - 2 * len(frequency)
    for i in range(len(frequency)):
        a, b = x[..., lead + 2 * i].astype(np.float64), x[..., lead + 2 * i + 1].astype(np.float64)
        out[..., lead + 2 * i] = a * np.cos(angle[..., i]) - b * np.sin(angle[..., i])
        out[..., lead + 2 * i + 1] = a * np.sin(angle[..., i]) + b * np.cos(angle[..., i])
    return out


# -------------------------------------------------------------------------------------------------------- frequencies


def test_published_frequencies_of_the_compress_table():
    frequency = rope_frequencies(COMPRESS, 64)
    assert frequency.shape == (32,)
    assert frequency.dtype == np.float32
    expected = {
        0: 1.0, 1: 0.687656045, 2: 0.472870797, 8: 0.0500000007, 15: 0.00363553851, 16: 0.00226562493,
        17: 0.00139680132, 18: 8.49689706e-4, 19: 5.08081983e-4, 20: 2.96977785e-4, 21: 1.68179977e-4,
        22: 9.08678412e-5, 23: 4.54442306e-5, 24: 1.95312532e-5, 25: 5.37231244e-6, 28: 1.74692821e-6,
        31: 5.6805294e-7,
    }  # fmt: skip
    # Nine digits name one float32.
    np.testing.assert_array_equal(frequency[list(expected)], np.array(list(expected.values()), np.float32))
    ramp = [0.90625, 0.8125, 0.71875, 0.625, 0.53125, 0.4375, 0.34375, 0.25, 0.15625]
    plain = rope_frequencies(RopeConfig(COMPRESS.theta), 64)
    np.testing.assert_allclose(frequency / plain, [1.0] * 16 + ramp + [0.0625] * 7, rtol=2e-7)


def test_published_frequencies_of_the_main_table():
    frequency = rope_frequencies(MAIN, 64)
    np.testing.assert_array_equal(frequency[:3], np.array([1, 0.749894202, 0.562341332], np.float32))
    np.testing.assert_array_equal(frequency[-3:], np.array([2.37137385e-4, 1.7782794e-4, 1.33352145e-4], np.float32))


@pytest.mark.parametrize("preset", [AttentionConfig.deepseek_v4_flash, AttentionConfig.deepseek_v4_pro])
def test_every_bit_of_transformers_frequencies(preset):
    pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = preset()
    yarn = config.compress_rope.yarn
    assert yarn is not None
    theirs = modeling.DeepseekV4RotaryEmbedding(
        modeling.DeepseekV4Config(
            num_hidden_layers=1,
            layer_types=["sliding_attention"],
            head_dim=config.head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            rope_theta=config.rope.theta,
            compress_rope_theta=config.compress_rope.theta,
            rope_parameters={"rope_type": "yarn", **dataclasses.asdict(yarn)},
        )
    )
    assert theirs.main_attention_scaling == theirs.compress_attention_scaling == 1.0
    for rope, buffer in ((config.rope, theirs.main_inv_freq), (config.compress_rope, theirs.compress_inv_freq)):
        ours = rope_frequencies(rope, config.qk_rope_head_dim)
        np.testing.assert_array_equal(ours.view(np.int32), buffer.numpy().view(np.int32))


def test_yarn_stands_in_the_compress_table_alone():
    for config in (AttentionConfig.deepseek_v4_flash(), AttentionConfig.deepseek_v4_pro()):
        assert config.rope_for(LayerType.SLIDING) == RopeConfig(10000.0)
        for layer_type in (LayerType.CSA, LayerType.HCA):
            assert config.rope_for(layer_type) == RopeConfig(160000.0, YarnConfig(16.0, 65536, 32.0, 1.0))
    exact = 10000.0 ** (-2 * np.arange(32) / 64)
    np.testing.assert_allclose(rope_frequencies(MAIN, 64), exact, rtol=2e-7)


@hypothesis.given(
    theta=st.floats(1.5, 1e7),
    rope_dim=st.integers(1, 64).map(lambda n: 2 * n),
    yarn=st.none()
    | st.builds(
        YarnConfig, st.floats(1.0, 100.0), st.integers(16, 1 << 20), st.floats(8.0, 64.0), st.floats(0.25, 4.0)
    ),
)
def test_frequencies_agree_with_the_reference(theta, rope_dim, yarn):
    """Every table that can be configured, the ones whose ramp is empty or out of the table's range among them."""
    rope = RopeConfig(theta, yarn)
    np.testing.assert_allclose(rope_frequencies(rope, rope_dim), reference_rope_frequencies(rope, rope_dim), rtol=2e-6)


# ------------------------------------------------------------------------------------------------------------- tables


def test_angles_are_accurate_at_a_million_tokens():
    """A float32 angle of a million needs an honest reduction by pi; the product itself is what it is in float32.

    Nor is there YaRN's attention factor ("mscale"), which would lengthen every pair.
    """
    positions = np.array([[0, 1, 2, 127, 128, 65535, 65537, (1 << 20) - 1, 1 << 20, 999983, -1, 12345]], np.int32)
    positions = np.concatenate([positions, RNG.integers(0, 1 << 20, (1, 500), np.int32)], axis=1)
    for rope in (MAIN, COMPRESS):
        angle = (positions.astype(np.float32)[..., None] * rope_frequencies(rope, 64)).astype(np.float64)
        for function in (rope_table, table_of):
            table = function(jnp.asarray(positions), rope, 64)
            assert table.cos.dtype == table.sin.dtype == jnp.float32
            assert table.cos.shape == table.sin.shape == (1, 512, 32)
            np.testing.assert_allclose(table.cos, np.cos(angle), rtol=0, atol=5e-7)
            np.testing.assert_allclose(table.sin, np.sin(angle), rtol=0, atol=5e-7)


# ----------------------------------------------------------------------------------------------------------- rotation


@pytest.mark.parametrize("heads", [(), (3,)])
@pytest.mark.parametrize("rope", [RopeConfig(100.0), SMALL_YARN])
def test_trailing_interleaved_pairs_turn_and_the_rest_passes(heads, rope):
    x = distinct_values((2, 7, *heads, 14), 3)
    positions = np.array([[0, 1, 2, 3, 4, 5, 6], [5, 0, 40, 2, 2, -1, 9]], np.int32)
    actual = np.asarray(rotate(x, table_of(positions, rope, 8)))
    assert actual.dtype == np.float32
    np.testing.assert_array_equal(actual[..., :6], x[..., :6])
    assert_close(actual, turned_by_hand(x, positions, rope_frequencies(rope, 8)), np.float32)
    for b in range(2):
        assert_close(actual[b], reference_rope(x[b], positions[b], rope, 8), np.float32)
    np.testing.assert_array_equal(actual[0, 0], x[0, 0])  # position 0 does not turn


def test_all_dims_turn_where_there_are_no_others():
    x = distinct_values((1, 5, 8), 4)
    actual = apply_rope(jnp.asarray(x), table_of(rows(5), MAIN, 8))  # without jit, for once
    assert_close(actual, turned_by_hand(x, rows(5), rope_frequencies(MAIN, 8)), np.float32)


def half_split(x: jax.Array, table: RopeTable) -> jax.Array:
    """The layout of other models: pair i is dims (i, i + R / 2)."""
    half = table.cos.shape[-1]
    a, b = x[..., -2 * half : -half], x[..., -half:]
    turned = [a * table.cos - b * table.sin, a * table.sin + b * table.cos]
    return jnp.concatenate([x[..., : -2 * half], *turned], axis=-1)


WRONG = {
    "half-split pairs": lambda x, t: half_split(x, rope_table(t, SMALL_YARN, 8)),
    "another theta": lambda x, t: apply_rope(x, rope_table(t, dataclasses.replace(SMALL_YARN, theta=1e4), 8)),
    "no YaRN": lambda x, t: apply_rope(x, rope_table(t, dataclasses.replace(SMALL_YARN, yarn=None), 8)),
    "leading dims": lambda x, t: jnp.roll(apply_rope(jnp.roll(x, 8, axis=-1), rope_table(t, SMALL_YARN, 8)), -8, -1),
    "backwards": lambda x, t: apply_rope(x, rope_table(t, SMALL_YARN, 8), inverse=True),
    "one position late": lambda x, t: apply_rope(x, rope_table(t - 1, SMALL_YARN, 8)),
    "not at all": lambda x, t: x,
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_rotation_is_told_from_the_right_one(mistake):
    x = distinct_values((1, 9, 20), 5)
    expected = turned_by_hand(x, rows(9), rope_frequencies(SMALL_YARN, 8))
    assert_close(rotate(x, table_of(rows(9), SMALL_YARN, 8)), expected, np.float32)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_close(jax.jit(WRONG[mistake])(x, rows(9)), expected, np.float32)


def test_the_inverse_undoes_it():
    x = distinct_values((2, 6, 3, 70), 6)
    table = table_of(RNG.integers(0, 1 << 20, (2, 6), np.int32), COMPRESS, 64)
    for first in (False, True):
        turned = rotate(x, table, inverse=first)
        assert np.abs(turned - x).max() > 0.5
        assert_close(rotate(turned, table, inverse=not first), x, np.float32)


# ------------------------------------------------------------------------------------------------------------- dtypes


def test_bfloat16_turns_in_float32_and_is_rounded_once():
    x = jnp.asarray(distinct_values((2, 40, 3, 72), 11)).astype(jnp.bfloat16)
    table = table_of(RNG.integers(0, 5000, (2, 40), np.int32), COMPRESS, 64)
    for inverse in (False, True):
        actual = rotate(x, table, inverse=inverse)
        assert actual.dtype == jnp.bfloat16
        wide = rotate(x.astype(jnp.float32), table, inverse=inverse)
        np.testing.assert_array_equal(actual, wide.astype(jnp.bfloat16))
        np.testing.assert_array_equal(actual[..., :8], x[..., :8])
    # The same in bfloat16 throughout is another answer, so the above is not empty.
    narrow = RopeTable(*(t.astype(jnp.bfloat16) for t in table))
    assert (half := np.asarray(rotate(x, narrow)) != np.asarray(rotate(x, table))).mean() > 0.05, half.mean()


def test_derivatives_of_any_kind():
    """It is linear: rotated tangents, cotangents rotated back, whatever is mapped over whatever."""
    table, x = table_of(rows(3), MAIN, 4), np.arange(12, dtype=np.float32).reshape(1, 3, 4)

    def quartic(scale):
        return jnp.sum(apply_rope(x * scale, table) ** 4)

    def turn(x):
        return apply_rope(x, table)

    first = jax.jit(jax.grad(quartic))(1.0)
    for second in (jax.grad(jax.grad(quartic)), jax.hessian(quartic), jax.jacfwd(jax.grad(quartic))):
        np.testing.assert_allclose(jax.jit(second)(1.0), 3.0 * first, rtol=1e-5)  # of degree four in the scale
    pushed = jax.jit(lambda scale, tangent: jax.jvp(quartic, (scale,), (tangent,))[1])(1.0, 2.0)
    np.testing.assert_allclose(pushed, 2.0 * first, rtol=1e-5)
    matrix, other = (np.asarray(jax.jit(jacobian(turn))(x)) for jacobian in (jax.jacfwd, jax.jacrev))
    np.testing.assert_array_equal(matrix, other)
    np.testing.assert_allclose(np.einsum("btdaue,aue->btd", matrix, x), rotate(x, table), atol=1e-6)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (3, 1)])
def test_mapped_over_vectors_and_tables(axes):
    rng = np.random.default_rng(0)
    tables = [jax.tree.map(np.asarray, table_of(rng.integers(0, 50, (2, 3)), MAIN, 4)) for _ in range(5)]
    xs = rng.normal(size=(5, 2, 3, 4, 6)).astype(np.float32)
    x = xs[0] if axes[0] is None else np.moveaxis(xs, 0, axes[0])
    table = tables[0]
    if axes[1] is not None:
        table = jax.tree.map(lambda *parts: np.stack(parts, axes[1]), *tables)

    @jax.jit
    def mapped(x):
        got, pull = jax.vjp(lambda x: jax.vmap(apply_rope, axes)(x, table), x)
        return got, pull(got)[0]

    got, pulled = mapped(x)
    each = [(xs[0 if axes[0] is None else i], tables[0 if axes[1] is None else i]) for i in range(5)]
    np.testing.assert_array_equal(got, np.stack([rotate(*pair) for pair in each]))
    back = np.stack([rotate(np.asarray(got[i]), pair[1], inverse=True) for i, pair in enumerate(each)])
    want = back.sum(axis=0) if axes[0] is None else np.moveaxis(back, 0, axes[0])
    np.testing.assert_allclose(pulled, want, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("rope_dim", [-2, 0, 1, 7])
def test_an_odd_or_empty_rope_is_refused(unchecked_annotations, rope_dim):
    with pytest.raises(ValueError, match=f"^rope_dim: expected an (even int|int >= 2), got {rope_dim}$"):
        rope_frequencies(MAIN, rope_dim)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((2, 5, 6), id="too narrow"),
        pytest.param((2, 4, 8), id="other positions"),
        pytest.param((3, 5, 8), id="another batch"),
        pytest.param((1, 5, 8), id="one row, which would broadcast"),
    ],
)
def test_x_that_does_not_fit_the_table_is_refused(unchecked_annotations, shape):
    table = table_of(np.zeros((2, 5), np.int32), MAIN, 8)
    with pytest.raises(ValueError, match="x: expected"):
        apply_rope(jnp.zeros(shape), table)
