"""The whole reference layer: against transformers, packed rows, and wrong answers that must not pass for right ones."""

import dataclasses
import functools
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import DTypeLike

from foveal.config import AttentionConfig
from foveal.layers import LayerType, RopeConfig, YarnConfig
from foveal.testing.generators import random_hidden, random_params
from foveal.testing.reference import reference_attention, reference_index_scores, reference_visibility

CONFIG = AttentionConfig(
    hidden_size=48,
    num_attention_heads=4,
    head_dim=24,
    qk_rope_head_dim=8,
    q_lora_rank=20,
    o_groups=2,
    o_lora_rank=12,
    sliding_window=6,
    layer_types=(LayerType.SLIDING, LayerType.CSA, LayerType.HCA),
    csa_ratio=4,
    hca_ratio=8,
    index_n_heads=6,
    index_head_dim=16,
    index_topk=3,
    rope=RopeConfig(theta=10000.0),
    # Chosen so that pair 0 keeps its frequency, pairs 2 and 3 have theirs divided and pair 1 lies on the ramp between.
    compress_rope=RopeConfig(
        theta=160000.0,
        yarn=YarnConfig(factor=16.0, original_max_position_embeddings=64, beta_fast=8.0, beta_slow=0.5),
    ),
    # Not the default, so that an implementation with a constant of its own is found out.
    rms_norm_eps=1e-5,
)
LAYER_TYPES = tuple(LayerType)
LENGTHS = (1, 3, 16, 37)
SEED = 7


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Many small programs, each run once or twice: nearly all of the time goes into compiling them."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def small_problem(layer_type: LayerType, length: int, batch: int = 1, dtype: DTypeLike = np.float32):
    params = random_params(CONFIG, layer_type, SEED, dtype)
    return params, random_hidden(SEED, batch, length, CONFIG.hidden_size, dtype)


def relative_error(actual, expected) -> float:
    """max|difference| / max|expected|, and the plain difference where everything expected is zero."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    size = np.abs(expected).max(initial=0.0)
    return float(np.abs(actual - expected).max(initial=0.0) / (size if size > 0 else 1.0))


# ------------------------------------------------------------------------------------------------------- transformers


def transformers_attention(
    layer_type: LayerType, params, x: np.ndarray, cotangent: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Output and gradients (of x under "x", and of every parameter, in torch's names and layouts) of transformers."""
    import torch

    from foveal.testing.peer import peer_of_params

    peer = peer_of_params(CONFIG, layer_type, params)
    hidden = torch.from_numpy(x).requires_grad_()
    output = peer(hidden)
    output.backward(torch.from_numpy(cotangent))
    leaves = {**dict(peer.module.named_parameters()), "x": hidden}
    gradients = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return output.detach().numpy(), {name: gradient.numpy() for name, gradient in gradients.items()}


@functools.partial(jax.jit, static_argnames="layer_type")
def reference_vjp(params, x, cotangent, *, layer_type: LayerType):
    output, vjp = jax.vjp(lambda params, x: reference_attention(params, CONFIG, layer_type, x), params, x)
    return output, *vjp(cotangent)


def reference_with_gradients(layer_type: LayerType, params, x: np.ndarray, cotangent: np.ndarray):
    """The same as `transformers_attention` from the reference, in our names and layouts."""
    output, gradients, x_gradient = reference_vjp(params, x, cotangent, layer_type=layer_type)
    return np.asarray(output), {**{name: np.asarray(g) for name, g in gradients.items()}, "x": np.asarray(x_gradient)}


@jax.jit
def index_scores(params, h):
    low_rank = h @ params["q_a_proj.kernel"]
    q_residual = low_rank / jnp.sqrt(jnp.mean(low_rank**2, axis=-1, keepdims=True) + CONFIG.rms_norm_eps)
    return reference_index_scores(params, CONFIG, h, q_residual * params["q_a_norm.scale"].reshape(1, -1))


def assert_selection_is_clear(params, x: np.ndarray) -> None:
    """No query's choice of entries hangs on rounding or on a tie, which torch breaks in an unspecified way."""
    for t, row in enumerate(np.asarray(index_scores(params, x[0]))):
        best = np.sort(row[: (t + 1) // CONFIG.csa_ratio])[::-1]
        if len(best) > CONFIG.index_topk:
            assert best[CONFIG.index_topk - 1] - best[CONFIG.index_topk] > 1e-4


def compare_with_transformers(layer_type, length, dtype, *, output_tolerance, gradient_tolerance):
    params, x = small_problem(layer_type, length, dtype=dtype)
    cotangent = np.random.default_rng(length).normal(size=x.shape).astype(dtype)
    if layer_type == LayerType.CSA:
        assert_selection_is_clear(params, x)
    expected, expected_gradients = transformers_attention(layer_type, params, x, cotangent)
    from foveal.testing.peer import peer_layout, peer_name

    actual, gradients = reference_with_gradients(layer_type, params, x, cotangent)
    actual_gradients = {peer_name(name): peer_layout(name, gradient) for name, gradient in gradients.items()}
    assert actual.dtype == expected.dtype == dtype
    np.testing.assert_allclose(actual, expected, rtol=output_tolerance, atol=output_tolerance)
    assert actual_gradients.keys() == expected_gradients.keys()
    errors = {name: relative_error(actual_gradients[name], expected_gradients[name]) for name in expected_gradients}
    assert max(errors.values()) <= gradient_tolerance, errors


@pytest.fixture
def modeling() -> ModuleType:
    pytest.importorskip("torch")
    return pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")


@pytest.fixture
def modeling_float64(modeling: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """transformers' module in float64: it asks for float32 by name in places, so the name is made to mean float64."""
    import torch
    from transformers import modeling_rope_utils

    class Float64Torch:
        float32 = float = torch.float64

        def __getattr__(self, name: str):
            return getattr(torch, name)

    monkeypatch.setattr(modeling, "torch", Float64Torch())
    monkeypatch.setattr(modeling_rope_utils, "torch", Float64Torch())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    return modeling


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("layer_type", LAYER_TYPES)
@pytest.mark.usefixtures("modeling")
def test_matches_transformers_float32(layer_type, length):
    compare_with_transformers(layer_type, length, np.float32, output_tolerance=1e-5, gradient_tolerance=1e-5)


@pytest.mark.parametrize("length", [3, 37])
@pytest.mark.parametrize("layer_type", LAYER_TYPES)
@pytest.mark.usefixtures("modeling_float64")
def test_matches_transformers_float64(layer_type, length):
    with jax.enable_x64(True):
        compare_with_transformers(layer_type, length, np.float64, output_tolerance=1e-11, gradient_tolerance=1e-11)


# ------------------------------------------------------------------------------------------------------ wrong answers


def drop_yarn(config: AttentionConfig) -> AttentionConfig:
    return dataclasses.replace(config, compress_rope=dataclasses.replace(config.compress_rope, yarn=None))


SLIDING, CSA, HCA = LAYER_TYPES
# What is changed, and the layers that it must show in.
WRONG_CONFIGS = {
    "window one wider": (lambda c: dataclasses.replace(c, sliding_window=c.sliding_window + 1), {SLIDING, CSA, HCA}),
    "one entry more": (lambda c: dataclasses.replace(c, index_topk=c.index_topk + 1), {CSA}),
    "no YaRN": (drop_yarn, {CSA, HCA}),
    "main RoPE table everywhere": (lambda c: dataclasses.replace(c, compress_rope=c.rope), {CSA, HCA}),
    "compress RoPE table everywhere": (lambda c: dataclasses.replace(c, rope=c.compress_rope), {SLIDING}),
    "another eps": (lambda c: dataclasses.replace(c, rms_norm_eps=1e-3), {SLIDING, CSA, HCA}),
}
WRONG_PARAMS = {
    "no sinks": ("sinks", lambda v: np.full_like(v, -np.inf)),
    "position bias upside down": ("compressor.position_bias", lambda v: v[::-1]),
    "position bias dropped": ("compressor.position_bias", np.zeros_like),
    "halves swapped": ("compressor.kv_proj.kernel", lambda v: np.roll(v, v.shape[1] // 2, axis=1)),
    "index weights dropped": ("compressor.indexer.scorer.weights_proj.kernel", np.ones_like),
    "output groups swapped": ("o_a_proj.kernel", lambda v: v[::-1]),
}


def exceeds_tolerance(actual, expected) -> bool:
    return not np.allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer_type", LAYER_TYPES)
def test_wrong_answers_exceed_the_tolerance(layer_type):
    params, x = small_problem(layer_type, 37)
    right = reference_attention(params, CONFIG, layer_type, x)
    assert 0.3 < float(jnp.std(right)) < 3.0
    for name, (change, affected) in WRONG_CONFIGS.items():
        if layer_type in affected:
            wrong = reference_attention(params, change(CONFIG), layer_type, x)
            assert exceeds_tolerance(wrong, right), name
    for name, (key, change) in WRONG_PARAMS.items():
        if key in params:
            wrong = reference_attention({**params, key: change(params[key])}, CONFIG, layer_type, x)
            assert exceeds_tolerance(wrong, right), name
    assert exceeds_tolerance(right[:, ::-1], right)
    assert exceeds_tolerance(np.roll(right, 1, axis=-1), right)


def test_every_gradient_is_alive_where_it_should_be():
    for layer_type in LAYER_TYPES:
        params, x = small_problem(layer_type, 37)
        _, gradients = reference_with_gradients(layer_type, params, x, x)
        del gradients["x"]
        for name, gradient in gradients.items():
            # No gradient passes through the selection; everything else must be reached.
            assert bool(jnp.any(gradient != 0)) == ("indexer" not in name), name


# --------------------------------------------------------------------------------------------- packing and visibility


@pytest.mark.parametrize("layer_type", LAYER_TYPES)
def test_dependence_of_outputs_on_inputs_is_the_visibility(layer_type):
    """Poisons one input row after the other: the outputs turned NaN are those that see it, raw or inside an entry."""
    ratio = {LayerType.SLIDING: 0, LayerType.CSA: CONFIG.csa_ratio, LayerType.HCA: CONFIG.hca_ratio}[layer_type]
    segment_ids = np.array([[0, 0, 0] + [4] * 19 + [2] * 2 + [0] + [4] * 9])
    length = segment_ids.shape[1]
    params, x = small_problem(layer_type, length)
    window, entry = reference_visibility(segment_ids, CONFIG.sliding_window, ratio)
    reach = window[0].copy()
    for start, stop in ((3, 22), (22, 24), (25, 34)):
        for first in range(start, stop - ratio + 1, ratio) if ratio else ():
            oldest = max(start, first - ratio) if layer_type == LayerType.CSA else first
            reach[:, oldest : first + ratio] |= entry[0, :, first // ratio, None]
    # Queries right behind a poisoned token see it: only rows out of reach of the window tell the two apart.
    assert ratio == 0 or reach.sum() > window.sum()
    poisoned = np.where(np.eye(length, dtype=bool)[:, None, :, None], np.float32(np.nan), x[None])
    one = functools.partial(reference_attention, params, CONFIG, layer_type, segment_ids=segment_ids, select="all")
    outputs = jax.jit(jax.vmap(one))(poisoned)[:, 0]
    np.testing.assert_array_equal(np.isnan(np.asarray(outputs)).any(-1).T, reach)


@pytest.mark.parametrize("layer_type", LAYER_TYPES)
def test_packed_documents_and_padding(layer_type):
    segment_ids = np.array([[0, 0] + [1] * 9 + [2] * 2 + [0], [5] * 9 + [3, 3] + [0] * 3])
    params, x = small_problem(layer_type, 14, batch=2)
    x[segment_ids == 0] = np.inf
    output = reference_attention(params, CONFIG, layer_type, x, segment_ids)
    assert output.shape == x.shape
    assert output.dtype == jnp.float32
    np.testing.assert_array_equal(output[segment_ids == 0], 0.0)
    for b, start, stop in ((0, 2, 11), (0, 11, 13), (1, 0, 9)):
        alone = reference_attention(params, CONFIG, layer_type, x[b : b + 1, start:stop])
        np.testing.assert_array_equal(output[b, start:stop], alone[0])
    gradient = jax.grad(lambda x: jnp.sum(reference_attention(params, CONFIG, layer_type, x, segment_ids)))(x)
    assert bool(jnp.all(jnp.isfinite(gradient)))
    np.testing.assert_array_equal(gradient[segment_ids == 0], 0.0)


def test_all_padding_is_zero():
    params, x = small_problem(LayerType.CSA, 9)
    np.testing.assert_array_equal(reference_attention(params, CONFIG, LayerType.CSA, x, np.zeros((1, 9), int)), 0.0)


def test_select_all_is_top_k_with_enough_k():
    params, x = small_problem(LayerType.CSA, 37)
    generous = dataclasses.replace(CONFIG, index_topk=9)
    everything = reference_attention(params, CONFIG, LayerType.CSA, x, select="all")
    np.testing.assert_array_equal(everything, reference_attention(params, generous, LayerType.CSA, x))
    assert exceeds_tolerance(everything, reference_attention(params, CONFIG, LayerType.CSA, x))


# -------------------------------------------------------------------------------------------------- dtypes and errors


@pytest.mark.parametrize("layer_type", LAYER_TYPES)
def test_float64_throughout(layer_type):
    with jax.enable_x64(True):
        params, x = small_problem(layer_type, 9, dtype=np.float64)
        exact = reference_attention(params, CONFIG, layer_type, x)
        narrow = {name: value.astype(np.float32) for name, value in params.items()}
        assert exact.dtype == jnp.float64
        for dtype, computed in ((None, jnp.float32), (np.float64, jnp.float64)):
            layer = functools.partial(reference_attention, config=CONFIG, layer_type=layer_type, dtype=dtype)
            assert jax.eval_shape(layer, narrow, x=x.astype(np.float32)).dtype == computed
        jaxpr = jax.make_jaxpr(lambda p, x: reference_attention(p, CONFIG, layer_type, x))(params, x)
        assert "f64[" in str(jaxpr)
        assert "f32[" not in str(jaxpr)
    single = reference_attention(params, CONFIG, layer_type, x)
    assert single.dtype == jnp.float32
    assert 1e-9 < relative_error(single, exact) < 1e-5


def test_bfloat16_inputs_are_computed_in_float32():
    params = random_params(CONFIG, LayerType.CSA, SEED, jnp.bfloat16)
    assert params["sinks"].dtype == np.float32
    assert params["kv_proj.kernel"].dtype == jnp.bfloat16
    x = random_hidden(SEED, 1, 9, CONFIG.hidden_size, jnp.bfloat16)
    wide = {name: value.astype(np.float32) for name, value in params.items()}
    np.testing.assert_array_equal(
        reference_attention(params, CONFIG, LayerType.CSA, x),
        reference_attention(wide, CONFIG, LayerType.CSA, x.astype(np.float32)),
    )


def test_bad_arguments_are_named():
    params, x = small_problem(LayerType.CSA, 9)
    with pytest.raises(ValueError, match="select: expected"):
        reference_attention(params, CONFIG, LayerType.CSA, x, select="some")
    with pytest.raises(ValueError, match=r"segment_ids: expected shape \(1, 9\), got \(9,\)"):
        reference_attention(params, CONFIG, LayerType.CSA, x, np.ones(9, int))
    with pytest.raises(ValueError, match="dtype: expected float32 or float64, got int32"):
        reference_attention(params, CONFIG, LayerType.CSA, x, dtype=np.int32)
    with pytest.raises(ValueError, match="dtype: float64 needs"):
        reference_attention(params, CONFIG, LayerType.CSA, x, dtype=np.float64)
