"""Attention compared with its peers: CPU time and resident memory, one thread each, in interleaved rounds.

    python -m benchmarks.attention --suite core --output benchmarks/results

A ratio is printed only where the contenders agree on outputs and gradients of that case; queries of a CSA layer
for which rounding decides between two entries are not compared. Times are CPU seconds of this process, medians of
interleaved rounds; utilisation is the rate of useful operations (`foveal.flops`) relative to that of a large matmul
measured in the same rounds. Memory is the rise of resident memory above its level before the call, each contender in a
process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import subprocess
import sys
from typing import Any

if __name__ == "__main__":
    # One core for XLA, torch and the BLAS below them, before any of them is loaded: XLA's pool has as many threads as
    # there are cores it may use, whatever its flags say.
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()

import foveal
from benchmarks import report
from benchmarks.cases import Case, suite
from benchmarks.contenders import Contender, Results, build, undecided_queries
from benchmarks.measure import interleaved, matmul_rate, peak_resident_growth
from foveal.flops import core_cost, layer_cost
from foveal.testing.numerics import assert_close, assert_gradients_close

SUITES = ("quick", "core", "layer", "long", "bf16")
PEAK_SIZE = 2048
UNDECIDED_SHARE = 0.02
"""Largest share of the queries that a comparison may leave out because rounding decides what they select."""
SCORES_LIMIT = 2 << 30
"""Bytes of scores beyond which the contenders that materialise them are left out."""


def main(arguments: list[str] | None = None) -> int:
    """Run a suite; return 1 if the contenders of any case disagree."""
    options = _parser().parse_args(arguments)
    if options.memory_of:  # the child process of `_resident`
        case = Case(**json.loads(options.memory_of[0]))
        print(peak_resident_growth(build(case, options.memory_of[1]).run))
        return 0
    rows = []
    for case in suite(options.suite):
        rows.append(measure(case, options.rounds, memory=not options.no_memory))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    if options.output:
        report.write(rows, options.output, options.suite)
    print(report.table(rows))
    return int(any(row["disagreement"] for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.add_argument("--suite", choices=SUITES, default="quick")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--no-memory", action="store_true", help="do not measure resident memory")
    parser.add_argument("--output", type=pathlib.Path, help="folder for JSON lines, a table and a plot")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    return parser


def measure(case: Case, rounds: int, *, memory: bool) -> dict[str, Any]:
    """Measure a case: times, utilisation, memory and agreement of every contender that can run it."""
    names = contenders(case)
    undecided = undecided_queries(case)
    ready = {name: build(case, name, undecided) for name in names}
    disagreement = _disagreement(case, ready, undecided)
    seconds = interleaved(
        {name: contender.run for name, contender in ready.items()} | {"peak": matmul_rate(case.dtype, PEAK_SIZE)},
        rounds,
        settle=frozenset({"peak"}),
    )
    peak = 2 * PEAK_SIZE**3 / seconds.pop("peak")
    cost = (core_cost if case.what == "core" else layer_cost)(
        case.config, case.layer_type, case.documents, backward=case.backward
    )
    return {
        "case": case.name,
        **dataclasses.asdict(case),
        "seconds": seconds,
        "peak_gflops": peak / 1e9,
        "utilisation": {name: cost.operations / taken / peak for name, taken in seconds.items()},
        "resident_bytes": {name: _resident(case, name) for name in names} if memory else {},
        "temporaries_bytes": {n: c.temporaries for n, c in ready.items() if c.temporaries is not None},
        "disagreement": disagreement,
        "queries_not_compared": len(undecided),
        "versions": versions(),
        "machine": platform.processor() or platform.machine(),
    }


def contenders(case: Case) -> list[str]:
    """Contenders that can run the case: with materialised scores only if these fit, transformers only if installed."""
    scores = 4 * case.heads * case.length * (case.length + case.visibility.slots)
    names = ["chunked"]
    if scores <= SCORES_LIMIT:
        names.append("dense")
        if case.dtype == "float32" and importlib.util.find_spec("transformers") is not None:
            names.append("transformers")
    return names


def _disagreement(case: Case, ready: dict[str, Contender], undecided: tuple[int, ...]) -> str:
    """Empty if every contender's outputs and gradients equal the first one's, else what differs."""

    def results(name: str) -> Results:
        found = ready[name].results()
        out = found["out"].copy()
        out[:, list(undecided)] = 0.0
        return found | {"out": out}

    if len(undecided) > case.length * UNDECIDED_SHARE:
        return f"rounding decides what {len(undecided)} queries select: too many to compare without them"
    first, *others = ready
    ours = results(first)
    for name in others:
        theirs = results(name)
        if ours.keys() != theirs.keys():
            return f"{first} gives {sorted(ours)}, {name} gives {sorted(theirs)}"
        try:
            assert_close(ours["out"], theirs["out"], case.dtype)
            gradients = ours.keys() - {"out"}
            assert_gradients_close({k: ours[k] for k in gradients}, {k: theirs[k] for k in gradients}, case.dtype)
        except AssertionError as error:
            return f"{first} and {name}: {error}"
    return ""


def _resident(case: Case, contender: str) -> int:
    spec = json.dumps(dataclasses.asdict(case))
    command = [sys.executable, "-m", "benchmarks.attention", "--memory-of", spec, contender]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def versions() -> dict[str, str]:
    """Versions of the packages compared."""
    found = {}
    for name in ("jax", "jaxlib", "torch", "transformers"):
        if importlib.util.find_spec(name) is not None:
            found[name] = importlib.metadata.version(name)
    return found | {"foveal": foveal.__version__, "python": platform.python_version()}


if __name__ == "__main__":
    sys.exit(main())
