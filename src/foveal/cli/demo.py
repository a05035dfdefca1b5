"""`foveal demo`: packed documents on a CPU, in numbers and in a picture."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from foveal.cli.console import make_console, print_table, progress, short_name
from foveal.cli.devices import use_cpu
from foveal.cli.errors import CliError, require
from foveal.cli.numbers import TOKENS, int_between, tokens_between

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from foveal.cli.checks import LayerCheck
    from foveal.cli.layer import Sample
    from foveal.cli.text import Pieces, Text

_DESCRIPTION = """\
Packs real text, one token per byte, into a few rows and runs the three layer types of DeepSeek-V4 on it, forward and
backward, on the CPU. For each it checks that packed documents give the outputs and gradients of each document alone,
that the chunked and dense implementations agree, and that an independent reference computes the same. It ends in PASS
or FAIL (exit code 1), and draws who sees what in a packed row.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the parser of `foveal demo`."""
    summary = "run the three layer types on packed text and check them, on the CPU, in about a minute"
    parser = subparsers.add_parser("demo", help=summary, description=_DESCRIPTION, epilog=TOKENS, allow_abbrev=False)
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="files to take text from, any bytes; blank lines separate documents (default: Foveal's own documents)",
    )
    numbers = (
        ("--length", 512, tokens_between(1, 1024), "tokens per row; longer paragraphs are split"),
        ("--rows", 2, int_between(1, 16), "maximum number of rows; the rest of the text is left out"),
        ("--seed", 0, int_between(0, 2**31 - 1), "seed of the parameters, the embedding and the loss"),
    )
    for name, default, kind, what in numbers:
        parser.add_argument(name, type=kind, default=default, metavar="N", help=f"{what} (default: {default})")
    parser.add_argument(
        "--output",
        default="demo/visibility.png",
        metavar="FILE",
        help="file to draw the picture to; missing folders are created (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo and return 0 if everything agrees, else 1.

    Raises:
        CliError: bad arguments, or rich or matplotlib is missing.
    """
    require(("rich", "matplotlib"), "demo")
    use_cpu()
    from foveal.cli.checks import STEPS_PER_LAYER, check_layer
    from foveal.cli.layer import DEMO_CONFIG, make_sample
    from foveal.cli.picture import draw
    from foveal.cli.text import fit_rows, read_text

    text = read_text(args.paths)
    pieces = fit_rows(text.paragraphs, args.length, args.rows)
    sample = make_sample(pieces.documents, args.length, DEMO_CONFIG, args.seed)
    console = make_console()
    console.print(_introduction(text, pieces, sample))
    with progress(console, STEPS_PER_LAYER * DEMO_CONFIG.num_layers + 1) as advance:
        advance("picture")
        _save(lambda path: draw(text.paragraphs, args.seed, path), Path(args.output))
        reports = [
            check_layer(
                sample, DEMO_CONFIG, kind, args.seed, lambda what, kind=kind: advance(f"{short_name(kind)}: {what}")
            )
            for kind in DEMO_CONFIG.layer_types
        ]
    print_table(console, _table(reports, sample))
    console.print(f"Picture: {args.output}")
    return _verdict(console, reports, sample)


def _introduction(text: Text, pieces: Pieces, sample: Sample) -> str:
    import jax

    lengths = [len(document) for document in pieces.documents]
    rows, length = sample.packed.segment_ids.shape
    split = f"; paragraphs longer than a row, so split: {pieces.split}" if pieces.split else ""
    rest = "" if pieces.complete else "; the rest of the text is left out"
    return (
        f"Text: {text.source}\n"
        f"Documents: {len(lengths)} of {min(lengths)} to {max(lengths)} bytes, one token per byte{split}{rest}\n"
        f"Packed into {rows} x {length} tokens, {sum(lengths) / (rows * length):.0%} full; "
        f"jax {jax.__version__} on {jax.default_backend()}"
    )


def _save(draw: Callable[[Path], None], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(path)
    except OSError as error:
        raise CliError(f"cannot write {str(path)!r}: {error.strerror or error}") from None


def _table(reports: Sequence[LayerCheck], sample: Sample) -> Table:
    """The report as a table with one column per layer."""
    from rich import box
    from rich.table import Table

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    tokens = str(sum(map(len, sample.hidden)))
    rows: tuple[tuple[str, list[str]], ...] = (
        ("documents", [str(len(sample.hidden))] * len(reports)),
        ("tokens", [tokens] * len(reports)),
        ("a query sees, on average", []),
        ("  raw keys in its window", [number(r.window_keys) for r in reports]),
        ("  entries", [number(r.entries) for r in reports]),
        ("  of which selected", [number(r.selected) for r in reports]),
        ("packed vs alone, largest difference", []),
        ("  output", [f"{r.alone.output:.1e}" for r in reports]),
        ("  gradient, relative to its peak", [f"{r.alone.gradient:.1e}" for r in reports]),
        ("chunked vs dense, largest difference", []),
        ("  output", [f"{r.dense.output:.1e}" for r in reports]),
        ("  gradient, relative to its peak", [f"{r.dense.gradient:.1e}" for r in reports]),
        ("packed vs reference, largest difference", []),
        ("  output", [f"{r.reference.output:.1e}" for r in reports]),
        ("  gradient, relative to its peak", [f"{r.reference.gradient:.1e}" for r in reports]),
        ("forward and backward, compiled, ms", [f"{r.milliseconds:.0f}" for r in reports]),
    )
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for report in reports:
        table.add_column(short_name(report.layer_type), justify="right", no_wrap=True, min_width=8)
    for label, cells in rows:
        table.add_row(label, *cells, style=None if cells else "bold")
    return table


def _verdict(console: Console, reports: Sequence[LayerCheck], sample: Sample) -> int:
    from foveal.cli.layer import DEMO_CONFIG
    from foveal.testing.numerics import tolerance

    for report in reports:
        if report.entries == 0:
            console.print(
                f"{short_name(report.layer_type)}: no entries to compare, as each covers "
                f"{DEMO_CONFIG.compress_ratio(report.layer_type)} tokens and the longest document has "
                f"{max(map(len, sample.hidden))}; only the sliding windows were compared"
            )
        if report.undecided:
            console.print(
                f"{short_name(report.layer_type)}: queries left out of the comparison, since rounding decides between "
                f"entries of equal score: {report.undecided}"
            )
        for complaint in report.complaints:
            console.print(f"{short_name(report.layer_type)}, {complaint}")
    failed = any(report.complaints for report in reports)
    limit = tolerance("float32")
    rule = (
        f"float32: outputs elementwise within rtol = atol = {limit.elementwise:g}, "
        f"each gradient within {limit.of_peak:g} of its peak"
    )
    console.print(f"{'FAIL' if failed else 'PASS'} ({rule})", style="bold red" if failed else "bold green")
    return 1 if failed else 0
