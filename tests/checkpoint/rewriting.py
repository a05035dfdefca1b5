"""Checkpoints with one thing changed, and layers compared."""

import functools
import json
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from foveal import AttentionConfig, CompressedAttention
from foveal.checkpoint.files import CheckpointFiles
from foveal.checkpoint.writing import ToWrite, write_checkpoint
from foveal.testing.generators import random_params
from foveal.testing.parameters import get_params

Arrays = dict[str, np.ndarray]


def layer_of(config: AttentionConfig, index: int, dtype: DTypeLike = jnp.float32, param_dtype: DTypeLike | None = None):
    """A layer with random parameters.

    Made without values, since JAX compiles a program for each shape that it initialises or casts.
    """
    kinds: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype or dtype}
    graph, state = nnx.split(nnx.eval_shape(lambda: CompressedAttention(config, index, **kinds, rngs=nnx.Rngs(0))))
    params, flat = random_params(config, config.layer_type(index), index), dict(nnx.to_flat_state(state))
    for path, leaf in flat.items():
        flat[path] = leaf.replace(jnp.asarray(params[".".join(map(str, path))].astype(leaf.dtype)))
    return nnx.merge(graph, nnx.from_flat_state(flat))


@functools.cache
def layers_of(config: AttentionConfig, dtype: DTypeLike = jnp.float32, param_dtype: DTypeLike | None = None):
    """All layers of a model. Not to be changed."""
    return {index: layer_of(config, index, dtype, param_dtype) for index in range(config.num_layers)}


def tensors_of(path: pathlib.Path) -> Arrays:
    """All of a checkpoint's arrays by name."""
    files = CheckpointFiles(path)
    return {name: files.tensor(name).read() for name in files.where}


def rewrite(source: pathlib.Path, target: pathlib.Path, arrays: Arrays, shard_bytes: int = 10**9, **config) -> None:
    """Writes these arrays with the source's config; `config` has keys to be set in it, or with None to be left out."""
    raw = json.loads((source / "config.json").read_text()) | config
    shutil.rmtree(target, ignore_errors=True)
    tensors = [ToWrite(name, array.nbytes, lambda array=array: array) for name, array in arrays.items()]
    write_checkpoint(target, tensors, {key: value for key, value in raw.items() if value is not None}, shard_bytes)


def assert_same(layers, others):
    """The same layers: configs, types, dtypes and, to the bit, parameters."""
    assert layers.keys() == others.keys()
    for index, layer in layers.items():
        other = others[index]
        assert (layer.config, layer.layer_type, layer.dtype) == (other.config, other.layer_type, other.dtype)
        got, want = get_params(layer), get_params(other)
        assert got.keys() == want.keys()
        for name in want:
            assert got[name].dtype == want[name].dtype
            np.testing.assert_array_equal(bits(got[name]), bits(want[name]), err_msg=name)


def bits(array: jax.Array) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)
