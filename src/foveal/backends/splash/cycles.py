"""Cycles of the Splash kernels, from the compiler's schedules and the list of tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from foveal.backends.splash.blocks import SplashBlocks
from foveal.backends.splash.heads import backward_heads
from foveal.backends.splash.mask import HCAStaticMask
from foveal.backends.splash.mask_info import static_mask_info
from foveal.backends.splash.tokamax_splash import MaskInfo
from foveal.schedule import KernelSchedule


def kernel_cycles(schedules: Sequence[KernelSchedule], mask: HCAStaticMask, blocks: SplashBlocks, q: Any) -> int | None:
    """Bundles that one core issues in all Splash kernels of a program, for queries like `q` [B, S, H, D].

    None if there is no such kernel. The list of tiles says how often each conditional part of a kernel's step runs.
    Tokamax has the parts in this order: the first tile of a row of blocks (of a column, for the gradients of keys),
    tiles without a mask, tiles with one, the last tile of a row.

    Raises:
        ValueError: the kernels do not have Tokamax's conditional parts.
    """
    cycles = {"splash_mqa_fwd_residuals": _forward, "splash_mqa_dkv_no_residuals": _backward}
    named = [(cycles.get(schedule.name.split(".")[0]), schedule) for schedule in schedules]
    each = [of_kernel(schedule, mask, blocks, q) for of_kernel, schedule in named if of_kernel is not None]
    return sum(each) if each else None


class _Tiles(NamedTuple):
    """Numbers of tiles: in total, without and with a mask; and of their rows (columns, for the gradients of keys)."""

    total: int
    full: int
    partial: int
    lines: int

    @classmethod
    def from_mask_info(cls, info: MaskInfo) -> _Tiles:
        state, lines = np.asarray(info.block_mask), np.unique(np.asarray(info.active_rows))
        return cls(len(state), int((state == 2).sum()), int((state == 1).sum()), len(lines))


def _forward(schedule: KernelSchedule, mask: HCAStaticMask, blocks: SplashBlocks, q: Any) -> int:
    tiles = _Tiles.from_mask_info(static_mask_info(mask, blocks.q, blocks.kv))
    steps = _bundles(schedule, tiles, [tiles.lines, tiles.full, tiles.partial, tiles.lines])
    return q.shape[0] * q.shape[2] // blocks.stacked_heads * steps


def _backward(schedule: KernelSchedule, mask: HCAStaticMask, blocks: SplashBlocks, q: Any) -> int:
    """Bundles of the backward kernel: the first head of a call writes the keys' gradients, the others add to them."""
    tiles = _Tiles.from_mask_info(static_mask_info(mask, blocks.q_backward, blocks.kv_backward, is_dkv=True))
    heads_per_call = backward_heads(mask.layout, q).heads_per_call(q.shape[2])
    calls = q.shape[0] * q.shape[2] // heads_per_call
    if heads_per_call == 1:
        return calls * _bundles(schedule, tiles, [tiles.lines, tiles.full, tiles.partial, tiles.lines])
    counts = [heads_per_call * n for n in (tiles.lines, tiles.full, tiles.partial)]
    counts += [tiles.lines, (heads_per_call - 1) * tiles.lines]
    return calls * _bundles(schedule, tiles._replace(total=heads_per_call * tiles.total), counts)


def _bundles(schedule: KernelSchedule, tiles: _Tiles, counts: list[int]) -> int:
    """Bundles of a kernel; parts after its own conditional ones only copy results small enough to stay in VMEM.

    A tile with a mask takes about as much as one without: if not, these are not the expected parts.
    """
    parts = schedule.branches[: len(counts)]
    if len(parts) != len(counts) or schedule.loops or not 0.5 <= parts[2] / parts[1] <= 2:
        raise ValueError(f"schedules: expected {len(counts)} conditional parts and no loop in a step, got {schedule}")
    return tiles.total * schedule.step + sum(n * size for n, size in zip(counts, parts, strict=True))
