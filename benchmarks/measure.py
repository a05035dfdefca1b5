"""CPU time, resident memory and the machine's own matmul rate."""

from __future__ import annotations

import pathlib
import statistics
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

Run = Callable[[], object]


def interleaved(runs: Mapping[str, Run], rounds: int, *, settle: frozenset[str] = frozenset()) -> dict[str, float]:
    """Median CPU seconds of each, taken in turn so that a disturbance hits all alike. Each is warmed up once.

    What is in `settle` is run once more, untimed, before each time: for something short that follows on something
    long, whose memory and caches it would otherwise pay for.
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
    """A square matmul whose operations per second are taken for one core's peak: 2 size^3 operations."""
    a = jnp.ones((size, size), dtype)
    multiply = jax.jit(lambda x: jnp.dot(x, x, preferred_element_type=jnp.float32))
    return lambda: multiply(a).block_until_ready()


def peak_resident_growth(run: Run) -> int:
    """Bytes by which the process's resident memory rises above its level while `run` runs for the first time.

    The first time, since allocators keep what they have once had: a second run would seem to need nothing.
    """
    # ru_maxrss never falls: the high-water mark is reset through the kernel's own switch.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    run()
    return max(_status("VmHWM") - before, 0)


def _status(field: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
