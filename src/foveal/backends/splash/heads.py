"""How many heads the kernels take at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

from foveal.backends.splash.blocks import LANES, SplashBlocks
from foveal.backends.splash.layout import KeyLayout

_AT_A_TIME = 1 << 30
"""Bytes that the kernels of some heads may take for themselves, besides the arrays of all heads.

A tile of stacked heads may need more, and one head of a very long row."""


@dataclasses.dataclass(frozen=True)
class SomeHeads:
    """A kernel's need of memory.

    Attributes:
        head_bytes: of one head.
        stacked: heads of a tile, which stay together.
    """

    head_bytes: int
    stacked: int = 1

    def fit(self, heads: int) -> bool:
        """Whether so many heads have space together."""
        return heads * self.head_bytes <= _AT_A_TIME

    def heads_per_call(self, heads: int) -> int:
        """The largest divisor of `heads` that has space, in whole tiles; a tile at least."""
        least = self.stacked if heads % self.stacked == 0 else 1
        return max((n for n in range(least, heads + 1, least) if heads % n == 0 and self.fit(n)), default=least)


def forward_heads(layout: KeyLayout, blocks: SplashBlocks, q: Any) -> SomeHeads:
    """Of a head its queries and output, and its log-sum-exps and largest logits, which come 128 times over."""
    vector = q.shape[-1] * q.dtype.itemsize
    return SomeHeads(layout.padded_rows * (2 * vector + 2 * 4 * LANES), blocks.stacked_heads)


def backward_heads(layout: KeyLayout, q: Any) -> SomeHeads:
    """Of a head three partial sums of the queries' gradient, and the sum; its queries and the output's gradient."""
    return SomeHeads(layout.padded_rows * 6 * q.shape[-1] * q.dtype.itemsize)
