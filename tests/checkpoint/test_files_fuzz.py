"""Safetensors files fuzzed: an error that names the file, or what safetensors itself reads."""

import json
import pathlib
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.hostile import (
    CONTENT,
    DATA,
    HEADER,
    JSON,
    assert_refused_or_the_same,
    by_safetensors,
    edited,
    framed,
)


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
