"""Writing safetensors files with an index atomically: the directory appears complete or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from foveal.checkpoint.files import CONFIG, INDEX, SINGLE, require_safetensors
from foveal.checks import as_int

SHARD_BYTES = 5_000_000_000
"""Default maximum size of a file."""


class ToWrite(NamedTuple):
    """A tensor whose array is made only when it is written.

    Attributes:
        name: name in the file.
        size: size in bytes.
        make: returns the array.
    """

    name: str
    size: int
    make: Callable[[], np.ndarray]


def write_checkpoint(
    path: str | os.PathLike[str],
    tensors: Sequence[ToWrite],
    config: Mapping[str, Any],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `config.json`, safetensors files and their index into a new directory; makes one file's tensors at a time.

    Raises:
        ValueError: the path exists and is not an empty directory, or `shard_bytes` is below 1.
        OSError: the files cannot be written.
        ImportError: safetensors is missing.
    """
    require_safetensors()
    from safetensors.numpy import save_file

    shards = _shards(tensors, as_int("shard_bytes", shard_bytes, 1))
    names = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    )
    with _new_directory(Path(path)) as directory:
        for name, shard in zip(names, shards, strict=True):
            # transformers only loads files whose format is "pt".
            save_file({tensor.name: tensor.make() for tensor in shard}, directory / name, metadata={"format": "pt"})
        placed = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(tensor.size for tensor in tensors)
        _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))})
        _write_json(directory / CONFIG, config)


def _shards(tensors: Sequence[ToWrite], most: int) -> list[list[ToWrite]]:
    """Split tensors, in order, into shards of at most `most` bytes; a larger tensor gets a shard of its own."""
    shards: list[list[ToWrite]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.size > room:
            shards.append([])
            room = most
        shards[-1].append(tensor)
        room -= tensor.size
    return shards


@contextlib.contextmanager
def _new_directory(path: Path) -> Iterator[Path]:
    """Yield a scratch directory that is renamed to `path` once it is synced to disk, and removed on any error."""
    path = Path(os.path.realpath(path))  # replace a link's target, not the link; resolve "."
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"path: expected nothing or an empty directory, got {path}, which exists")
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.parent / f".foveal-{uuid.uuid4().hex}"
    made.mkdir()
    try:
        yield made
        for file in made.iterdir():
            # safetensors makes files that only their owner can read; give them the directory's permissions.
            file.chmod(made.stat().st_mode & 0o666)
            _sync(file)
        _sync(made)
        try:
            os.replace(made, path)  # onto an empty directory too
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise ValueError(f"path: expected nothing there, but {path} was created in the meantime") from error
            raise
        _sync(path.parent)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
