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
    """Bundles of a kernel's tiles, a lower bound: steps that only finish raw keys are not counted.

    Nor are the `rare` first of its conditional parts, for quiet rows. Two parts may follow, without a loop over blocks
    of slots and with one.
    """
    blocks = np.asarray(tile_arrays(plan, visibility).spans)[..., BLOCKS]
    parts, loops = schedule.branches[rare:], schedule.loops
    if (len(schedule.branches), len(loops)) != (rare + 2 * plan.loops, int(plan.loops)):
        raise ValueError(f"schedules: expected {rare + 2 * plan.loops} conditional parts in a step, got {schedule}")
    steps = blocks.size * schedule.step
    if not plan.loops:
        return steps
    (alone, looped), (block,), further = parts, loops, blocks > 0
    return int(steps + (~further).sum() * alone + further.sum() * (looped - block) + blocks.sum() * block)
