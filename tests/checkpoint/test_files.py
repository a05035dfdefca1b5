"""Safetensors files and indexes as an enemy would write them: an error that names the file, or the same tensors."""

import builtins
import contextlib
import io
import json
import os
import pathlib
import pickle
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from foveal import CheckpointError
from foveal.checkpoint.files import DTYPES, INDEX, SINGLE, CheckpointFiles, read_header

Entries = dict[str, tuple[str, list[int], bytes]]


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


class Contents(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def by_foveal(file: pathlib.Path) -> dict[str, Contents]:
    """Of dtypes that attention never has, where they lie is all there is to check."""
    raw, found = file.read_bytes(), {}
    for name, tensor in read_header(file).items():
        assert (tensor.name, tensor.file) == (name, file)
        known = tensor.dtype in DTYPES
        data = tensor.read().tobytes() if known else raw[tensor.start : tensor.start + tensor.size]
        found[name] = Contents(tensor.dtype, tensor.shape, data)
    return found


def by_safetensors(content: bytes) -> dict[str, Contents]:
    """The judge: reads a whole file by itself."""
    tensors = safetensors.deserialize(content)
    return {name: Contents(entry["dtype"], tuple(entry["shape"]), bytes(entry["data"])) for name, entry in tensors}


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


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Of the module: Hypothesis's examples share what a test is given."""
    return tmp_path_factory.mktemp("files") / "x.safetensors"


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
    "NaN": framed(b'{"x":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', bytes(8)),
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
        b'{"x":{"dtype":"F8_E4M3","shape":[0,18446744073709551615],"data_offsets":[0,0]}}'
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
    "Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n",
    "HTML, as a failed download": b"<!DOCTYPE html><html><body>404</body></html>",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_or_hostile_file_is_refused_by_name(content: bytes, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "named.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"named\.safetensors: ") as raised:
        by_foveal(file)
    assert len(str(raised.value)) < 1000  # what the file says is not poured out


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_of_a_damaged_file_a_checkpoint_holds_nothing(content: bytes, tmp_path: pathlib.Path) -> None:
    """By way of a directory, each in the name that load_attention would open."""
    file = tmp_path / SINGLE
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: "):
        contents(CheckpointFiles(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (DAMAGED["one name twice"], "'x' twice"),
        (DAMAGED["one name twice, once escaped"], "'x' twice"),
        (DAMAGED["header of 2 ** 64 - 1 bytes"], "header too large"),
        (DAMAGED["empty"], "header too small"),
        (DAMAGED["unknown dtype"], "F33"),
    ],
    ids=["twice", "twice, once escaped", "too long", "too short", "dtype"],
)
def test_the_error_says_what_is_wrong(content: bytes, message: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as raised:
        read_header(tmp_path / SINGLE)
    assert len(raised.value.problems) == 1
    assert "\n" not in raised.value.problems[0]


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
    loaded = [stop for stop in range(len(CONTENT)) if assert_refused_or_the_same(scratch, CONTENT[:stop])]
    assert loaded == []


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


# --- One file, fuzzed ------------------------------------------------------------------------------------------------

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


@given(header=edited(HEADER), honest=st.booleans())
def test_fuzzed_headers_are_refused_or_mean_what_they_say(header: bytes, honest: bool, scratch: pathlib.Path) -> None:
    assert_refused_or_the_same(scratch, framed(header, DATA, None if honest else len(HEADER)))


@given(content=edited(CONTENT), keep=st.integers(0, len(CONTENT)))
def test_fuzzed_and_cut_files_are_refused_or_mean_what_they_say(
    content: bytes, keep: int, scratch: pathlib.Path
) -> None:
    assert_refused_or_the_same(scratch, content)
    assert_refused_or_the_same(scratch, content[:keep])


@given(header=st.binary(max_size=64), data=st.binary(max_size=16), length=st.none() | st.integers(0, 2**64 - 1))
def test_random_bytes_are_refused(header: bytes, data: bytes, length: int | None, scratch: pathlib.Path) -> None:
    # `{}` with spaces and no data is a file without tensors, if Hypothesis should come upon it.
    content = framed(header, data, length)
    assert not assert_refused_or_the_same(scratch, content) or by_safetensors(content) == {}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KEYS = ("dtype", "shape", "data_offsets")
SIZES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I64": 8}


@st.composite
def near_misses(draw: st.DrawFn) -> bytes:
    """A file in order but for, perhaps, one thing; its JSON is put together by hand, so keys may repeat."""
    texts, at = [], 0
    dtypes = draw(st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=2))
    spoilt = draw(st.integers(0, len(dtypes)))  # none of them, if it is their number
    names = draw(st.permutations("xy") | st.just("xx"))
    for index, dtype in enumerate(dtypes):
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        size = SIZES[dtype] * int(np.prod(shape))
        entry: dict[str, Any] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
        pairs = [(key, json.dumps(entry[key])) for key in draw(st.permutations(KEYS))]
        text = None
        if index == spoilt:
            pairs, text = draw(spoilt_entries(entry, pairs))
        if text is None:
            text = "{" + ",".join(f"{json.dumps(key)}:{value}" for key, value in pairs) + "}"
        texts.append(f'"{names[index]}":{text}')
    if draw(st.booleans()):
        texts.insert(0, f'"__metadata__":{json.dumps(draw(st.dictionaries(st.text(max_size=3), st.text(max_size=3))))}')
    return framed(("{" + ",".join(texts) + "}").encode(), bytes(i % 256 for i in range(at)))


@st.composite
def spoilt_entries(
    draw: st.DrawFn, entry: dict[str, Any], pairs: list[tuple[str, str]]
) -> tuple[list[tuple[str, str]], str | None]:
    """Either other keys and values for it, or quite another text."""
    key = draw(st.sampled_from(KEYS))
    numbers = st.sampled_from([0, 1, 2, 3, 4, 8, -1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64])
    other = draw(st.lists(numbers, max_size=4) | st.just({entry["dtype"]: None}) | JSON)
    match draw(st.sampled_from(["value", "twice", "missing", "more", "list", "anything"])):
        case "value":
            return [(k, json.dumps(other) if k == key else v) for k, v in pairs], None
        case "twice":
            return [*pairs, (key, json.dumps(other))], None
        case "missing":
            return [(k, v) for k, v in pairs if k != key], None
        case "more":
            return [*pairs, (draw(st.text(max_size=3)), json.dumps(other))], None
        case "list":
            return pairs, json.dumps([entry[k] for k in KEYS])
        case _:
            return pairs, json.dumps(other)


@given(content=near_misses())
def test_headers_that_are_nearly_right_are_refused_or_mean_what_they_say(content: bytes, scratch: pathlib.Path) -> None:
    assert_refused_or_the_same(scratch, content)


@given(header=JSON)
def test_headers_of_any_json_are_refused_or_mean_what_they_say(header: Any, scratch: pathlib.Path) -> None:
    assert_refused_or_the_same(scratch, framed(json.dumps(header).encode()))


# --- Indexes ---------------------------------------------------------------------------------------------------------

SHARDS: dict[str, Entries] = {
    "a.safetensors": {"x": ("F32", [1], b"1234"), "y": ("BF16", [2], b"5678")},
    "sub/b.safetensors": {"z": ("F8_E4M3", [3], b"abc")},
}
WEIGHT_MAP = {name: file for file, entries in SHARDS.items() for name in entries}


class Place(NamedTuple):
    """A checkpoint, and next to it a file that must never be opened though it holds what the index lists."""

    directory: pathlib.Path
    canary: pathlib.Path

    def write_index(self, index: object) -> None:
        (self.directory / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))


def placed(root: pathlib.Path) -> Place:
    place = Place(root / "checkpoint", root / "canary.safetensors")
    for file, entries in SHARDS.items():
        (place.directory / file).parent.mkdir(parents=True, exist_ok=True)
        (place.directory / file).write_bytes(packed(entries))
    place.canary.write_bytes(packed({name: ("F32", [1], b"evil") for name in WEIGHT_MAP}))
    place.write_index({"weight_map": WEIGHT_MAP})
    return place


@pytest.fixture
def place(tmp_path: pathlib.Path) -> Place:
    return placed(tmp_path)


def contents(files: CheckpointFiles) -> dict[str, bytes]:
    return {name: files.tensor(name).read().tobytes() for name in files.where}


def test_an_index_is_followed_into_its_directory_and_below(place: Place) -> None:
    expected = {name: data for entries in SHARDS.values() for name, (_, _, data) in entries.items()}
    for path in (place.directory, place.directory / INDEX):
        files = CheckpointFiles(path)
        assert contents(files) == expected
        assert files.files == tuple(sorted(place.directory / file for file in SHARDS))


def test_links_are_followed_as_the_hugging_face_cache_is_made_of_them(place: Place) -> None:
    blob = place.canary.with_name("blob")
    (place.directory / "a.safetensors").rename(blob)
    (place.directory / "a.safetensors").symlink_to(blob)
    assert contents(CheckpointFiles(place.directory))["x"] == b"1234"


def test_nothing_is_opened_before_it_is_asked_for(place: Place) -> None:
    with recorded_opens() as opened:
        files = CheckpointFiles(place.directory)
        assert opened == [place.directory / INDEX]
        files.tensor("z")
        assert set(opened[1:]) == {place.directory / "sub/b.safetensors"}


# {} is the root of all, in absolute names.
REFUSED_FILES: dict[str, object] = {
    "parent": "../canary.safetensors",
    "parent, by way of a folder": "sub/../../canary.safetensors",
    "parent, by way of the directory itself": "./../canary.safetensors",
    "parent and back": "../checkpoint/a.safetensors",
    "parent of a folder": "sub/../a.safetensors",
    "absolute": "{}/canary.safetensors",
    "absolute, inside": "{}/checkpoint/a.safetensors",
    "two slashes": "/{}/canary.safetensors",
    "backslashes": "..\\canary.safetensors",
    "backslashes inside": "sub\\b.safetensors",
    "drive": "C:\\canary.safetensors",
    "drive, relative": "C:canary.safetensors",
    "drive, with slashes": "C:/canary.safetensors",
    "share": "\\\\host\\share\\canary.safetensors",
    "home": "~/../canary.safetensors",
    "no name": "",
    "the directory": ".",
    "its parent": "..",
    "blank": " ",
    "only the ending": ".safetensors",
    "a NUL": "a.safetensors\0.safetensors",
    "a NUL at the end": "a.safetensors\0",
    "a line break": "a\n.safetensors",
    "half a surrogate pair": "\ud800.safetensors",
    "turned writing": "a\u202e.safetensors",
    "null": None,
    "a number": 3,
    "a bool": True,
    "a list": ["a.safetensors"],
    "an object": {"file": "a.safetensors"},
    "a PyTorch pickle": "pytorch_model.bin",
    "another": "model.pt",
    "and another": "model.pth",
    "plain pickle": "model.pkl",
    "no ending": "a",
    "capitals": "a.SAFETENSORS",
    "a pickle under a folder of that ending": "a.safetensors/x.bin",
    "a pickle after it": "a.safetensors.bin",
    "the index": INDEX,
}


@pytest.mark.parametrize("file", REFUSED_FILES.values(), ids=REFUSED_FILES)
def test_an_index_that_names_anything_but_a_safetensors_file_inside_is_refused(file: object, place: Place) -> None:
    if isinstance(file, str):
        file = file.replace("{}", str(place.canary.parent))
    place.write_index({"weight_map": {**WEIGHT_MAP, "evil": file}})
    with recorded_opens() as opened, pytest.raises(CheckpointError) as raised:
        CheckpointFiles(place.directory)
    assert opened == [place.directory / INDEX]
    (problem,) = raised.value.problems
    assert problem.startswith("weight_map: 'evil': expected ")
    assert str(place.directory / INDEX) in str(raised.value)


def test_all_refused_entries_of_an_index_are_named_together(place: Place) -> None:
    place.write_index({"weight_map": {"x": "../x.safetensors", "y": "a.safetensors", "z": 3, "w": "w.bin"}})
    with pytest.raises(CheckpointError) as raised:
        CheckpointFiles(place.directory)
    assert [problem.split(": ")[1] for problem in raised.value.problems] == ["'x'", "'z'", "'w'"]


BAD_INDEXES: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "expected a JSON file"),
    "not JSON": ("{weight_map: {}}", "expected a JSON file"),
    "cut off": (json.dumps({"weight_map": WEIGHT_MAP})[:-3], "expected a JSON file"),
    "not UTF-8": (b'{"weight_map": {"\xff": "a.safetensors"}}', "expected a JSON file"),
    "binary": (CONTENT, "expected a JSON file"),
    "a list": ("[]", "a JSON list at the top level"),
    "null": ("null", "a JSON NoneType at the top level"),
    "no weight_map": ('{"metadata": {}}', "weight_map: expected an object, got NoneType"),
    "weight_map a list": ('{"weight_map": ["a.safetensors"]}', "weight_map: expected an object, got list"),
    "weight_map a string": ('{"weight_map": "a.safetensors"}', "weight_map: expected an object, got str"),
    "weight_map twice": ('{"weight_map": {}, "weight_map": {"x": "a.safetensors"}}', "the key 'weight_map' twice"),
    "a tensor twice": ('{"weight_map": {"x": "a.safetensors", "x": "sub/b.safetensors"}}', "the key 'x' twice"),
    "a tensor twice, once escaped": ('{"weight_map": {"x": "a.safetensors", "\\u0078": "b"}}', "the key 'x' twice"),
    "deep": ("[" * 100_000, "expected a JSON file"),
    "deep objects": ('{"weight_map":' * 100_000, "expected a JSON file"),
    "a long number": ('{"weight_map": {}, "metadata": ' + "9" * 10_000 + "}", "expected a JSON file"),
}


@pytest.mark.parametrize(("text", "message"), BAD_INDEXES.values(), ids=BAD_INDEXES)
def test_a_damaged_index_is_refused_by_name(text: str | bytes, message: str, place: Place) -> None:
    (place.directory / INDEX).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=message) as raised:
        CheckpointFiles(place.directory)
    assert str(raised.value).startswith(f"{place.directory / INDEX}: ")


def test_an_index_that_is_a_folder_is_refused(place: Place) -> None:
    (place.directory / INDEX).unlink()
    (place.directory / INDEX).mkdir()
    with pytest.raises(CheckpointError, match=INDEX):
        CheckpointFiles(place.directory)


DISAGREEING: dict[str, tuple[dict[str, str], str, str]] = {
    "file missing": (WEIGHT_MAP | {"x": "c.safetensors"}, "x", r"c\.safetensors: there is no such file"),
    "name too long": (WEIGHT_MAP | {"x": "c" * 300 + ".safetensors"}, "x", r"ccc\.safetensors: "),
    "folder missing": (WEIGHT_MAP | {"x": "no/c.safetensors"}, "x", r"c\.safetensors: there is no such file"),
    "tensor missing": (WEIGHT_MAP | {"w": "a.safetensors"}, "x", r"a\.safetensors: w: the index says it is here"),
    "tensor of the other file": (WEIGHT_MAP | {"z": "a.safetensors"}, "z", r"a\.safetensors: z: the index says"),
    "tensor not listed": ({"x": "a.safetensors"}, "x", r"a\.safetensors: y: is here, but the index does not say so"),
    "a file as a folder": (WEIGHT_MAP | {"x": "a.safetensors/c.safetensors"}, "x", r"a\.safetensors/c\.safetensors: "),
}


@pytest.mark.parametrize(("weight_map", "name", "message"), DISAGREEING.values(), ids=DISAGREEING)
def test_an_index_at_odds_with_its_files_is_refused(
    weight_map: dict[str, str], name: str, message: str, place: Place
) -> None:
    place.write_index({"weight_map": weight_map})
    files = CheckpointFiles(place.directory)
    for _ in range(2):  # asked again, it has not been forgotten
        with pytest.raises(CheckpointError, match=message):
            files.tensor(name)


def test_all_that_an_index_gets_wrong_of_a_file_is_named(place: Place) -> None:
    more = {f"more{i}": "a.safetensors" for i in range(60)}
    place.write_index({"weight_map": {"x": "a.safetensors"} | more})
    with pytest.raises(CheckpointError) as raised:
        CheckpointFiles(place.directory).tensor("x")
    assert {problem.split(": ")[0] for problem in raised.value.problems} == {"y", *more}
    assert str(raised.value).splitlines()[-1] == "and 21 more"


INDEX_TEXT = json.dumps({"metadata": {"total_size": 11}, "weight_map": WEIGHT_MAP}).encode()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return placed(tmp_path_factory.mktemp("index"))


def assert_index_refused_or_right(place: Place, text: bytes) -> None:
    """Whatever an index says: of the directory's tensors, or an error; and no other file is touched."""
    right = {name: data for entries in SHARDS.values() for name, (_, _, data) in entries.items()}
    (place.directory / INDEX).write_bytes(text)
    with recorded_opens() as opened, contextlib.suppress(CheckpointError):
        files = CheckpointFiles(place.directory)
        for name in files.where:
            with contextlib.suppress(CheckpointError):
                assert files.tensor(name).read().tobytes() == right[name]
    assert opened[0] == place.directory / INDEX
    assert all(path.is_relative_to(place.directory) for path in opened)


@given(text=edited(INDEX_TEXT))
def test_fuzzed_indexes_are_refused_or_lead_to_the_same_tensors(text: bytes, shared: Place) -> None:
    assert_index_refused_or_right(shared, text)


PARTS = ["..", ".", "", "/", "\\", "sub", "a.safetensors", "b.safetensors", "canary.safetensors", "checkpoint", "\0"]
FILE_NAMES = st.lists(st.sampled_from(PARTS), max_size=4).map("/".join) | st.text(max_size=8) | JSON


@given(
    weight_map=st.dictionaries(st.sampled_from("xyzw") | st.text(max_size=3), FILE_NAMES, max_size=3) | JSON,
    kept=st.booleans(),
)
def test_indexes_of_any_json_lead_to_no_other_file(weight_map: Any, kept: bool, shared: Place) -> None:
    if kept and isinstance(weight_map, dict):
        weight_map = WEIGHT_MAP | weight_map
    assert_index_refused_or_right(shared, json.dumps({"weight_map": weight_map}).encode())


# --- Directories without an index ------------------------------------------------------------------------------------


def test_without_an_index_all_files_of_the_directory_are_read(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(packed({"x": ("F32", [1], b"1234")}))
    (tmp_path / "b.safetensors").write_bytes(packed({"y": ("F32", [1], b"5678")}))
    assert contents(CheckpointFiles(tmp_path)) == {"x": b"1234", "y": b"5678"}
    assert contents(CheckpointFiles(tmp_path / "b.safetensors")) == {"y": b"5678"}


def test_one_tensor_in_two_files_is_refused_by_all_their_names(tmp_path: pathlib.Path) -> None:
    for file in ("a.safetensors", "b.safetensors"):
        (tmp_path / file).write_bytes(packed({"x": ("F32", [1], b"1234")}))
    with pytest.raises(CheckpointError, match=r"x: both in a\.safetensors and in b\.safetensors"):
        CheckpointFiles(tmp_path)


def test_a_damaged_file_among_others_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(CONTENT)
    (tmp_path / "b.safetensors").write_bytes(CONTENT[:-1])
    with pytest.raises(CheckpointError, match=r"b\.safetensors: expected a safetensors file"):
        CheckpointFiles(tmp_path)


@pytest.mark.parametrize("name", ["nothing", "nothing.json", "nothing.safetensors", "nothing/model.safetensors"])
def test_a_path_where_nothing_is_is_refused_by_name(name: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match=f"{name}: there is no such file"):
        CheckpointFiles(tmp_path / name)


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
def test_a_pickle_under_the_name_of_a_safetensors_file_is_refused(
    name: str, bomb: bytes, tmp_path: pathlib.Path
) -> None:
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
