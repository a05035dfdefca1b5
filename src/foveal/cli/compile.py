"""`foveal compile`: compiling attention with the TPU compiler, without a TPU."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from foveal.aot import TARGETS
from foveal.backends import registry
from foveal.cli.compile_spec import CompileCase
from foveal.cli.console import make_console, print_step, print_table, progress
from foveal.cli.devices import use_cpu
from foveal.cli.errors import CliError, require
from foveal.cli.numbers import TOKENS, int_between, tokens_between
from foveal.cli.presets import add_model, preset_of, read_model
from foveal.config import AttentionConfig
from foveal.extras import missing
from foveal.schedule import dump_flags

if TYPE_CHECKING:
    from rich.table import Table

_DESCRIPTION = """\
Compiles core attention or a whole layer for TPUs without having one, each case in a process of its own, and prints what
the compiler reports: whether it compiles, how long that takes, and the memory it plans. Sizes are those of a published
model. Nothing is run, so there are no TPU timings.
"""
_LEGEND = """\
mask, lower, compile: CPU seconds of listing the mask's tiles, of tracing and lowering, and of the compiler. HBM:
arguments, results and temporaries per chip. kernel: millions of bundles, one per cycle, that one core issues in the
attention kernels: a lower bound on cycles, without waits for memory. least: the useful operations or bytes divided by
the chip's peak rates, whichever takes longer.
"""
_SPEC, _DUMP = "--case-json", "--dump"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the parser of `foveal compile`."""
    summary = "compile attention for TPUs without a TPU, and report memory and verdicts"
    parser = subparsers.add_parser("compile", help=summary, description=_DESCRIPTION, epilog=TOKENS, allow_abbrev=False)
    add = parser.add_argument
    add("--target", choices=tuple(TARGETS), default="v5p", help="TPU to compile for (default: %(default)s)")
    add("--what", choices=("core", "layer"), default="core", help="core attention or a whole layer (default: core)")
    add("--layer", type=str.lower, choices=("hca", "csa", "sliding"), default="hca", help="layer type (default: hca)")
    add_model(parser)
    lengths = _list_of(tokens_between(1, 1 << 24))
    add("--seq", type=lengths, default=[4096], metavar="N,...", help="tokens per row (default: 4096)")
    add(
        "--implementation",
        type=_list_of(str),
        metavar="NAME,...",
        help=f"implementations of core attention: {', '.join(registry.names())} (default: the one that foveal chooses "
        "for such a call, named in the report)",
    )
    add("--backward", action="store_true", help="compile the backward pass too")
    add("--indexer-loss", action="store_true", help="compile a CSA layer's indexer loss too")
    add("--batch", type=int_between(1, 1 << 16), default=1, metavar="N", help="rows (default: 1)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of activations (default: bfloat16)")
    add("--mesh", type=_mesh, default=(), metavar="AXIS=N,...", help="several chips: data=N,tensor=N (default: one)")
    add(
        "--blocks",
        type=_list_of(int_between(1, 1 << 20)),
        metavar="N,...",
        help=f"sizes of a kernel's tiles: {_blocks_help()} (default: chosen by the kernel)",
    )
    add(
        "--compiler-option",
        type=_compiler_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an XLA option, such as xla_tpu_scoped_vmem_limit_kib=49152; may be repeated",
    )
    add("--timeout", type=int_between(1, 86400), default=900, metavar="S", help="most seconds per case (default: 900)")
    add("--no-cycles", action="store_true", help="skip the kernels' cycles; this halves the compile time")
    add("--json", action="store_true", help="print one line of JSON per case instead of a table")
    for hidden in (_SPEC, _DUMP):
        add(hidden, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compile every case and return 0 if all compile, else 1.

    Raises:
        CliError: bad arguments, or rich or libtpu are missing.
    """
    if args.case_json:  # this is the process of one case
        from foveal.cli.compile_case import compile_case

        print(json.dumps(compile_case(CompileCase.from_json(args.case_json), args.dump)))
        return 0
    require(("rich",), "demo")
    if importlib.util.find_spec("libtpu") is None:
        raise CliError(missing("libtpu", "tpu-aot"))
    cases = _cases(args)
    console = make_console()
    rows = []
    with progress(console, len(cases), disable=args.json) as advance:
        for case in cases:
            advance(_name(dataclasses.asdict(case)))
            rows.append({**dataclasses.asdict(case), **_in_a_process(case, args.timeout, cycles=not args.no_cycles)})
            if args.json:
                print(json.dumps(rows[-1]), flush=True)
            else:
                print_step(console, f"{_name(rows[-1])}: {rows[-1]['verdict']}")
    if not args.json:
        print_table(console, _table(rows))
        console.print(_LEGEND)
        for row in rows:
            if row["message"]:
                console.print(f"{_name(row)}: {row['message']}")
    return int(any(row["verdict"] != "compiles" for row in rows))


def _cases(args: argparse.Namespace) -> list[CompileCase]:
    unknown = [name for name in args.implementation or () if name not in registry.names()]
    if unknown:
        raise CliError(f"--implementation: expected some of {', '.join(registry.names())}, got {unknown[0]!r}")
    preset = preset_of(args)
    config = read_model(preset, args.config)
    _check_mesh(args, config)
    if args.indexer_loss and (args.what, args.layer) != ("layer", "csa"):
        raise CliError(f"--indexer-loss: expected --what layer --layer csa, got {args.what} and {args.layer}")
    if args.blocks:
        _check_blocks(args, config)
    cases = [
        CompileCase(
            args.target,
            args.what,
            args.layer,
            preset,
            length,
            implementation,
            args.backward,
            args.batch,
            args.dtype,
            args.mesh,
            tuple(args.blocks) if args.blocks else None,
            tuple(args.compiler_option),
            args.indexer_loss,
            args.config,
        )
        for length, implementation in itertools.product(args.seq, args.implementation or [""])
    ]
    return cases if args.implementation else [_with_choice(case) for case in cases]


def _with_choice(case: CompileCase) -> CompileCase:
    from foveal.cli.compile_case import chosen_implementation

    use_cpu()  # otherwise JAX, which needs some device, would look for a TPU and complain
    return dataclasses.replace(case, implementation=chosen_implementation(case), chosen=True)


def _check_mesh(args: argparse.Namespace, config: AttentionConfig) -> None:
    known = ("data", "tensor")
    axes = [axis for axis, _ in args.mesh]
    for axis in axes:
        if axis not in known or axes.count(axis) > 1:
            raise CliError(f"--mesh: expected each of {', '.join(known)} once at most, got {', '.join(axes)}")
    sizes = dict(args.mesh)
    chips, most = math.prod(sizes.values()), max(TARGETS[args.target].topologies)
    if chips > most:
        raise CliError(f"--mesh: expected {most} chips of {args.target} at most, got {chips}")
    if args.batch % sizes.get("data", 1):
        raise CliError(f"--mesh: expected a divisor of --batch {args.batch} for data, got {sizes['data']}")
    heads = config.num_attention_heads
    if heads % sizes.get("tensor", 1):
        raise CliError(f"--mesh: expected a divisor of {heads} heads for tensor, got {sizes['tensor']}")


def _check_blocks(args: argparse.Namespace, config: AttentionConfig) -> None:
    able = [name for name in registry.names() if registry.named(name).block_names]
    others = [name for name in args.implementation or ["none"] if name not in able]
    if others:
        raise CliError(f"--blocks: expected --implementation {' or '.join(able)}, got {others[0]}")
    heads = config.num_attention_heads // dict(args.mesh).get("tensor", 1)
    for name in args.implementation:
        try:
            registry.named(name).configure(heads=heads, blocks=args.blocks)
        except ValueError as error:
            raise CliError(f"--blocks: {error}") from error


def _blocks_help() -> str:
    backends = [registry.named(name) for name in registry.names()]
    return "; ".join(
        f"{','.join(backend.block_names)} for {backend.name}" for backend in backends if backend.block_names
    )


def _in_a_process(case: CompileCase, timeout: int, *, cycles: bool) -> dict[str, Any]:
    """Compile a case in a new process and return its report, also if a faulty kernel makes the compiler crash."""
    command = [sys.executable, "-m", "foveal", "compile", _SPEC, json.dumps(dataclasses.asdict(case))]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as directory:
        if cycles and case.has_cycles:
            command += [_DUMP, directory]
            try:
                flags = os.environ.get("LIBTPU_INIT_ARGS", ""), dump_flags(directory)
            except ValueError as error:
                raise CliError(f"the directory for temporary files: {error}") from error
            environment["LIBTPU_INIT_ARGS"] = " ".join(flags).strip()
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout, env=environment, check=False
            )
        except subprocess.TimeoutExpired:
            return {"verdict": "timeout", "message": f"not done after {timeout} s"}
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    return {
        "verdict": "died" if done.returncode < 0 else "error",
        "message": f"exit code {done.returncode}: {_last_words(done.stderr)}"[:400],
    }


def _last_words(stderr: str) -> str:
    """The exception that ended a process, on one line, or else the last line that it printed."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    raised = [i for i, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
    if raised:
        lines = list(itertools.takewhile(lambda line: not line.startswith("---"), lines[raised[-1] :]))
        return " ".join(" ".join(lines).split())
    return lines[-1].strip() if lines else "no message"


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    from rich import box
    from rich.table import Table

    first = rows[0]
    passes = "forward and backward" if first["backward"] else "forward"
    mesh = ", ".join(f"{axis} {size}" for axis, size in first["mesh"]) or "one chip"
    loss = " with the indexer's loss" if first["indexer_loss"] else ""
    sizes = first["preset"] or first["config"]
    title = (
        f"{first['layer'].upper()} {first['what']}{loss}, {sizes}, {passes}, {first['dtype']}, "
        f"batch {first['batch']}, {first['target']}, {mesh}"
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for name in ("S", "implementation", "verdict"):
        table.add_column(name, justify="right" if name == "S" else "left", no_wrap=True)
    for name in ("mask s", "lower s", "compile s", "HBM GiB", "temp GiB", "kernel M", "least ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row["length"]),
            row["implementation"] + " (chosen)" * row["chosen"],
            row["verdict"],
            *(_number(row.get(key)) for key in ("mask_seconds", "lower_seconds", "compile_seconds")),
            *(_number(row.get(key), 2**30) for key in ("peak_bytes", "temporary_bytes")),
            _number(row.get("kernel_cycles"), 1e6),
            _number(row.get("roofline_seconds"), 1e-3),
        )
    return table


def _name(row: dict[str, Any]) -> str:
    return f"{row['layer']}, S = {row['length']}, {row['implementation']}"


def _number(value: float | int | None, unit: float | int = 1.0) -> str:
    return "-" if value is None else f"{value / unit:.2f}"


def _list_of(parse: Any) -> Any:
    def parse_list(value: str) -> list[Any]:
        return [parse(part) for part in value.split(",")]

    return parse_list


def _mesh(value: str) -> tuple[tuple[str, int], ...]:
    axes = []
    for part in value.split(","):
        axis, equals, size = part.partition("=")
        if not axis or not equals:
            raise argparse.ArgumentTypeError(f"expected AXIS=N, got {part!r}")
        axes.append((axis, int_between(1, 1024)(size)))
    return tuple(axes)


def _compiler_option(value: str) -> tuple[str, str]:
    name, equals, setting = value.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {value!r}")
    return name, setting
