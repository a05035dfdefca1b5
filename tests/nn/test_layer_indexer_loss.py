"""A layer's indexer loss: what it is over, whom it teaches, and that the layer stays what it is."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from foveal import CompressedAttention, Documents, LayerType, Visibility, indexer_recall
from foveal.backends.chunked import Chunked
from foveal.nn.indexer import IndexedCompressor
from foveal.testing.generators import random_segment_ids
from foveal.testing.numerics import assert_gradients_close
from foveal.testing.parameters import get_params
from tests.nn.layers import CONFIG, build, every_layer_type

pytestmark = pytest.mark.slow
B, S = 2, 90
IDS = random_segment_ids(5, B, S, max_document=50)


def layer_and_x(layer_type: LayerType = LayerType.CSA) -> tuple[CompressedAttention, jax.Array]:
    """Eight times the initial parameters, so that weights are not all alike, and hidden states."""
    x = np.random.default_rng(1).normal(size=(B, S, CONFIG.hidden_size)).astype(np.float32)
    return jax.tree.map(lambda p: 8 * p, build(layer_type)), jnp.asarray(x)


@functools.partial(jax.jit, static_argnames=("graph", "select"))
def value_and_gradients(graph: Any, select: Any, state: Any, x: jax.Array, factor: jax.Array):
    def objective(state, x):
        out, loss = nnx.merge(graph, state)(x, jnp.asarray(IDS), select=select, return_indexer_loss=True)
        return jnp.sum(out**2) + factor * loss.total, (out, loss)

    return jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)(state, x)


def both(layer: CompressedAttention, x: jax.Array, select: Any, factor: float):
    """Output, loss, and gradients of the parameters and of x of sum(output ** 2) + factor loss."""
    graph, state = nnx.split(layer)
    (_, (out, loss)), (d_state, d_x) = value_and_gradients(graph, select, state, x, jnp.float32(factor))
    return out, loss, {**get_params(nnx.merge(graph, d_state)), "x": d_x}


@pytest.mark.parametrize("select", ["top_k", "all"])
def test_the_loss_teaches_the_indexer_and_nobody_else(select):
    layer, x = layer_and_x()
    out, loss, gradients = both(layer, x, select, 1.0)
    plain, _, without = both(layer, x, select, 0.0)
    np.testing.assert_array_equal(out, plain)
    alone = nnx.jit(lambda layer, x: layer(x, jnp.asarray(IDS), select=select))(layer, x)
    np.testing.assert_allclose(out, alone, rtol=1e-5, atol=1e-5 * np.abs(alone).max())
    assert loss.total > 0
    visibility = Visibility(Documents.from_segment_ids(IDS), CONFIG.sliding_window, CONFIG.csa_ratio)
    assert float(loss.count) == (np.asarray(visibility.entry_counts) > 0).sum()
    indexers = {name for name in gradients if "indexer" in name}
    assert len(indexers) >= 5
    for name, gradient in gradients.items():
        if name in indexers:
            assert np.any(gradient), name
            np.testing.assert_array_equal(without[name], 0.0, err_msg=name)
        else:
            np.testing.assert_allclose(gradient, without[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("layer_type", [LayerType.HCA, LayerType.SLIDING])
def test_other_layers_add_nothing(layer_type):
    layer, x = layer_and_x(layer_type)
    out, loss = nnx.jit(lambda layer, x: layer(x, return_indexer_loss=True))(layer, x)
    np.testing.assert_array_equal(out, nnx.jit(lambda layer, x: layer(x))(layer, x))
    assert (loss.total, loss.count) == (0.0, 0.0)


def test_an_indexer_that_agrees_has_nothing_to_learn():
    """Steps along the gradient alone bring the loss down: the selection is kept, as all entries are selected."""
    layer, x = layer_and_x()
    graph, params = nnx.split(layer)

    @jax.jit
    def step(params):
        def objective(params):
            return nnx.merge(graph, params)(x, select="all", return_indexer_loss=True)[1].mean

        value, gradients = jax.value_and_grad(objective)(params)
        return value, jax.tree.map(lambda p, g: p - 0.05 * jnp.sign(g) * jnp.abs(p).mean(), params, gradients)

    losses = []
    for _ in range(30):
        value, params = step(params)
        losses.append(float(value))
    assert losses[-1] < 0.7 * losses[0]


def test_loss_and_attention_are_over_the_same_entries():
    """With as many to select as there are, selected and all are one set."""
    layer, x = layer_and_x()
    other = both(layer, x, "all", 1.0)
    assert isinstance(layer.compressor, IndexedCompressor)
    layer.compressor.indexer.top_k = S
    one = both(layer, x, "top_k", 1.0)
    np.testing.assert_allclose(one[0], other[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(one[1].total, other[1].total, rtol=1e-5)
    assert_gradients_close(one[2], other[2], np.float32)


@every_layer_type
def test_recall_is_that_of_the_op_on_attention_to_all(layer_type):
    (layer, x), ids = layer_and_x(layer_type), jnp.asarray(IDS)
    recall = nnx.jit(lambda layer, x: layer.indexer_recall(x, ids))(layer, x)
    if not isinstance(layer.compressor, IndexedCompressor):
        assert (float(recall.found), float(recall.count)) == (0.0, 0.0)
        return
    seen: list[Any] = []

    class Watch(Chunked):
        """Attention as ever, whose request and log-sum-exp can be looked at."""

        def __call__(self, request):
            out, lse = super().__call__(request)
            seen.append((request, lse))
            return out, lse

    @nnx.jit
    def by_hand(layer, x):
        seen.clear()
        layer(x, ids, select="all", implementation=Watch())
        layer(x, ids, implementation=Watch())
        (everything, lse), (selected, _) = seen
        return indexer_recall(
            selected.indices, q=everything.q, entries=everything.entries, lse=lse, sinks=everything.sinks,
            visibility=everything.visibility,
        )  # fmt: skip

    expected = by_hand(layer, x)
    assert float(expected.count) > 100
    assert (float(recall.found), float(recall.count)) == (float(expected.found), float(expected.count))
    assert 0.0 < recall.mean < 1.0
