"""Bad calls are refused by name, before anything is computed; odd values that are legal do no harm."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from foveal import CompressedAttention, Documents, LayerType, WindowLayout, rope_table
from tests.nn.layers import CONFIG, build, every_layer_type, problem, pure_layer

pytestmark = pytest.mark.usefixtures("unchecked_annotations")

X = jax.ShapeDtypeStruct((2, 9, 64), jnp.float32)
IDS = np.ones((2, 9), np.int32)


@pytest.fixture(scope="module")
def layer():
    return build(LayerType.CSA)


def shaped(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("x", "kwargs", "message"),
    [
        (shaped(9, 64), {}, "x: expected floats [B, S, E] = (B, S, 64), got float32 of shape (9, 64)"),
        (shaped(1, 2, 9, 64), {}, "x: expected floats [B, S, E] = (B, S, 64), got float32 of shape (1, 2, "),
        (shaped(2, 9, 63), {}, "x: expected floats [B, S, E] = (B, S, 64), got float32 of shape (2, 9, 63)"),
        (shaped(2, 64, 9), {}, "x: expected floats [B, S, E] = (B, S, 64), got float32 of shape (2, 64, 9)"),
        (shaped(2, 9, 64, dtype=jnp.int32), {}, "x: expected floats [B, S, E] = (B, S, 64), got int32 of shape"),
        (shaped(2, 9, 64, dtype=bool), {}, "x: expected floats [B, S, E] = (B, S, 64), got bool of shape"),
        (X, {"segment_ids": IDS[0]}, "segment_ids: expected rank 2, got shape (9,)"),
        (X, {"segment_ids": IDS.T}, "segment_ids: expected [B, S] = (2, 9), got shape (9, 2)"),
        (X, {"segment_ids": IDS[:1]}, "segment_ids: expected [B, S] = (2, 9), got shape (1, 9)"),
        (X, {"segment_ids": IDS[:, :8]}, "segment_ids: expected [B, S] = (2, 9), got shape (2, 8)"),
        (X, {"segment_ids": IDS.astype(np.float32)}, "segment_ids: expected integers, got float32"),
        (X, {"segment_ids": IDS.astype(bool)}, "segment_ids: expected integers, got bool"),
        (X, {"documents": Documents.unpacked(2, 8)}, "documents: expected [B, S] = (2, 9), got (2, 8)"),
        (X, {"documents": Documents.unpacked(9, 2)}, "documents: expected [B, S] = (2, 9), got (9, 2)"),
        (X, {"documents": Documents.continuing([3, 4], [9, 8], 9)}, "documents: expected documents without first_row"),
        (X, {"segment_ids": IDS, "documents": Documents.unpacked(2, 9)}, "documents: expected not both"),
        (X, {"select": "some"}, 'select: expected "top_k" or "all", got \'some\''),
        (X, {"select": None}, 'select: expected "top_k" or "all", got None'),
        (X, {"implementation": "flash"}, "implementation: expected None or one of "),
    ],
)
def test_bad_calls_are_refused_by_name(layer, x, kwargs, message):
    """Abstract x: nothing can have been computed by the time the answer comes."""
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        jax.eval_shape(lambda x: layer(x, **kwargs), x)


@every_layer_type
def test_rows_of_a_longer_row_need_a_cache(layer_type):
    one = build(layer_type)
    documents = Documents.continuing([3, 4], [9, 8], 9)
    for call in (one, one.indexer_recall):
        with pytest.raises(ValueError, match=r"^documents: expected documents without first_row"):
            call(jnp.zeros(X.shape), documents=documents)


def test_modules_alone_refuse_what_does_not_fit(layer):
    """Tables and layouts of other rows would be broadcast."""
    compressor, x = layer.compressor, jnp.zeros((2, 9, 64))
    layout, other = (WindowLayout.of(Documents.unpacked(batch, 9), 4) for batch in (2, 1))
    table, narrow = (rope_table(part.positions, CONFIG.compress_rope, 16) for part in (layout, other))
    (kv, gate), latent = compressor.project(x), jnp.zeros((2, 9, 32))
    calls = {
        "layout": [lambda: compressor(x, None, table), lambda: compressor.pool(kv, gate, None, table)],
        "table": [lambda: compressor(x, layout, None)],
        "kv": [lambda: compressor(x, other, narrow), lambda: compressor.pool(kv[:, :8], gate[:, :8], layout, table)],
        "x": [
            lambda: compressor(x, layout, narrow),
            lambda: layer.compressor.indexer.queries(x, latent, narrow),
        ],
    }
    for name, wrong in calls.items():
        for call in wrong:
            with pytest.raises(ValueError, match=rf"^{name}: expected"):
                call()


@pytest.mark.parametrize("call", [lambda f, x: f(jnp.zeros(x.shape, x.dtype)), jax.eval_shape], ids=["eager", "traced"])
def test_negative_ids_are_refused_where_they_are_concrete(layer, call):
    """Also where only x is traced, as in a jitted function that closes over its documents."""
    with pytest.raises(
        ValueError, match=re.escape("segment_ids: expected no negative id (0 is padding), got -1 at (0, 0)")
    ):
        call(lambda x: layer(x, -IDS), X)


@pytest.mark.parametrize(
    ("name", "value"), [("segment_ids", "packed"), ("documents", IDS), ("segment_ids", Documents.unpacked(2, 9))]
)
def test_the_wrong_kind_of_thing_is_refused_by_name(layer, name, value):
    """Segment ids where prepared documents belong, and the other way round, and a word."""
    with pytest.raises((ValueError, TypeError), match=f"^{name}: expected"):
        jax.eval_shape(lambda x: layer(x, **{name: value}), X)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "layer_index, layer_type: expected exactly one of them, got None and None"),
        (
            {"layer_index": 1, "layer_type": "sliding_attention"},
            "layer_index, layer_type: expected exactly one of them",
        ),
        ({"layer_index": 3}, "layer_index: expected 0 <= layer_index < 3"),
        ({"layer_index": -1}, "layer_index: expected 0 <= layer_index < 3"),
        ({"layer_index": 1.0}, "layer_index: expected an int, got 1.0"),
        ({"layer_index": True}, "layer_index: expected an int, got True"),
        ({"layer_type": "full_attention"}, "layer_type: expected one of 'sliding_attention', "),
        ({"layer_type": 1}, "layer_type: expected one of 'sliding_attention', "),
    ],
)
def test_bad_constructions_are_refused_by_name(kwargs, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        CompressedAttention(CONFIG, **kwargs, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "ids", [IDS.astype(np.int8), IDS.astype(np.uint8), IDS.astype(np.uint32), IDS.astype(np.int64)]
)
def test_any_integer_will_do_for_segment_ids(layer, ids):
    assert jax.eval_shape(lambda x: layer(x, ids), X).shape == X.shape


def test_non_finite_sinks():
    """-inf is no sink and +inf takes everything: outputs and gradients stay finite, and other heads do not notice."""
    params, x, cotangent = problem(LayerType.CSA, 20)
    layer = pure_layer(LayerType.CSA)

    def run(*sinks):
        return layer.vjp({**params, "sinks": np.array(sinks, np.float32)}, x, None, cotangent)

    for sinks in ([np.inf, -np.inf, 0.0, 1.0], [np.inf] * 4, [-np.inf] * 4):
        output, gradients = run(*sinks)
        assert np.isfinite(output).all()
        assert all(np.isfinite(gradient).all() for gradient in gradients.values())
    np.testing.assert_array_equal(run(*[np.inf] * 4)[0], 0.0)
    np.testing.assert_allclose(run(*[-np.inf] * 4)[0], run(*[-1e4] * 4)[0], rtol=1e-6, atol=1e-6)
    assert np.abs(run(*[-np.inf] * 4)[0] - run(*[0.0] * 4)[0]).max() > 1e-3


@pytest.mark.parametrize("given", [np.ndarray.tolist, lambda a: tuple(map(tuple, a.tolist())), jnp.asarray])
def test_lists_of_segment_ids_say_what_arrays_say(layer, given):
    assert_same_program(lambda x: layer(x, given(IDS)), lambda x: layer(x, IDS))


@pytest.mark.parametrize("given", [np.ndarray.tolist, lambda a: tuple(a.tolist()), jnp.asarray, lambda a: list(a)])
def test_lists_of_lengths_say_what_arrays_say(layer, given):
    cache, lengths = layer.init_cache(2, 20), np.array([9, 3])
    for call in (layer.prefill, layer.decode):
        assert_same_program(lambda x, c=call: c(cache, x, given(lengths)), lambda x, c=call: c(cache, x, lengths))


def assert_same_program(call, expected):
    """The same operations on the same constants, by tracing alone."""
    made, wanted = (jax.make_jaxpr(function)(X) for function in (call, expected))
    assert str(made) == str(wanted)
    for constant, other in zip(made.consts, wanted.consts, strict=True):
        np.testing.assert_array_equal(constant, other)
