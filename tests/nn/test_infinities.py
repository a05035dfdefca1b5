"""Layers without jit under `jax_debug_infs`, which ends a run at any infinity: none arises that nobody put in."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from foveal import CompressedAttention, LayerType
from foveal.testing.generators import random_hidden, random_params
from foveal.testing.numerics import assert_close
from tests.nn.layers import CONFIG, build, pure_layer

LENGTH = 21
IDS = jnp.array([[0] * 2 + [1] * 11 + [2] * 6 + [0] * 2, [0] * LENGTH, [3] * LENGTH])
X = jnp.asarray(random_hidden(0, 3, LENGTH, CONFIG.hidden_size))


@pytest.fixture(autouse=True)
def infinities_end_a_run() -> Iterator[None]:
    with jax.debug_infs(True):
        yield


def layer_of(layer_type: LayerType) -> CompressedAttention:
    """With sinks that take their share."""
    return build(layer_type, random_params(CONFIG, layer_type, 0))


def test_an_infinity_ends_a_run():
    with pytest.raises(FloatingPointError, match="inf"):
        jnp.log(jnp.zeros(1))


@pytest.mark.parametrize(
    ("layer_type", "implementation"),
    [(LayerType.CSA, "chunked"), pytest.param(LayerType.HCA, "dense", marks=pytest.mark.slow)],
)
def test_packed_rows_with_padding_forward_and_backward(layer_type, implementation):
    """And a row of nothing but padding; the indexer's loss with them. A CSA layer does all that the others do."""
    graph, params = nnx.split(layer_of(layer_type))

    def loss(params, x):
        layer = nnx.merge(graph, params)
        out, of_indexer = layer(x, IDS, return_indexer_loss=True, implementation=implementation)
        return (out**2).sum() + of_indexer.mean, out

    (value, out), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, X)
    assert value > 0
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))
    # Without jit every check of values speaks as well: the answer is the same.
    want = pure_layer(layer_type).forward(random_params(CONFIG, layer_type, 0), X, IDS)
    assert_close(out, want, np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("layer_type", "mapped"), [(LayerType.HCA, False), (LayerType.CSA, True)])
def test_prefill_and_decode(layer_type, mapped):
    """From nothing to several windows, rows of no token among them; also mapped over single rows."""
    layer = layer_of(layer_type)
    lengths = jnp.array([0, 3, 4])

    if mapped:
        cache = jax.vmap(lambda _: layer.init_cache(1, 32))(lengths)
        of_row = jax.vmap(lambda cache, x, length: layer.decode(cache, x[None], length[None]))
    else:
        cache, of_row = layer.init_cache(3, 32), layer.decode
    out = X
    for first in range(0, 12, 4):
        out, cache = of_row(cache, X[:, first : first + 4], lengths)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(np.ravel(cache.lengths), 3 * lengths)
