"""Safetensors files as an enemy would write them: an error that names the file, or the same tensors.

Fuzzed ones are in test_files_fuzz.py, indexes in test_index.py.
"""

import json
import os
import pathlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from foveal import AttentionConfig, CheckpointError
from foveal.checkpoint.files import INDEX, SINGLE, CheckpointFiles, read_header
from tests.checkpoint.hostile import (
    CONTENT,
    DATA,
    DATA_AT,
    ENTRIES,
    HEADER,
    assert_refused_or_the_same,
    by_foveal,
    contents,
    framed,
    recorded_opens,
)

# --- One file --------------------------------------------------------------------------------------------------------


def test_an_undamaged_file_is_read_byte_for_byte(scratch: pathlib.Path) -> None:
    assert assert_refused_or_the_same(scratch, CONTENT)
    read = read_header(scratch)["f32"].read()
    np.testing.assert_array_equal(read, np.frombuffer(ENTRIES["f32"][2], np.float32).reshape(2, 2))


def test_tensors_are_in_memory_of_their_own(scratch: pathlib.Path) -> None:
    scratch.write_bytes(CONTENT)
    read = read_header(scratch)["f32"].read()
    before = read.copy()
    scratch.write_bytes(bytes(len(CONTENT)))
    np.testing.assert_array_equal(read, before)
    read[:] = 0  # nor is it read-only


def one(**changes: Any) -> bytes:
    """A file of one tensor, F32 [2], with other keys in its entry; None removes one."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes
    return framed(json.dumps({"x": {k: v for k, v in entry.items() if v is not None}}).encode(), bytes(8))


def two(first: list[int], second: list[int], size: int) -> bytes:
    """A file of two tensors of these offsets."""
    entries = {name: {"dtype": "U8", "data_offsets": at} for name, at in (("x", first), ("y", second))}
    for entry in entries.values():
        entry["shape"] = [entry["data_offsets"][1] - entry["data_offsets"][0]]  # pyright: ignore
    return framed(json.dumps(entries).encode(), bytes(size))


X = b'{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
DAMAGED: dict[str, bytes] = {
    "empty": b"",
    "a length cut off": CONTENT[:7],
    "a length and no more": CONTENT[:8],
    "a header cut off": CONTENT[: DATA_AT - 1],
    "no data": CONTENT[:DATA_AT],
    "one byte short": CONTENT[:-1],
    "one byte long": CONTENT + b"\0",
    "all zero": bytes(64),
    "a header of no bytes": framed(b""),
    "header longer than the file": framed(HEADER, DATA, len(HEADER) + len(DATA) + 1),
    "header that ends in the data": framed(HEADER, DATA, len(HEADER) + 1),
    "header that ends too early": framed(HEADER, DATA, len(HEADER) - 1),
    "header of 2 ** 63 bytes": framed(HEADER, DATA, 2**63),
    "header of 2 ** 63 - 1 bytes": framed(HEADER, DATA, 2**63 - 1),
    "header whose end overflows": framed(HEADER, DATA, 2**64 - 8),
    "header of 2 ** 64 - 1 bytes": framed(HEADER, DATA, 2**64 - 1),
    "header of a gigabyte": framed(HEADER, DATA, 2**30),
    "not JSON": framed(b"{x}"),
    "not UTF-8": framed(b'{"\xff":' + X + b"}", bytes(8)),
    "UTF-16": framed(('{"x":' + X.decode() + "}").encode("utf-16-le"), bytes(8)),
    "byte order mark": framed(b'\xef\xbb\xbf{"x":' + X + b"}", bytes(8)),
    "half a surrogate pair": framed(b'{"\\ud800":' + X + b"}", bytes(8)),
    "a list": framed(b"[]"),
    "a string": framed(b'"x"'),
    "null": framed(b"null"),
    "a list of entries": framed(b"[" + X + b"]", bytes(8)),
    "nested a hundred thousand deep": framed(b"[" * 100_000),
    "objects a hundred thousand deep": framed(b'{"x":' * 100_000),
    "entry nested a hundred thousand deep": framed(b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a number of 10,000 digits": framed(b'{"x":' + b"9" * 10_000 + b"}"),
    "a number out of range": framed(b'{"x":{"dtype":"F32","shape":[1e999],"data_offsets":[0,8]}}', bytes(8)),
    "NaN": one(shape=[float("nan")]),
    "one name twice": framed(b'{"x":' + X + b',"x":' + X + b"}", bytes(8)),
    "one name twice, once escaped": framed(b'{"x":' + X + b',"\\u0078":' + X + b"}", bytes(8)),
    "one name twice, at other offsets": framed(
        b'{"x":' + X + b',"x":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}', bytes(16)
    ),
    "dtype twice": framed(b'{"x":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
    "offsets twice": framed(b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"data_offsets":[8,16]}}', bytes(16)),
    "metadata twice": framed(b'{"__metadata__":{},"__metadata__":{},"x":' + X + b"}", bytes(8)),
    "metadata of numbers": framed(b'{"__metadata__":{"a":1},"x":' + X + b"}", bytes(8)),
    "metadata that is a tensor": framed(b'{"__metadata__":' + X + b"}", bytes(8)),
    "metadata that is a list": framed(b'{"__metadata__":[],"x":' + X + b"}", bytes(8)),
    "entry null": framed(b'{"x":null}'),
    "entry a number": framed(b'{"x":8}', bytes(8)),
    "entry a list": framed(b'{"x":["F32",[2],[0,8]]}', bytes(8)),
    "no dtype": one(dtype=None),
    "no shape": one(shape=None),
    "no offsets": one(data_offsets=None),
    "unknown dtype": one(dtype="F33"),
    "dtype in lower case": one(dtype="f32"),
    "dtype a number": one(dtype=4),
    "dtype an object": one(dtype={"F32": None}),
    "dtype a list": one(dtype=["F32"]),
    "shape a number": one(shape=2),
    "shape a string": one(shape="2"),
    "shape of a string": one(shape=["2"]),
    "shape of a float": one(shape=[2.0]),
    "shape of a bool": one(shape=[2, True]),
    "shape negative": one(shape=[-2]),
    "shape twice negative": one(shape=[-1, -2]),
    "shape nested": one(shape=[[2]]),
    "shape too large": one(shape=[3]),
    "shape too small": one(shape=[1]),
    "shape whose bytes overflow": one(shape=[2**62 + 2]),
    "shape whose product overflows": one(shape=[2**32 + 1, 2**32, 2]),
    "shape beyond 64 bits": one(shape=[2**64 + 2]),
    "shape that overflows on its way to zero": one(shape=[2**63, 2**63, 0], data_offsets=[0, 0]),
    # These pass with safetensors, and are more than NumPy can make.
    "shape empty and absurd": framed(b'{"x":{"dtype":"F32","shape":[0,9223372036854775807],"data_offsets":[0,0]}}'),
    "shape empty and beyond int64": framed(
        b'{"x":{"dtype":"F8_E4M3","shape":[0,%d],"data_offsets":[0,0]}}' % (2**64 - 1)
    ),
    "shape of 70 dimensions": one(shape=[2] + 69 * [1]),
    "offsets a number": one(data_offsets=8),
    "offsets an object": one(data_offsets={"start": 0, "end": 8}),
    "one offset": one(data_offsets=[8]),
    "three offsets": one(data_offsets=[0, 8, 8]),
    "offsets negative": one(data_offsets=[-8, 0]),
    "offsets floats": one(data_offsets=[0.0, 8.0]),
    "offsets turned round": one(data_offsets=[8, 0]),
    "offsets beyond the file": one(data_offsets=[8, 16]),
    "offsets far beyond the file": one(data_offsets=[2**40, 2**40 + 8]),
    "offsets that overflow": one(data_offsets=[2**64 - 8, 2**64 - 1]),
    "offsets that begin late": one(shape=[1], data_offsets=[4, 8]),
    "overlap": two([0, 8], [4, 12], 12),
    "the same bytes twice": two([0, 8], [0, 8], 8),
    "one inside the other": two([0, 8], [2, 4], 8),
    "gap": two([0, 4], [8, 12], 12),
    "data that no tensor has": two([0, 4], [4, 8], 12),
    "data without tensors": framed(b"{}", bytes(8)),
    "gzip": b"\x1f\x8b\x08\0" + bytes(60),
    "zip, as PyTorch writes": b"PK\x03\x04" + bytes(60),
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(60),
    "Git LFS pointer": POINTER,
    "HTML, as a failed download": b"<!DOCTYPE html><html><body>404</body></html>",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_or_hostile_file_is_refused_by_name(content: bytes, tmp_path: pathlib.Path) -> None:
    """Alone, and in a directory, in the name that load_attention would open."""
    file = tmp_path / SINGLE
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: ") as raised:
        by_foveal(file)
    assert len(str(raised.value)) < 1000  # what the file says is not poured out
    with pytest.raises(CheckpointError, match=r"model\.safetensors: "):
        contents(CheckpointFiles(tmp_path))


SAID: dict[str, tuple[bytes, str]] = {
    "twice": (DAMAGED["one name twice"], "'x' twice"),
    "twice, once escaped": (DAMAGED["one name twice, once escaped"], "'x' twice"),
    "too long": (DAMAGED["header of 2 ** 64 - 1 bytes"], "header too large"),
    "too short": (b"", "header too small"),
    "dtype": (DAMAGED["unknown dtype"], "F33"),
    "a pointer": (POINTER, "got a Git LFS pointer: git lfs pull fetches the file"),
    "cut off": (CONTENT[:-3], rf"it has {len(CONTENT) - 3} bytes, is it cut off\?"),
}


@pytest.mark.parametrize(("content", "message"), SAID.values(), ids=SAID)
def test_the_error_says_what_is_wrong(content: bytes, message: str, scratch: pathlib.Path) -> None:
    scratch.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as raised:
        read_header(scratch)
    (problem,) = raised.value.problems
    assert "\n" not in problem


ODD: dict[str, tuple[bytes, set[str]]] = {
    "no tensors": (framed(b"{}"), set()),
    "padding": (framed(b'{"x":' + X + b"}   \n ", bytes(8)), {"x"}),
    "leading blank": (framed(b' {"x":' + X + b"}", bytes(8)), {"x"}),
    "metadata": (framed(b'{"__metadata__":{"format":"pt"},"x":' + X + b"}", bytes(8)), {"x"}),
    "a name of no letters": (framed(b'{"":' + X + b"}", bytes(8)), {""}),
    "a name that is a path": (framed(b'{"../../x":' + X + b"}", bytes(8)), {"../../x"}),
    "a name in Greek": (framed('{"ψ":'.encode() + X + b"}", bytes(8)), {"ψ"}),
    "another key in an entry": (one(note="hello"), {"x"}),
}


@pytest.mark.parametrize(("content", "names"), ODD.values(), ids=ODD)
def test_odd_files_that_are_legal_are_read(content: bytes, names: set[str], scratch: pathlib.Path) -> None:
    assert assert_refused_or_the_same(scratch, content)
    assert set(read_header(scratch)) == names


def test_a_file_cut_off_anywhere_is_refused(scratch: pathlib.Path) -> None:
    assert not any(assert_refused_or_the_same(scratch, CONTENT[:stop]) for stop in range(len(CONTENT)))


@pytest.mark.parametrize("stop", [0, DATA_AT, DATA_AT + 15], ids=["emptied", "without data", "a byte missing"])
def test_a_file_that_shrinks_after_its_header_was_read_is_refused(stop: int, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "named.safetensors"
    file.write_bytes(CONTENT)
    tensor = read_header(file)["f32"]
    file.write_bytes(CONTENT[:stop])
    with pytest.raises(CheckpointError, match=r"named\.safetensors: f32: expected 16 bytes"):
        tensor.read()


def test_what_is_no_file_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("none.safetensors", "none/none.safetensors", "folder.safetensors", "n" * 300 + ".safetensors"):
        with pytest.raises(CheckpointError, match=name):
            read_header(tmp_path / name)


def test_pipes_are_not_waited_for(tmp_path: pathlib.Path) -> None:
    for name in ("x.safetensors", INDEX, "config.json"):
        os.mkfifo(tmp_path / name)
    for path in (tmp_path / "x.safetensors", tmp_path, tmp_path / INDEX):
        with pytest.raises(CheckpointError, match="expected a file, got something else"):
            CheckpointFiles(path)
    with pytest.raises(ValueError, match=r"config\.json: expected a JSON file, got something else"):
        AttentionConfig.from_hf_config(tmp_path)


# --- Pickles ---------------------------------------------------------------------------------------------------------


class Bomb:
    """Unpickled, it leaves a trace."""

    def __init__(self, trace: pathlib.Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.trace),)


@pytest.fixture
def bomb(tmp_path: pathlib.Path) -> Iterator[bytes]:
    trace = tmp_path / "exploded"
    yield pickle.dumps(Bomb(trace))
    assert not trace.exists()


def test_the_bomb_is_live(tmp_path: pathlib.Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "exploded")))
    assert (tmp_path / "exploded").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "other.safetensors"])
def test_a_pickle_by_the_name_of_a_safetensors_file_is_refused(name: str, bomb: bytes, tmp_path: pathlib.Path) -> None:
    (tmp_path / name).write_bytes(bomb)
    with pytest.raises(CheckpointError, match=name):
        CheckpointFiles(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.pkl", "weights.npy"])
def test_a_directory_of_pickles_is_no_checkpoint(name: str, bomb: bytes, tmp_path: pathlib.Path) -> None:
    (tmp_path / name).write_bytes(bomb)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with recorded_opens() as opened, pytest.raises(CheckpointError, match="got none"):
        CheckpointFiles(tmp_path)
    assert opened == []
    for path in (tmp_path / name, tmp_path / "pytorch_model.bin.index.json"):
        with pytest.raises(CheckpointError, match=name):
            CheckpointFiles(path)
