"""The three layers against the independent reference: outputs, all gradients, short rows, ties, dtypes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from foveal import CompressedAttention, Documents, LayerType
from foveal.geometry import WindowLayout
from foveal.nn import attention
from foveal.nn.indexer import IndexedCompressor
from foveal.ops import pooling, rope_table
from foveal.testing.generators import random_segment_ids
from foveal.testing.numerics import assert_close, assert_gradients_close, tolerance
from tests.nn.layers import (
    CONFIG,
    arrays,
    build,
    compiled_reference,
    document_runs,
    every_layer_type,
    problem,
    pure_layer,
)

CLEAR = 1e-5  # float32 index scores are this sure of their order


def agree(layer_type, params, x, segment_ids, cotangent, dtype=np.float32, **options):
    """Outputs and gradients within tolerance; False, and nothing checked, where rounding may choose the entries."""
    layer, reference = pure_layer(layer_type, dtype=dtype, **options), compiled_reference(layer_type, **options)
    if reference.margin(params, x, segment_ids) < CLEAR:
        return False
    want, want_gradients = reference.vjp(params, x, segment_ids, cotangent)
    got, got_gradients = layer.vjp(params, x, segment_ids, cotangent)
    assert got.dtype == dtype
    assert_close(got, want, dtype)
    assert_gradients_close(got_gradients, want_gradients, dtype)
    return True


# ----------------------------------------------------------------------------------------------------------- reference


@every_layer_type
def test_unpacked_rows_agree_with_the_reference(layer_type):
    judged = []
    for seed in range(4):
        params, x, cotangent = problem(layer_type, seed)
        judged.append(agree(layer_type, params, x, None, cotangent))
    assert sum(judged) >= 3


@every_layer_type
@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**20),
    layout=st.integers(0, 2**20),
    max_document=st.sampled_from([9, 20, 67]),
    padding=st.booleans(),
)
def test_packed_rows_agree_with_the_reference(layer_type, seed, layout, max_document, padding):
    params, x, cotangent = problem(layer_type, seed)
    ids = random_segment_ids(layout, *x.shape[:2], max_document=max_document, padding=padding)
    assume(agree(layer_type, params, x, ids, cotangent))


@every_layer_type
def test_documents_too_short_for_an_entry_agree_with_the_reference(layer_type):
    params, x, cotangent = problem(layer_type, 5)
    ids = random_segment_ids(5, *x.shape[:2], max_document=3)
    assert agree(layer_type, params, x, ids, cotangent)
    _, gradients = pure_layer(layer_type).vjp(params, x, ids, cotangent)
    for name in gradients:
        assert np.any(gradients[name]) == ("compressor" not in name), name


@every_layer_type
def test_every_gradient_is_alive_and_none_passes_the_choice_of_entries(layer_type):
    params, x, cotangent = problem(layer_type, 6)
    _, gradients = pure_layer(layer_type).vjp(params, x, None, cotangent)
    assert gradients.keys() == {*params, "x"}
    for name, gradient in gradients.items():
        assert np.any(gradient) == ("indexer" not in name), name


# ---------------------------------------------------------------------------------------------------- short and empty


@pytest.mark.parametrize(
    ("layer_type", "length"),
    [
        (LayerType.SLIDING, 1),
        *((LayerType.CSA, length) for length in (1, 2, 3, 7)),  # the last has one entry
        *((LayerType.HCA, length) for length in (1, 7)),
    ],
)
def test_short_rows(layer_type, length):
    """A row too short for a window still gives every parameter of the compressor a gradient: zeros."""
    params, x, cotangent = problem(layer_type, 7, length=length)
    assert agree(layer_type, params, x, None, cotangent)
    _, gradients = pure_layer(layer_type).vjp(params, x, None, cotangent)
    assert gradients.keys() == {*params, "x"}
    if length < (CONFIG.compress_ratio(layer_type) or 1):
        for name, gradient in gradients.items():
            assert gradient.shape == np.shape(x if name == "x" else params[name])
            if "compressor" in name:
                np.testing.assert_array_equal(gradient, 0.0, err_msg=name)


@pytest.mark.parametrize("shape", [(2, 0), (0, 9)])
@every_layer_type
def test_nothing_in_nothing_out(layer_type, shape):
    params, x, cotangent = problem(layer_type, 8, batch=shape[0], length=shape[1])
    for documents in (None, np.zeros(shape, np.int32)):
        output, gradients = pure_layer(layer_type).vjp(params, x, documents, cotangent)
        assert output.shape == x.shape
        assert gradients.keys() == {*params, "x"}
        for name, gradient in gradients.items():
            np.testing.assert_array_equal(gradient, 0.0, err_msg=name)


# ------------------------------------------------------------------------------------------------------------ selection


def test_select_all_agrees_with_the_reference():
    layers = [pure_layer(LayerType.CSA, select=select) for select in ("all", "top_k")]
    params, x, cotangent = problem(LayerType.CSA, 10)
    for ids in (np.ones(x.shape[:2], np.int32), random_segment_ids(10, *x.shape[:2], max_document=67)):
        assert agree(LayerType.CSA, params, x, ids, cotangent, select="all")
        everything, some = (layer.vjp(params, x, ids, cotangent)[0] for layer in layers)
        assert np.abs(everything - some).max() > 0.1


@pytest.mark.parametrize("layer_type", [LayerType.SLIDING, LayerType.HCA])
def test_select_is_without_effect_on_other_layers(layer_type):
    params, x, _ = problem(layer_type, 12)
    programs = [jax.make_jaxpr(pure_layer(layer_type, select=select).apply)(params, x) for select in ("top_k", "all")]
    assert str(programs[0]) == str(programs[1])


@pytest.mark.parametrize("kernel", ["scorer.weights_proj", "q_b_proj"])
def test_ties_go_to_the_lowest_entries_of_the_document(kernel):
    """All index scores are zero, of either sign: every choice is a tie, and the document's first entries win."""
    params, x, cotangent = problem(LayerType.CSA, 13)
    params[f"compressor.indexer.{kernel}.kernel"] *= 0.0
    ids = random_segment_ids(13, *x.shape[:2], max_document=67)
    for segment_ids in (ids, None):
        assert compiled_reference(LayerType.CSA).margin(params, x, segment_ids) == np.inf  # nothing but ties
        assert agree(LayerType.CSA, params, x, segment_ids, cotangent)


@functools.cache
def selected(dtype):
    """Compiled: the slots [B, S, K] that a CSA layer picks, seen where its indexer hands them over."""

    def select(params, x, segment_ids):
        seen, original = [], attention.best_entries
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "best_entries", lambda *a, **k: seen.append(original(*a, **k)) or seen[-1])
            layer.apply(params, x, segment_ids)
        return seen[0]

    compiled, layer = jax.jit(select), pure_layer(LayerType.CSA, dtype=dtype)
    return lambda params, x, segment_ids: np.asarray(compiled(layer.own_dtypes(params), x, segment_ids))


@pytest.mark.parametrize("near_ties", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_selection_is_the_best_up_to_rounding(dtype, near_ties):
    """Judged by float64 scores: nothing left out beats anything chosen by more than the dtype's rounding.

    Near ties: tokens that differ by a thousandth, and keys that RoPE does not tell apart.
    """
    params, x, _ = problem(LayerType.CSA, 14, dtype=dtype)
    if near_ties:
        x = (x[:1, :1].astype(np.float32) + 1e-3 * x.astype(np.float32)).astype(dtype)
        params["compressor.indexer.kv_norm.scale"][-CONFIG.qk_rope_head_dim :] = 0
    ids = np.array([[0] * 5 + [3] * 62, [1] * 26 + [2] * 41])
    slots, limit = selected(dtype)(params, x, ids), tolerance(dtype).of_peak
    regrets, regrets_of_first = [], []
    for b, start, stop in document_runs(x, ids):
        scores = compiled_reference(LayerType.CSA).index_scores(params, x[b, start:stop])
        scores = scores / np.abs(scores).max()
        for t in range(stop - start):
            visible = (t + 1) // CONFIG.csa_ratio
            count = min(CONFIG.index_topk, visible)
            chosen = slots[b, start + t, :count] - start // CONFIG.csa_ratio
            np.testing.assert_array_equal(slots[b, start + t, count:], -1)
            assert np.all(np.diff(chosen) > 0)
            assert np.all((chosen >= 0) & (chosen < visible))
            if count < visible:
                regrets.append(regret(scores[t, :visible], chosen))
                regrets_of_first.append(regret(scores[t, :visible], np.arange(count)))
    assert max(regrets) <= limit
    assert near_ties or max(regrets_of_first) > 10 * limit  # a wrong choice is found out


def regret(scores, chosen):
    """How much better the best entry left out is than the worst one chosen."""
    return np.delete(scores, chosen).max() - scores[chosen].min()


# --------------------------------------------------------------------------------------------------- dtypes, arguments


@every_layer_type
def test_bfloat16_layer(layer_type):
    """Compared with float64 on the same rounded values, all entries in use: a choice made in bfloat16 may differ."""
    params, x, cotangent = problem(layer_type, 15, dtype=jnp.bfloat16)
    ids = random_segment_ids(15, *x.shape[:2], max_document=67)
    select = "all" if layer_type == LayerType.CSA else "top_k"
    assert agree(layer_type, params, x, ids, cotangent, jnp.bfloat16, select=select)


@pytest.mark.parametrize("layer_type", [LayerType.CSA, LayerType.HCA])
def test_a_bfloat16_compressor_rounds_nothing_before_it_pools(layer_type, monkeypatch):
    """Values, gates and the indexer's head weights are sums of bfloat16 products, and stay in float32."""
    params, x, _ = problem(layer_type, 18, batch=1, length=19, dtype=jnp.bfloat16)
    layer = build(layer_type, params, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)

    def product(name):
        return x.astype(np.float64) @ params[f"{name}.kernel"].astype(np.float64)

    @jax.jit
    def windows():
        layout = WindowLayout.of(Documents.unpacked(1, 19), CONFIG.compress_ratio(layer_type))
        return layout, rope_table(layout.positions, CONFIG.compress_rope, CONFIG.qk_rope_head_dim)

    # Nothing else is compiled as one: XLA may leave out a rounding between two operations. Pooling needs not be seen.
    pooled, pool = [], jax.jit(pooling.pool, static_argnames="overlap")
    monkeypatch.setattr(pooling, "pool", lambda *a, **k: pooled.append(a[:2]) or pool(*a, **k))
    assert layer.compressor is not None
    modules = {"compressor": layer.compressor}
    if isinstance(layer.compressor, IndexedCompressor):
        modules["compressor.indexer"] = layer.compressor.indexer
        weights = layer.compressor.indexer.scorer(jnp.asarray(x))
        scaling = (CONFIG.index_n_heads * CONFIG.index_head_dim) ** -0.5
        assert weights.dtype == jnp.float32
        assert_close(weights, scaling * product("compressor.indexer.scorer.weights_proj"), np.float32)
    assert len(modules) == 1 + (layer_type == LayerType.CSA)
    for name, module in modules.items():
        assert module(jnp.asarray(x), *windows()).dtype == jnp.bfloat16
        for got, projection in zip(pooled.pop(), ("kv_proj", "gate_proj"), strict=True):
            assert got.dtype == jnp.float32
            assert_close(got, product(f"{name}.{projection}"), np.float32)


def test_norms_of_a_bfloat16_layer_are_float32():
    """Each of the layer's norms: the mean, the root, the scale and what comes out."""
    layer = build(LayerType.CSA, dtype=jnp.bfloat16)
    inner = layer.compressor
    assert isinstance(inner, IndexedCompressor)
    for norm in (layer.q_a_norm, layer.q_b_norm, layer.kv_norm, inner.kv_norm, inner.indexer.kv_norm):
        x = 3 * problem(LayerType.CSA, 19, dtype=jnp.bfloat16)[1][..., : norm.num_features]
        scale = np.ones(norm.num_features)
        if norm.scale is not None:
            scale = np.linspace(0.5, 1.5, norm.num_features, dtype=np.float32)
            norm.scale[...] = jnp.asarray(scale)
        wide = x.astype(np.float64)
        want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + CONFIG.rms_norm_eps) * scale
        got = norm(jnp.asarray(x))
        assert got.dtype == jnp.float32
        assert_close(got, want, np.float32)


def test_layer_index_and_layer_type_name_the_same_layer():
    config = dataclasses.replace(CONFIG, layer_types=(LayerType.HCA, LayerType.SLIDING, LayerType.CSA))
    for index, layer_type in enumerate(config.layer_types):
        for layer in (
            CompressedAttention(config, index, rngs=nnx.Rngs(0)),
            CompressedAttention(config, layer_type=str(layer_type), rngs=nnx.Rngs(0)),
        ):
            assert layer.layer_type is layer_type
            assert (layer.compressor is None) == (layer_type == LayerType.SLIDING)


def test_fresh_parameters():
    """Kernels are drawn with `initializer_range`, each its own; scales start at one, sinks and biases at zero."""
    config = dataclasses.replace(CONFIG, initializer_range=0.5)
    kernels = []
    for name, value in arrays(nnx.state(build(LayerType.CSA, config=config), nnx.Param)).items():
        value = np.asarray(value)
        if name.endswith(".kernel"):
            assert 0.4 < value.std() < 0.6, name
            kernels.append(tuple(value.ravel()[:8].tolist()))
        else:
            np.testing.assert_array_equal(value, 1.0 if name.endswith(".scale") else 0.0, err_msg=name)
    assert len(set(kernels)) == len(kernels) == 11


OTHER_SIZES: dict[str, Any] = {"hidden_size": 40, "num_attention_heads": 6, "head_dim": 24, "qk_rope_head_dim": 6}
OTHER_SIZES |= {"o_groups": 3, "o_lora_rank": 7, "index_n_heads": 3, "index_head_dim": 14, "index_topk": 3}
OTHER_SIZES |= {"q_lora_rank": 20, "sliding_window": 3, "csa_ratio": 1, "hca_ratio": 5, "rms_norm_eps": 1e-2}


@pytest.mark.slow
@pytest.mark.parametrize("layer_type", [LayerType.CSA, LayerType.HCA])
def test_other_sizes_agree_with_the_reference(layer_type):
    """Widths that are not equal by chance, another eps, an entry a token, windows of a length that is no power of 2."""
    params, x, cotangent = problem(layer_type, 17, batch=1, length=23, **OTHER_SIZES)
    assert agree(layer_type, params, x, None, cotangent, **OTHER_SIZES)
