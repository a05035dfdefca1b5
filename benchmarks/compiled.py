"""Reports of the TPU compiler at realistic sizes, kept in `benchmarks/results`; takes half an hour on one core.

`python -m benchmarks.compiled` runs them all, `python -m benchmarks.compiled core-forward` only one.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
from collections.abc import Sequence

LENGTHS = "4096,16384,65536,131072,262144"
_MORE_VMEM = ("--compiler-option", "xla_tpu_scoped_vmem_limit_kib=49152")

_SPLASH = ("--implementation", "splash")
_CSA = ("--what", "layer", "--layer", "csa", "--implementation", "chunked")

REPORTS: dict[str, tuple[str, ...]] = {
    "core-forward": ("--seq", LENGTHS, "--implementation", "splash,chunked"),
    "core-backward": ("--seq", LENGTHS, "--implementation", "splash,chunked", "--backward"),
    "dynamic-forward": ("--seq", LENGTHS, "--implementation", "splash_dynamic", *_MORE_VMEM),
    "dynamic-backward": ("--seq", LENGTHS, "--implementation", "splash_dynamic", "--backward", *_MORE_VMEM),
    "dynamic-default": ("--seq", "4096,65536,131072", "--implementation", "splash_dynamic"),
    "layer-backward": ("--what", "layer", "--seq", "4096,65536,131072", *_SPLASH, "--backward"),
    "csa-backward": (*_CSA, "--seq", "4096,32768,65536,131072", "--backward"),
    "csa-loss": (*_CSA, "--seq", "32768,65536", "--backward", "--indexer-loss"),
    "time": ("--seq", "4096,131072", *_SPLASH, "--backward", "--no-cycles"),
    **{
        target: ("--target", target, "--seq", "4096,32768", *_SPLASH, "--backward")
        for target in ("v5e", "v6e", "tpu7x")
    },
}
"""Arguments of `foveal compile` by the name of the report. Dynamic masks need large tiles, and these more VMEM than
the compiler gives kernels by default: without it, they are refused from 131072 rows on, with gradients from 65536."""


def command(name: str) -> list[str]:
    """Command line of a report."""
    return [sys.executable, "-m", "foveal", "compile", *REPORTS[name], "--json"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the reports and write one line of JSON per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*REPORTS, []], help="reports to run (default: all)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results")
    args = parser.parse_args(arguments)
    for name in args.names or REPORTS:
        # Code 1: the compiler refuses some cases, as the report says.
        done = subprocess.run(command(name), stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode not in (0, 1) or not done.stdout:
            raise SystemExit(f"{name}: foveal compile ended with code {done.returncode}")
        path = args.out / f"compile-{name}.jsonl"
        path.write_text(done.stdout)
        print(path)


if __name__ == "__main__":
    main()
