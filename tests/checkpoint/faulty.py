"""Tiny checkpoints to put something wrong into, and all that is said about it."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from foveal import AttentionConfig, CheckpointError, load_attention
from foveal.checkpoint.files import SINGLE, read_header
from tests.checkpoint.hostile import Held, packed

CONFIG = AttentionConfig.tiny()  # layer 0 slides, 1 is CSA, 2 is HCA
L0, L1, L2 = "layers.0.attn.", "layers.1.attn.", "layers.2.attn."
WQ_A, WKV = L0 + "wq_a", L0 + "wkv"
BYTES = {"F64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I8": 1, "BOOL": 1}
Tensors = dict[str, Held]
Change = dict[str, Held | None]
"""Tensors to put in; None takes one out."""
Checkpoint = Callable[..., pathlib.Path]
"""The fixture `checkpoint`."""


def zeros(dtype: str, *shape: int) -> Held:
    size = BYTES.get(dtype, 1)
    for extent in shape:
        size *= extent
    return Held(dtype, shape, bytes(size))


def written(directory: pathlib.Path, tensors: Tensors) -> pathlib.Path:
    directory.mkdir(exist_ok=True)
    (directory / SINGLE).write_bytes(packed(tensors))
    (directory / "config.json").write_text(json.dumps(CONFIG.to_hf_config()))
    return directory


def changed(tensors: Tensors, change: Change) -> Tensors:
    return {name: held for name, held in (tensors | change).items() if held is not None}


def tensors_of(file: pathlib.Path) -> Tensors:
    return {name: Held(t.dtype, t.shape, t.read().tobytes()) for name, t in read_header(file).items()}


def problems_of(path: pathlib.Path, *args: Any, **kwargs: Any) -> list[str]:
    """All of them, which must be in the message too, each on a line of its own behind the checkpoint's path."""
    with pytest.raises(CheckpointError) as raised:
        load_attention(path, *args, **kwargs)
    problems = list(raised.value.problems)
    assert str(raised.value).splitlines() == [f"{path}: {problem}" for problem in problems]
    assert len(set(problems)) == len(problems)
    return problems
