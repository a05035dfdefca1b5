"""Sizes on which mistakes show, and checkpoints of them."""

import dataclasses
import pathlib

import pytest

from foveal import AttentionConfig, Dialect
from foveal.checkpoint.files import SINGLE
from foveal.testing.checkpoints import write_random_checkpoint
from tests.checkpoint import faulty
from tests.checkpoint.faulty import CONFIG, Checkpoint, Tensors, tensors_of


@pytest.fixture(scope="session")
def ragged():
    """No size is a multiple of 128, most weights have more than one block, and blocks straddle the output's groups."""
    return dataclasses.replace(
        AttentionConfig.tiny(),
        hidden_size=160,
        q_lora_rank=136,
        num_attention_heads=6,
        head_dim=48,
        o_lora_rank=80,
        index_head_dim=40,
    )


@pytest.fixture(scope="session")
def written(tmp_path_factory, ragged):
    """Where a random checkpoint with these options lies; made once. Not to be changed."""
    made = {}

    def write(**options):
        key = tuple(sorted(options.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("random") / "checkpoint"
            write_random_checkpoint(made[key], ragged, **options)
        return made[key]

    return write


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A file to write to. Of the module: Hypothesis's examples share what a test is given."""
    return tmp_path_factory.mktemp("files") / "x.safetensors"


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Dialect, str], Tensors]:
    """Undamaged checkpoints, to be copied: each dialect in FP8, and DeepSeek's in bfloat16."""
    root, found = tmp_path_factory.mktemp("sound"), {}
    for dialect, weights in [*((dialect, "fp8") for dialect in Dialect), (Dialect.DEEPSEEK, "bfloat16")]:
        write_random_checkpoint(root / f"{dialect}-{weights}", CONFIG, dialect=dialect, weights=weights)
        found[dialect, weights] = tensors_of(root / f"{dialect}-{weights}" / SINGLE)
    return found


@pytest.fixture
def fp8(sound: dict[tuple[Dialect, str], Tensors]) -> Tensors:
    return dict(sound[Dialect.DEEPSEEK, "fp8"])


@pytest.fixture
def checkpoint(fp8: Tensors, tmp_path: pathlib.Path) -> Checkpoint:
    """Writes DeepSeek's checkpoint in FP8 with a change, or what else is given, and says where."""
    return lambda change=(), tensors=fp8: faulty.written(tmp_path, faulty.changed(tensors, dict(change)))
