"""Measurement of CPU time, resident memory and the machine's own matmul rate."""

from __future__ import annotations

import pathlib
import statistics
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

Run = Callable[[], object]


def interleaved(runs: Mapping[str, Run], rounds: int, *, settle: frozenset[str] = frozenset()) -> dict[str, float]:
    """Median CPU seconds of each, run in turn so that a disturbance hits all alike. Each is warmed up once.

    Runs named in `settle` are repeated untimed before each timing: a short run after a long one would otherwise pay
    for the state in which that left memory and caches.
    """
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            if name in settle:
                run()
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def matmul_rate(dtype: str, size: int = 2048) -> Run:
    """A square matmul of 2 size^3 operations, whose operations per second are taken as one core's peak."""
    a = jnp.ones((size, size), dtype)
    multiply = jax.jit(lambda x: jnp.dot(x, x, preferred_element_type=jnp.float32))
    return lambda: multiply(a).block_until_ready()


def peak_resident_growth(run: Run) -> int:
    """Bytes by which the process's resident memory rises above its level while `run` runs for the first time.

    It must be the first time: allocators keep memory, so that a second run would seem to need none.
    """
    # ru_maxrss never falls, but the kernel resets its high-water mark when 5 is written here.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    run()
    return max(_status("VmHWM") - before, 0)


def _status(field: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
