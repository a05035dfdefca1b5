"""Sizes on which mistakes show, and checkpoints of them."""

import dataclasses

import pytest

from foveal import AttentionConfig
from foveal.testing.checkpoints import write_random_checkpoint


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
