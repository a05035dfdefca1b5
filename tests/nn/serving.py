"""A layer behind a cache as functions compiled once, and what they must equal."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from foveal import AttentionCache
from foveal.testing.generators import random_hidden, random_params
from tests.nn.layers import CONFIG, build

LENGTH, CAPACITY = 48, 50


class Served:
    """A layer with random parameters. Chunks are padded to one of a few sizes, so that few programs are compiled."""

    def __init__(self, layer_type, *, dtype=jnp.float32, seed=0, sizes=(1, 4, 48), **changes):
        self.config = dataclasses.replace(CONFIG, **changes)
        self.params = random_params(self.config, layer_type, seed)
        self.layer = build(layer_type, self.params, self.config, dtype=dtype, param_dtype=dtype)
        self.sizes = sizes
        self.traced = jax.jit(self.layer.prefill)
        self._full = self.packed = jax.jit(self.layer)

    def full(self, x) -> np.ndarray:
        """One pass over whole rows [B, S, E], one at a time: for any number of rows the same program."""
        return np.concatenate([self._full(jnp.asarray(row[None])) for row in x])

    def append(self, cache: AttentionCache, chunks: list[np.ndarray], *, pad=np.nan):
        """Each row's chunk [n, E] behind what it holds: the rows' outputs [n, E], and the cache."""
        longest = max(map(len, chunks))
        size = next(size for size in self.sizes if size >= longest)
        x = np.full((len(chunks), size, self.config.hidden_size), pad, np.float32)
        for row, chunk in enumerate(chunks):
            x[row, : len(chunk)] = chunk
        lengths = np.array([len(chunk) for chunk in chunks], np.int32)
        out, cache = self.traced(cache, jnp.asarray(x), jnp.asarray(lengths))
        out = np.asarray(out)
        for row, length in enumerate(lengths):
            np.testing.assert_array_equal(out[row, length:], 0.0)
        return [out[row, :length] for row, length in enumerate(lengths)], cache


served = functools.cache(Served)


def text(seed, *, rows=3, length=LENGTH, config=CONFIG) -> np.ndarray:
    """Hidden states [rows, length, E]."""
    return random_hidden(seed, rows, length, config.hidden_size)
