"""`foveal verify`: checking a checkpoint's attention tensors and what its layers compute."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foveal.checkpoint.files import CheckpointError, printable
from foveal.cli.console import make_console, print_step, print_table, progress, short_name
from foveal.cli.devices import use_cpu
from foveal.cli.errors import CliError, require
from foveal.cli.numbers import TOKENS, int_between, tokens_between
from foveal.cli.presets import PRESETS
from foveal.config import AttentionConfig
from foveal.layers import LayerType
from foveal.local_files import not_here

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from foveal.checkpoint.find import AttentionCheckpoint
    from foveal.cli.verify_files import Whole
    from foveal.cli.verify_layer import Comparison, Expected, Outputs, Statistics

_MOST_TOKENS = 1 << 12  # both sides hold the scores of all queries and keys
_MORE_TOKENS = 64  # beyond the least number that uses every part of a layer

_DESCRIPTION = """\
Reads the config and the attention tensors of a DeepSeek-V4 checkpoint (released, or saved by transformers or foveal)
and checks their names, dtypes, shapes and counts. Then it runs each layer on random hidden states in float32 and
bfloat16 and compares the outputs with those of transformers' own layer or, if transformers is not installed, of
foveal's reference. Exit code 1 means that something disagrees.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the parser of `foveal verify`."""
    summary = "check a checkpoint's attention, and compare its outputs with transformers'"
    parser = subparsers.add_parser("verify", help=summary, description=_DESCRIPTION, epilog=TOKENS, allow_abbrev=False)
    add = parser.add_argument
    add(
        "path",
        nargs="?",
        metavar="PATH",
        help="a directory with config.json and safetensors files, or one such file or its index beside a config.json",
    )
    add("--random", action="store_true", help="instead of PATH, check a temporary FP8 checkpoint of random weights")
    add("--preset", choices=tuple(PRESETS), help="the model whose sizes --random has (default: tiny)")
    layers = int_between(0, 1 << 16)
    add("--layer", type=layers, nargs="+", metavar="N", help="layers to check, from 0 (default: all)")
    tokens = tokens_between(1, _MOST_TOKENS)
    add("--tokens", type=tokens, metavar="N", help="hidden states to run on (default: enough for every layer)")
    add(
        "--seed",
        type=int_between(0, 2**31 - 1),
        default=0,
        metavar="N",
        help="seed of the hidden states and of --random's weights (default: 0)",
    )
    add("--json", action="store_true", help="print one line of JSON per layer and one for the checkpoint, no tables")
    parser.set_defaults(run=run)


@dataclasses.dataclass(frozen=True)
class VerifiedLayer:
    """The results of checking one layer.

    Attributes:
        layer: its index.
        layer_type: its type.
        failures: errors that ended the check early.
        statistics: statistics of its weights; None if they could not be loaded.
        comparisons: comparisons of its outputs, by dtype.
    """

    layer: int
    layer_type: LayerType
    failures: tuple[str, ...] = ()
    statistics: Statistics | None = None
    comparisons: dict[str, Comparison] = dataclasses.field(default_factory=dict)

    @property
    def complaints(self) -> tuple[str, ...]:
        """Everything that is wrong with the layer."""
        found = list(self.failures)
        if self.statistics is not None:
            found += [f"{name} is not finite" for name in self.statistics.not_finite]
            found += [f"{name} is zero" for name in self.statistics.zero]
        for dtype, comparison in self.comparisons.items():
            found += [f"{dtype}: {complaint}" for complaint in comparison.complaints]
        return tuple(f"layer {self.layer}: {complaint}" for complaint in found)


def run(args: argparse.Namespace) -> int:
    """Verify a checkpoint and return 0 if everything agrees, else 1.

    Raises:
        CliError: bad arguments, or rich or safetensors is missing.
    """
    if (args.path is None) != args.random:
        raise CliError("expected either PATH or --random" + (", got both" if args.random else ""))
    if args.preset and not args.random:
        raise CliError("--preset: expected with --random only, as a checkpoint has a config of its own")
    require(("rich",), "demo")
    require(("safetensors",), "checkpoint")
    if args.path is not None and not Path(args.path).exists():
        raise CliError(f"{args.path}: {not_here(args.path)}")
    use_cpu()
    with _checkpoint(args) as path:
        return _verify(path, args)


@contextlib.contextmanager
def _checkpoint(args: argparse.Namespace) -> Iterator[Path]:
    """Yield the path of the checkpoint; a random one is deleted at the end."""
    if not args.random:
        yield Path(args.path)
        return
    from foveal.testing.checkpoints import write_random_checkpoint

    with tempfile.TemporaryDirectory(prefix="foveal-verify-") as scratch:
        path = Path(scratch) / "random"
        config = PRESETS[args.preset or "tiny"]()
        _check_arguments(args, config)
        write_random_checkpoint(path, config, layers=args.layer, seed=args.seed)
        yield path


def _verify(path: Path, args: argparse.Namespace) -> int:
    from foveal.checkpoint.find import find_attention, open_checkpoint
    from foveal.cli.verify_files import config_complaints, whole_checkpoint

    console = make_console()
    try:
        _, config = open_checkpoint(path)
        tokens = _check_arguments(args, config)
        found = find_attention(path, config, args.layer)
        whole = whole_checkpoint(found, partial=args.layer is not None)
    except (ValueError, OSError) as error:
        return _end(console, args, str(error).splitlines())
    peer, name = _peer()
    if not args.json:
        title = f"random weights, {args.preset or 'tiny'}" if args.random else str(path)
        console.print(_summary(title, found, whole, name, tokens))
    complaints = [*config_complaints(config), *whole.complaints]
    reports = []
    with progress(console, len(found.layers), disable=args.json) as advance:
        for layer in found.layers:
            advance(f"layer {layer}")
            reports.append(_look_at(found, layer, peer, tokens, args.seed))
            complaints += reports[-1].complaints
            if args.json:
                print(_json(dataclasses.asdict(reports[-1])), flush=True)
            else:
                print_step(console, _step(reports[-1]))
    if not args.json:
        print_table(console, _weights_table(reports))
        print_table(console, _comparison_table(reports, name))
    return _end(console, args, complaints, checkpoint=dataclasses.asdict(whole), compared_with=name, tokens=tokens)


def _end(console: Console, args: argparse.Namespace, complaints: list[str], **found: Any) -> int:
    """Print the last lines and return the exit code."""
    # Names and exceptions come from files: they must not imitate the command's own lines.
    complaints = [printable(complaint) for complaint in complaints]
    if args.json:
        print(_json({**found, "complaints": complaints}))
    else:
        console.print("\n".join(complaints) or "agreement")
    return 1 if complaints else 0


def _check_arguments(args: argparse.Namespace, config: AttentionConfig) -> int:
    """Check the arguments and return the number of tokens to run on.

    Raises:
        CliError: there are no such layers, or the number of tokens is out of range.
    """
    from foveal.cli.verify_layer import least_tokens

    for layer in args.layer or ():
        if layer >= config.num_layers:
            raise CliError(f"--layer: expected 0 <= N < {config.num_layers}, the number of layers, got {layer}")
    if args.layer is not None and len(set(args.layer)) < len(args.layer):
        raise CliError(f"--layer: expected each layer once, got {' '.join(map(str, args.layer))}")
    least = least_tokens(config, args.layer)
    if least > _MOST_TOKENS:
        raise CliError(f"the config's layers have no entries before {least} tokens; at most {_MOST_TOKENS} can be run")
    tokens = min(least + _MORE_TOKENS, _MOST_TOKENS) if args.tokens is None else args.tokens
    if not least <= tokens <= _MOST_TOKENS:
        raise CliError(f"--tokens: expected {least} to {_MOST_TOKENS}, so that each layer has entries, got {tokens}")
    return tokens


def _peer() -> tuple[Any, str]:
    """Return the module to compare with, or None if it cannot be imported, and the name for the report."""
    try:
        peer = importlib.import_module("foveal.testing.peer")
    except ImportError as error:
        return None, f"foveal.testing.reference (without transformers: {error})"
    return peer, f"transformers {importlib.metadata.version('transformers')}"


class _PeerError(Exception):
    """An error of transformers or torch on a layer; the message says which."""


def _look_at(found: AttentionCheckpoint, layer: int, peer: Any, tokens: int, seed: int) -> VerifiedLayer:
    from foveal.checkpoint.load import load_layer
    from foveal.cli.verify_layer import DTYPES, by_reference, compare, hidden_states, statistics, with_short_choice

    found = dataclasses.replace(found, config=with_short_choice(found.config, tokens))
    hidden = hidden_states(found.config, tokens, seed)
    report = VerifiedLayer(layer, found.config.layer_type(layer))
    try:
        module = load_layer(found, layer, dtype="float32", precision="highest")
        report = dataclasses.replace(report, statistics=statistics(found, layer, module))
        expected = by_reference(module) if peer is None else _by_peer(found, layer, peer)
        for dtype in DTYPES:
            if dtype != "float32":
                module = load_layer(found, layer, dtype=dtype, precision="highest")
            report.comparisons[dtype] = compare(module, expected, hidden, dtype)
    except (CheckpointError, _PeerError) as error:
        return dataclasses.replace(report, failures=tuple(str(error).splitlines()))
    return report


def _by_peer(found: AttentionCheckpoint, layer: int, peer: Any) -> Outputs:
    import torch

    from foveal.cli.verify_layer import Expected

    def asked(ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except Exception as error:  # transformers and torch may raise anything
            message = " ".join(str(error).split())
            raise _PeerError(f"transformers failed: {type(error).__name__}: {message}") from error

    theirs = asked(lambda: peer.peer_of_checkpoint(found.files.path, found.config, layer))

    def outputs(hidden: np.ndarray, dtype: str) -> Expected:
        return Expected(*asked(lambda: theirs.with_choice(hidden, getattr(torch, dtype))), independent=True)

    return outputs


def _summary(title: str, found: AttentionCheckpoint, whole: Whole, name: str, tokens: int) -> str:
    from foveal.cli.verify_layer import entry_counts, with_short_choice

    config, kinds = found.config, Counter(found.config.layer_types)
    tensors = [tensor for sources in found.layers.values() for source in sources for tensor in source.tensors]
    size = sum(tensor.size for tensor in tensors)
    chosen, entries = with_short_choice(config, tokens).index_topk, int(entry_counts(config, tokens).max())
    lines = [
        f"{title}: {found.dialect} names",
        f"layers: {', '.join(f'{count} {short_name(kind)}' for kind, count in kinds.items())}",
        f"sizes: {config.num_attention_heads} heads of {config.head_dim}, width {config.hidden_size}, sliding window "
        f"{config.sliding_window}, {config.index_topk} entries selected",
        f"attention of {len(found.layers)} layers: {len(tensors):,} tensors, {size:,} bytes",
        f"all tensors: {whole.tensors:,}" + _of(whole.expected_tensors) + f"; files present: {whole.files_here} of "
        f"{whole.files}, {whole.bytes:,} bytes" + _of(whole.expected_bytes),
        f"compared with {name}, on {tokens} random hidden states"
        + (f"; CSA layers select {chosen} of their {entries} entries" if LayerType.CSA in kinds else ""),
    ]
    return "\n".join(lines)


def _of(expected: int | None) -> str:
    return " (expected: unknown)" if expected is None else f" of {expected:,} expected"


def _step(report: VerifiedLayer) -> str:
    """A layer's verdict, printed before the next layer is checked; the reasons follow at the end."""
    return f"layer {report.layer}, {short_name(report.layer_type)}: {'disagrees' if report.complaints else 'agrees'}"


def _weights_table(reports: list[VerifiedLayer]) -> Table:
    from rich.table import Table

    table = Table("layer", "type", "tensors", "stored", "finite", "kernel rms", "norm rms", "sinks", title="weights")
    for report in reports:
        found = report.statistics
        if found is None:
            continue
        table.add_row(
            str(report.layer),
            short_name(report.layer_type),
            str(found.tensors),
            "released" if found.as_released else ", ".join(found.stored),
            "no" if found.not_finite else "yes",
            *(f"{low:.2g} to {high:.2g}" for low, high in (found.kernels, found.norms, found.sinks)),
        )
    return table


def _comparison_table(reports: list[VerifiedLayer], name: str) -> Table:
    from rich.table import Table

    table = Table("layer", "dtype", "max |error|", "relative L2", "same entries", "agrees", title=f"against {name}")
    for report in reports:
        for dtype, found in report.comparisons.items():
            table.add_row(
                str(report.layer),
                dtype,
                f"{found.worst:.2g}",
                f"{found.relative:.2g}",
                "" if found.same_entries is None else f"{found.same_entries:.1%}",
                "no" if found.complaints else "yes",
            )
    return table


def _json(value: Any) -> str:
    """Format as one line of JSON; numbers that are not finite, which JSON lacks, become strings."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(member) for member in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
