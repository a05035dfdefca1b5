"""Layers and the reference as functions that are compiled once for all tests of a worker."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from foveal import AttentionConfig, CompressedAttention, Documents, LayerType
from foveal.testing.generators import random_hidden, random_params
from foveal.testing.parameters import set_params
from foveal.testing.reference import reference_attention, reference_index_scores

CONFIG = AttentionConfig.tiny()
LAYER_TYPES = tuple(LayerType)
# Logical axes of parameters.
AXES = {"embed", "q_lora", "heads", "kv", "window", "norm", "index_heads", "o_groups", "group_heads", "o_lora"}
BATCH, LENGTH = 2, 67  # no multiple of a window, and longer than anything that is cut from it
# For what is compiled often and runs seldom.
UNOPTIMIZED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
every_layer_type = pytest.mark.parametrize("layer_type", LAYER_TYPES)


def build(layer_type, params=None, config=CONFIG, **options) -> CompressedAttention:
    layer = CompressedAttention(config, layer_type=layer_type, rngs=nnx.Rngs(0), **options)
    if params is not None:
        set_params(layer, params)
    return layer


def by_name(state) -> dict[str, nnx.Variable]:
    """The variables of a state, or of a module's gradients, by dotted path."""
    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def arrays(state) -> dict[str, jax.Array]:
    return {name: variable[...] for name, variable in by_name(state).items()}


class PureLayer:
    """A layer as a function of its parameters, compiled once a shape: documents and values are data."""

    def __init__(self, layer_type, select, dtype, config: AttentionConfig):
        self._graphdef, state = nnx.split(build(layer_type, None, config, dtype=dtype, param_dtype=dtype))
        self._variables = {".".join(map(str, path)): (path, v) for path, v in nnx.to_flat_state(state)}
        self._select, self._forward, self._vjp = select, jax.jit(self.apply), jax.jit(self._pull_back)

    def apply(self, params, x, documents=None):
        """The layer's output; `documents` are segment ids, a `Documents` or None. For use inside transformations."""
        assert params.keys() == self._variables.keys()
        state = {path: variable.replace(params[name]) for name, (path, variable) in self._variables.items()}
        layer = nnx.merge(self._graphdef, nnx.from_flat_state(state))
        prepared = isinstance(documents, Documents)
        ids, documents = (None, documents) if prepared else (documents, None)
        return layer(x, ids, documents=documents, select=self._select)

    def _pull_back(self, params, x, documents, cotangent):
        output, vjp = jax.vjp(lambda params, x: self.apply(params, x, documents), params, x)
        gradients, x_gradient = vjp(cotangent)
        return output, {**gradients, "x": x_gradient}

    def own_dtypes(self, params):
        return {name: np.asarray(params[name], v.dtype) for name, (_, v) in self._variables.items()}

    def forward(self, params, x, documents=None) -> np.ndarray:
        return np.asarray(self._forward(self.own_dtypes(params), x, documents))

    def vjp(self, params, x, documents, cotangent) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The output, and the gradients of every parameter by name and of x under "x"."""
        return jax.tree.map(np.asarray, self._vjp(self.own_dtypes(params), x, documents, cotangent))


class CompiledReference:
    """`reference_attention` in float64, compiled once for documents of up to `length` tokens.

    Each document is run alone, as the front of an otherwise empty row: the reference looks at no later token.
    """

    def __init__(self, layer_type, select, length: int, config: AttentionConfig):
        self._config, self._layer_type, self._select, self._length = config, layer_type, select, length
        self._document = jax.jit(self._pull_back, compiler_options=UNOPTIMIZED)
        self._scores = jax.jit(self._index_scores, compiler_options=UNOPTIMIZED)

    def _pull_back(self, params, x, cotangent):
        def attention(params, x):
            return reference_attention(params, self._config, self._layer_type, x[None], select=self._select)[0]

        output, vjp = jax.vjp(attention, params, x)
        return output, *vjp(cotangent)

    def _index_scores(self, params, h):
        low_rank = h @ params["q_a_proj.kernel"]
        low_rank = low_rank / jnp.sqrt(jnp.mean(low_rank**2, axis=-1, keepdims=True) + self._config.rms_norm_eps)
        return reference_index_scores(params, self._config, h, low_rank * params["q_a_norm.scale"][None])

    def index_scores(self, params, h: np.ndarray) -> np.ndarray:
        """The indexer's score of every entry for every query of one document [T, E], visible or not: [T, T // m]."""
        used = {name: np.asarray(p, np.float64) for name, p in params.items() if "indexer" in name or "q_a" in name}
        rows = np.zeros((self._length, h.shape[1]))
        rows[: len(h)] = h
        with jax.enable_x64(True):
            scores = np.asarray(self._scores(used, rows))
        return scores[: len(h), : len(h) // self._config.csa_ratio]

    def margin(self, params, x: np.ndarray, segment_ids=None, *, zeros_tie=False) -> float:
        """By how much the worst selected entry beat the best rejected one, at the query where that was closest.

        Where no indexer head answers, a score is zero in every dtype. Two of those are no close choice where the lower
        slot wins; they are, with `zeros_tie`, where either may.
        """
        margin, k = np.inf, self._config.index_topk
        if self._layer_type != LayerType.CSA or self._select == "all":
            return margin
        for b, start, stop in document_runs(x, segment_ids):
            for t, scores in enumerate(self.index_scores(params, x[b, start:stop])):
                last_in_first_out = np.sort(scores[: (t + 1) // self._config.csa_ratio])[::-1][k - 1 : k + 1]
                if len(last_in_first_out) == 2 and (zeros_tie or last_in_first_out.any()):
                    margin = min(margin, last_in_first_out[0] - last_in_first_out[1])
        return float(margin)

    def vjp(self, params, x, segment_ids, cotangent) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """As `PureLayer.vjp`."""
        params = {name: np.asarray(value, np.float64) for name, value in params.items()}
        gradients: dict[str, np.ndarray] = {name: np.zeros(value.shape) for name, value in params.items()}
        output, x_gradient = np.zeros(x.shape), np.zeros(x.shape)
        for b, start, stop in document_runs(x, segment_ids):
            rows = np.zeros((2, self._length, x.shape[2]))
            rows[:, : stop - start] = x[b, start:stop], cotangent[b, start:stop]
            with jax.enable_x64(True):
                out, more, dx = jax.tree.map(np.asarray, self._document(params, *rows))
            output[b, start:stop], x_gradient[b, start:stop] = out[: stop - start], dx[: stop - start]
            gradients = {name: gradient + more[name] for name, gradient in gradients.items()}
        return output, {**gradients, "x": x_gradient}


def document_runs(x, segment_ids=None) -> list[tuple[int, int, int]]:
    """(batch row, start, stop) of every document of x [B, S, ...]: maximal runs of one nonzero id."""
    runs = []
    for b, ids in enumerate(np.ones(x.shape[:2], int) if segment_ids is None else segment_ids):
        edges = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]
        runs += [(b, i, j) for i, j in itertools.pairwise(edges) if i < j and ids[i] != 0]
    return runs


_pure_layers, _compiled_references = functools.cache(PureLayer), functools.cache(CompiledReference)


def pure_layer(layer_type, *, select="top_k", dtype=jnp.float32, **changes: Any) -> PureLayer:
    """The layer of the tiny config with changes; always the same object for the same arguments."""
    return _pure_layers(layer_type, select, np.dtype(dtype), dataclasses.replace(CONFIG, **changes))


def compiled_reference(layer_type, *, select="top_k", length=LENGTH, **changes: Any) -> CompiledReference:
    """As `pure_layer`."""
    return _compiled_references(layer_type, select, length, dataclasses.replace(CONFIG, **changes))


def problem(layer_type, seed, *, batch=BATCH, length=LENGTH, dtype: Any = np.float32, **changes: Any):
    """Parameters, hidden states and a cotangent of unit norm."""
    config = dataclasses.replace(CONFIG, **changes)
    cotangent = np.random.default_rng([seed, 1]).normal(size=(batch, length, config.hidden_size))
    cotangent /= max(np.linalg.norm(cotangent), 1.0)
    x = random_hidden(seed, batch, length, config.hidden_size, dtype)
    return random_params(config, layer_type, seed, dtype), x, cotangent.astype(dtype)
