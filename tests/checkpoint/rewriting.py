"""Checkpoints with one thing changed, and layers compared."""

import json
import pathlib
import shutil

import numpy as np

from foveal.checkpoint.files import CheckpointFiles
from foveal.checkpoint.writing import ToWrite, write_checkpoint
from foveal.testing.parameters import get_params

Arrays = dict[str, np.ndarray]


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
            np.testing.assert_array_equal(got[name], want[name], err_msg=name)
