"""A whole CSA layer with its indexer's loss, forward and backward: memory grows as the rows do."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from foveal import AttentionConfig, LayerType
from tests.nn.layers import build
from tests.support.programs import array_sizes

CONFIG = dataclasses.replace(AttentionConfig.tiny(), index_topk=64, sliding_window=32)


def program(length: int, select: Any):
    """The gradient of a sum of output and loss, traced for [1, length, E]."""
    graph, state = nnx.split(nnx.eval_shape(lambda: build(LayerType.CSA, config=CONFIG)))

    def objective(state, x):
        out, loss = nnx.merge(graph, state)(x, select=select, return_indexer_loss=True)
        return jnp.sum(out**2) + loss.mean

    x = jax.ShapeDtypeStruct((1, length, CONFIG.hidden_size), jnp.float32)
    return jax.jit(jax.grad(objective, argnums=(0, 1))).trace(state, x)


@pytest.mark.slow
@pytest.mark.parametrize("select", ["top_k", "all"])
def test_temporaries_are_linear_in_the_rows(select):
    """From 8192 to 65536: eight times the memory, where a score for each query and entry would take 64 times."""
    found = {}
    for length in (8192, 65536):
        traced = program(length, select)
        analysis = traced.lower().compile().memory_analysis()
        assert analysis is not None
        found[length] = analysis.temp_size_in_bytes
        assert max(array_sizes(traced.jaxpr.jaxpr)) <= 2 * length * CONFIG.num_attention_heads * CONFIG.head_dim
    assert found[65536] <= 8.5 * found[8192]
