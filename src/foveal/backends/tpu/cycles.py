"""Cycles of the fused kernels, from the compiler's schedules and the blocks of slots that tiles see."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foveal.backends.tpu.plan import FusedPlan
from foveal.backends.tpu.tiles import BLOCKS, tile_arrays
from foveal.geometry import Visibility
from foveal.schedule import KernelSchedule


def kernel_cycles(
    schedules: Sequence[KernelSchedule], forward: FusedPlan, backward: FusedPlan, visibility: Visibility
) -> int | None:
    """Bundles that one core issues in all fused kernels of a program; None if there is no such kernel.

    Raises:
        ValueError: the kernels do not have the expected conditional parts.
    """
    plans = {"foveal_forward": (forward, 0), "foveal_backward": (backward, 1)}
    named = [(plans.get(schedule.name.split(".")[0]), schedule) for schedule in schedules]
    each = [_kernel(schedule, *plan, visibility) for plan, schedule in named if plan is not None]
    return sum(each) if each else None


def _kernel(schedule: KernelSchedule, plan: FusedPlan, rare: int, visibility: Visibility) -> int:
    """Bundles of a kernel's tiles. The first `rare` conditional parts, for rows that are quiet, are not counted."""
    blocks = np.asarray(tile_arrays(plan, visibility).spans)[..., BLOCKS]
    parts, loops = schedule.branches[rare:], schedule.loops
    if not plan.loops:
        parts, loops = (0, 0), (0,)
    elif len(parts) != 2 or len(loops) != 1:
        raise ValueError(
            f"schedules: expected a part without and a part with a loop in a step, and one loop, got {schedule}"
        )
    (alone, looped), (block,) = parts, loops
    further = blocks > 0
    return int(
        blocks.size * schedule.step + (~further).sum() * alone + further.sum() * (looped - block) + blocks.sum() * block
    )
