"""Checkpoints with one thing changed."""

import json
import pathlib
import shutil

import numpy as np

from foveal.checkpoint.files import CheckpointFiles
from foveal.checkpoint.writing import ToWrite, write_checkpoint

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
