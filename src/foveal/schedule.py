"""Read the schedules of Pallas kernels from the dumps of the TPU compiler.

A kernel's final form is a list of bundles, each the instructions that a core issues in one cycle. The number of bundles
that one step of a kernel's grid executes is a lower bound on its cycles: waits for memory come on top.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

_BUNDLE = re.compile(r"^ *(0|0x[0-9a-f]+) +(?:L[HBE]|P[BF]|CT)?: *((?:> *)*)\{", re.M)
_BRANCH = re.compile(r"\bsbr\.rel \(.*?\) target = \$region(\d+)")
_STARTS = re.compile(r"\b(?:Start region|Start/End empty region) (\d+)")
_DELAY_SLOTS = 4
"""Number of bundles after a branch that are executed whether it is taken or not."""

_TRANSFER = re.compile(r"\bdma\.|\bvsync")
"""Transfers of blocks in and out, begun or waited for: conditional ones come from the grid, not from the kernel."""


@dataclasses.dataclass(frozen=True)
class KernelSchedule:
    """The bundles of one step of a Pallas kernel's grid.

    Attributes:
        name: the kernel's name, with the compiler's number.
        step: number of bundles that every step executes.
        branches: number of bundles of each conditional part, in the order of the code: the kernel's own (`pl.when`),
            and those in which the grid copies results that stay in VMEM.
        loops: number of bundles of each loop within a step, in the order of the code; counted once in the parts above.
    """

    name: str
    step: int
    branches: tuple[int, ...]
    loops: tuple[int, ...]


def dump_flags(directory: str | Path) -> str:
    """Flags for the environment variable LIBTPU_INIT_ARGS, set before libtpu is loaded, that dump the schedules.

    Raises:
        ValueError: a path with a space, which would end the flag.
    """
    if re.search(r"\s", str(directory)):
        raise ValueError(f"directory: expected a path without spaces, got {str(directory)!r}")
    return (
        f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final_bundles"
    )


def kernel_schedules(directory: str | Path) -> list[KernelSchedule]:
    """Return the schedules of the Pallas kernels dumped by `dump_flags` to a directory, in order of compilation.

    Args:
        directory: the dump of one program.
    """
    found = []
    for analysis in sorted(Path(directory).glob("*schedule-analysis_final_bundles.txt")):
        if "tpu_custom_call" in analysis.read_text() and not analysis.name.split("-", 1)[1].startswith("TLP"):
            name = re.sub(r"-\d+-schedule-analysis_final_bundles\.txt$", "", analysis.name)
            (bundles,) = (
                path
                for path in Path(directory).glob(f"{name}-*-final_bundles.txt")
                if re.fullmatch(r"-\d+-final_bundles\.txt", path.name.removeprefix(name))
            )
            found.append(_schedule(name.split("-", 1)[1], bundles.read_text()))
    return found


@dataclasses.dataclass(frozen=True)
class _Part:
    """Bundles [start, end), and the conditional parts within."""

    start: int
    end: int
    parts: tuple[_Part, ...] = ()

    @property
    def size(self) -> int:
        return self.end - self.start


def _schedule(name: str, text: str) -> KernelSchedule:
    matches = list(_BUNDLE.finditer(text))
    ends = [match.start() for match in matches[1:]] + [len(text)]
    bodies = [text[match.start() : end] for match, end in zip(matches, ends, strict=True)]
    depths = [match[2].count(">") for match in matches]
    inside = [i for i, depth in enumerate(depths) if depth] or [*range(len(depths))]  # a kernel without a grid
    runs = [(depth, sum(1 for _ in run)) for depth, run in itertools.groupby(depths)]
    loops = tuple(size for (outer, _), (depth, size) in itertools.pairwise(runs) if depth > max(outer, 1))
    step = _nested(inside[0], inside[-1] + 1, _conditional(bodies, inside))
    base = step.size
    # Steps before the first and after the last only move data: all the work is under one condition.
    while len(whole := [part for part in step.parts if part.size > 0.8 * step.size]) == 1 and whole[0].parts:
        step = whole[0]
    own = (p for p in step.parts if not any(_TRANSFER.search(body) for body in bodies[p.start : p.end]))
    branches = tuple(part.size for part in own)
    return KernelSchedule(name, base - sum(branches), branches, loops)


def _conditional(bodies: list[str], inside: list[int]) -> list[tuple[int, int]]:
    """The ranges of bundles that a branch within the grid's step may skip."""
    starts = {int(region): i for i, body in enumerate(bodies) for region in _STARTS.findall(body)}
    branches = ((i, starts[int(region)]) for i in inside for region in _BRANCH.findall(bodies[i]))
    return [
        (i + 1 + _DELAY_SLOTS, target)
        for i, target in branches
        if i < target <= inside[-1] + 1 and target - i - 1 > _DELAY_SLOTS
    ]


def _nested(start: int, end: int, ranges: list[tuple[int, int]]) -> _Part:
    within = [r for r in ranges if start <= r[0] and r[1] <= end and r != (start, end)]
    outermost = [r for r in within if not any(o != r and o[0] <= r[0] and r[1] <= o[1] for o in within)]
    return _Part(start, end, tuple(_nested(*r, within) for r in sorted(set(outermost))))
