"""The indexer's selection compared with one from materialised scores: CPU time and resident memory, one thread.

    python -m benchmarks.indexer --output benchmarks/results

Times are CPU seconds of this process, medians of interleaved rounds; utilisation is the rate of scoring all visible
entries relative to that of a large matmul in the same rounds. Each row counts the queries for which the two
select differently.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

if __name__ == "__main__":
    # One core for XLA before it is loaded: its pool is as large as the number of cores it may use.
    if hasattr(os, "sched_setaffinity"):
        # The parent process has pinned itself, and its children with it: "all" undoes that.
        every_core = sys.argv[1:] == ["--memory", "all"]
        cores = set(range(os.cpu_count() or 1)) if every_core else {max(os.sched_getaffinity(0))}
        os.sched_setaffinity(0, cores)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure import interleaved, matmul_rate, peak_resident_growth
from foveal import Documents, Visibility, select_entries

RATIO, WINDOW, PEAK_SIZE = 4, 128, 2048


class Case(NamedTuple):
    """Sizes of a case: S rows, I indexer heads of J dims, K entries to select."""

    length: int
    heads: int
    dim: int
    top_k: int

    @property
    def visibility(self) -> Visibility:
        """Visibility of one document."""
        return Visibility(Documents.unpacked(1, self.length), WINDOW, RATIO)

    @property
    def operations(self) -> int:
        """Operations that the scores of all visible entries take."""
        return int(np.asarray(self.visibility.entry_counts, np.int64).sum()) * 2 * self.heads * self.dim


TIMED = (Case(4096, 64, 128, 512), Case(8192, 16, 64, 512))
LARGE = Case(65536, 16, 64, 512)
"""A case of which only the memory is measured."""


def arrays(case: Case) -> list[jax.Array]:
    """Random queries, weights and keys."""
    rng = np.random.default_rng(0)
    rows, slots = case.length, case.length // RATIO
    shapes = (1, rows, case.heads, case.dim), (1, rows, case.heads), (1, slots, case.dim)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def ours(case: Case) -> Callable[..., jax.Array]:
    """Selection by blocks, as in this library."""
    return jax.jit(lambda *args: select_entries(*args, visibility=case.visibility, top_k=case.top_k))


def materialised(case: Case) -> Callable[..., jax.Array]:
    """Selection from all scores at once, as peers in JAX do it."""

    def choose(q: jax.Array, weights: jax.Array, keys: jax.Array) -> jax.Array:
        dots = jnp.einsum("btij,bcj->btic", q, keys)
        scores = jnp.sum(jax.nn.relu(dots) * weights[..., None], axis=2)
        best, slots = jax.lax.top_k(jnp.where(case.visibility.entry_mask(), scores, -jnp.inf), case.top_k)
        return jnp.where(best > -jnp.inf, slots, -1)

    return jax.jit(choose)


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Measure a case and return its row."""
    args = arrays(case)
    runs = {"ours": ours(case), "materialised": materialised(case)}
    found = {name: np.sort(run(*args), axis=-1) for name, run in runs.items()}
    timed = {name: lambda run=run: run(*args).block_until_ready() for name, run in runs.items()}
    seconds = interleaved(timed | {"peak": matmul_rate("float32", PEAK_SIZE)}, rounds, settle=frozenset({"peak"}))
    peak = 2 * PEAK_SIZE**3 / seconds.pop("peak")
    return {
        **case._asdict(),
        "seconds": seconds,
        "peak_gflops": peak / 1e9,
        "utilisation": {name: case.operations / taken / peak for name, taken in seconds.items()},
        # Sums in another order may rank two near-equal scores the other way round.
        "queries_that_differ": int((found["ours"] != found["materialised"]).any(axis=-1).sum()),
        "jax": jax.__version__,
    }


def resident_growth(case: Case) -> int:
    """Bytes by which resident memory grows beyond the arguments and the result, in this process."""
    args, run = arrays(case), ours(case)
    compiled = run.lower(*args).compile()  # pyright: ignore[reportFunctionMemberAccess]
    grown = peak_resident_growth(lambda: compiled(*args).block_until_ready())
    return grown - case.length * case.top_k * 4


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line of JSON per case, and keep them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.indexer", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--output", type=pathlib.Path, help="folder for JSON lines")
    parser.add_argument("--memory", choices=("one", "all"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.memory:  # in a process of its own: memory once resident stays so
        print(resident_growth(LARGE))
        return
    rows = [measure(case, options.rounds) for case in TIMED]
    # XLA of JAX 0.12 keeps much memory of its own if its pool has one thread, so measure both.
    command = [sys.executable, "-m", "benchmarks.indexer", "--memory"]
    grown = {
        cores: int(subprocess.run([*command, cores], check=True, capture_output=True, text=True).stdout)
        for cores in ("one", "all")
    }
    rows.append({**LARGE._asdict(), "resident_bytes": grown, "jax": jax.__version__})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    print(lines, end="")
    if options.output:
        (options.output / f"indexer-jax{jax.__version__}.jsonl").write_text(lines)


if __name__ == "__main__":
    main()
