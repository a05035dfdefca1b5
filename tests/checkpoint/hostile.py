"""Safetensors files put together by hand, a judge of what is read from them, and texts to damage them with."""

import builtins
import contextlib
import io
import json
import os
import pathlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import safetensors
from hypothesis import strategies as st

from foveal import CheckpointError
from foveal.checkpoint.files import DTYPES, CheckpointFiles, read_header

Entries = Mapping[str, tuple[str, Sequence[int], bytes]]
"""By name: dtype, shape and data."""


class Held(NamedTuple):
    """A tensor as it lies in a file; also an entry for `packed`."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def framed(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def header_of(entries: Entries) -> dict[str, Any]:
    """By hand: safetensors' own writer refuses what these tests need."""
    header, at = {}, 0
    for name, (dtype, shape, data) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    return header


def packed(entries: Entries) -> bytes:
    return framed(json.dumps(header_of(entries)).encode(), b"".join(data for _, _, data in entries.values()))


# Every dtype that is read, one that is not, a scalar, and a tensor without elements. No two bytes are the same.
ENTRIES: Entries = {
    "f32": ("F32", [2, 2], bytes(range(16))),
    "bf16": ("BF16", [3], bytes(range(16, 22))),
    "f16": ("F16", [], bytes(range(22, 24))),
    "e4m3": ("F8_E4M3", [2, 3], bytes(range(24, 30))),
    "e8m0": ("F8_E8M0", [1, 2], bytes(range(30, 32))),
    "none": ("F32", [0, 5], b""),
    "i64": ("I64", [1], bytes(range(32, 40))),
}
CONTENT = packed(ENTRIES)
DATA_AT = 8 + int.from_bytes(CONTENT[:8], "little")
HEADER, DATA = CONTENT[8:DATA_AT], CONTENT[DATA_AT:]


def by_foveal(file: pathlib.Path) -> dict[str, Held]:
    """Of dtypes that attention never has, where they lie is all there is to check."""
    raw, found = file.read_bytes(), {}
    for name, tensor in read_header(file).items():
        assert (tensor.name, tensor.file) == (name, file)
        known = tensor.dtype in DTYPES
        data = tensor.read().tobytes() if known else raw[tensor.start : tensor.start + tensor.size]
        found[name] = Held(tensor.dtype, tensor.shape, data)
    return found


def by_safetensors(content: bytes) -> dict[str, Held]:
    """The judge: reads a whole file by itself."""
    tensors = safetensors.deserialize(content)
    return {name: Held(entry["dtype"], tuple(entry["shape"]), bytes(entry["data"])) for name, entry in tensors}


def assert_refused_or_the_same(file: pathlib.Path, content: bytes) -> bool:
    file.write_bytes(content)
    found, refusal = None, str(file)
    try:
        found = by_foveal(file)
    except CheckpointError as error:
        refusal = str(error)
    assert str(file) in refusal
    assert found is None or found == by_safetensors(content)
    return found is not None


@contextlib.contextmanager
def recorded_opens() -> Iterator[list[pathlib.Path]]:
    """What is opened meanwhile, by Python or by safetensors (in Rust, where no audit hook sees it)."""
    opened: list[pathlib.Path] = []

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            opened.append(pathlib.Path(os.path.realpath(path)))
            return function(path, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "open", recording(builtins.open))
        patch.setattr(io, "open", recording(io.open))
        patch.setattr(safetensors, "safe_open", recording(safetensors.safe_open))
        yield opened


def contents(files: CheckpointFiles) -> dict[str, bytes]:
    return {name: files.tensor(name).read().tobytes() for name in files.where}


PIECES = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"0", b"-", b"9" * 20, b"9" * 5000, b"1e3", b"null", b"NaN"]
PIECES += [b"\\u0066", b'"F64"', b'"BF16"', b"[0,4]", b'"f32":{},', b"\0", b"\xff", b"[" * 200, b'"shape":[2,2],', b" "]

LETTERS = [bytes([letter]) for letter in b'0123456789abefxyz_ ,"']


@st.composite
def edited(draw: st.DrawFn, text: bytes) -> bytes:
    """A few pieces put into a text, each in the place of nothing or of a few bytes."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(text)))
        piece = draw(st.sampled_from(PIECES) | st.binary(max_size=2) | st.sampled_from(LETTERS))
        text = text[:at] + piece + text[at + draw(st.just(len(piece)) | st.integers(0, 3)) :]
    return text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
