"""`foveal cache`: the memory that a model's decode state needs."""

from __future__ import annotations

import argparse
import collections
import json

import jax

from foveal.cache import AttentionCache
from foveal.cache_stack import CacheStack
from foveal.cli.console import make_console, print_table, short_name, size_text
from foveal.cli.errors import require
from foveal.cli.numbers import TOKENS, int_between, tokens_between
from foveal.cli.presets import add_model, preset_of, read_model
from foveal.config import AttentionConfig
from foveal.layers import LayerType

_DESCRIPTION = """\
Prints the bytes of a model's caches by part and layer type, from the arrays' shapes; nothing is allocated. Entries and
index keys grow with the length; all other parts have a fixed size.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the parser of `foveal cache`."""
    summary = "print the bytes of a model's decode state, part by part"
    parser = subparsers.add_parser("cache", help=summary, description=_DESCRIPTION, epilog=TOKENS, allow_abbrev=False)
    add = parser.add_argument
    add_model(parser)
    lengths = tokens_between(0, 1 << 30)
    add("--length", type=lengths, default=1 << 20, metavar="N", help="capacity in tokens per row (default: 1048576)")
    add("--batch", type=int_between(1, 1 << 16), default=1, metavar="N", help="rows (default: 1)")
    add(
        "--max-rollback",
        type=tokens_between(0, 1 << 16),
        default=0,
        metavar="N",
        help="tokens that can be rolled back, as in speculative decoding (default: 0)",
    )
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of the layers (default: bfloat16)")
    add("--json", action="store_true", help="print one line of JSON per part instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the bytes as a table or as JSON, and return 0.

    Raises:
        CliError: rich is missing, or the config cannot be read.
    """
    preset = preset_of(args)
    config = read_model(preset, args.config)
    stack = _shapes(config, args)
    rows = _rows(config, stack)
    if args.json:
        for part, by_type in rows.items():
            print(json.dumps({"part": part, **by_type, "total": sum(by_type.values())}))
        return 0
    require(("rich",), "demo")
    from rich.table import Table

    kinds = {kind: config.layer_types.count(kind) for kind in LayerType if kind in config.layer_types}
    table = Table("part", *(f"{n} {short_name(kind)}" for kind, n in kinds.items()), "all", "bytes per token")
    for column in table.columns[1:]:
        column.justify = "right"
    tokens = args.batch * args.length
    for part, by_type in rows.items():
        total = sum(by_type.values())
        cells = (size_text(by_type.get(str(kind), 0)) for kind in kinds)
        per_token = f"{total / tokens:,.1f}" if tokens else "-"
        table.add_row(part, *cells, size_text(total), per_token, end_section=part == list(rows)[-2])
    console = make_console()
    console.print(
        f"{preset or args.config}: {args.batch} x {args.length} tokens, {args.dtype}, rollback of {args.max_rollback}"
    )
    print_table(console, table)
    return 0


def _shapes(config: AttentionConfig, args: argparse.Namespace) -> CacheStack:
    return jax.eval_shape(
        lambda: CacheStack.init(
            config, batch=args.batch, capacity=args.length, max_rollback=args.max_rollback, dtype=args.dtype
        )
    )


def _rows(config: AttentionConfig, stack: CacheStack) -> dict[str, dict[str, int]]:
    """Bytes by part and layer type, with the sum of all parts last."""
    parts: dict[str, dict[str, int]] = collections.defaultdict(lambda: collections.defaultdict(int))
    for kind, cache in zip(config.layer_types, stack, strict=True):
        assert isinstance(cache, AttentionCache)
        for part, size in cache.bytes_by_part().items():
            parts[part][str(kind)] += size
    total: dict[str, int] = collections.defaultdict(int)
    for by_type in parts.values():
        for kind, size in by_type.items():
            total[kind] += size
    return {**{part: dict(by_type) for part, by_type in parts.items()}, "total": dict(total)}
