"""Number of heads that the kernels take at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

from foveal.backends.splash.blocks import LANES, SplashBlocks
from foveal.backends.splash.layout import KeyLayout

_AT_A_TIME = 1 << 30
"""Bytes that the kernels may use per call for its heads, besides the arrays of all heads.

A tile of stacked heads, or one head of a very long row, may need more."""


@dataclasses.dataclass(frozen=True)
class SomeHeads:
    """Memory that a kernel needs for its heads.

    Attributes:
        head_bytes: bytes per head.
        stacked: heads per tile, which stay together.
    """

    head_bytes: int
    stacked: int = 1

    def fit(self, heads: int) -> bool:
        """Whether this many heads fit at a time."""
        return heads * self.head_bytes <= _AT_A_TIME

    def heads_per_call(self, heads: int) -> int:
        """Largest divisor of `heads` that fits, in whole tiles; at least one tile."""
        least = self.stacked if heads % self.stacked == 0 else 1
        return max((n for n in range(least, heads + 1, least) if heads % n == 0 and self.fit(n)), default=least)


def forward_heads(layout: KeyLayout, blocks: SplashBlocks, q: Any) -> SomeHeads:
    """Forward kernel, per head: queries, output, and log-sum-exps and largest logits, each repeated 128 times."""
    vector = q.shape[-1] * q.dtype.itemsize
    return SomeHeads(layout.padded_rows * (2 * vector + 2 * 4 * LANES), blocks.stacked_heads)


def backward_heads(layout: KeyLayout, q: Any) -> SomeHeads:
    """Backward kernel, per head: three partial sums of d_q and their sum, the queries, the output's gradient."""
    return SomeHeads(layout.padded_rows * 6 * q.shape[-1] * q.dtype.itemsize)
