"""`foveal`: the parser, and how every command ends.

Exit codes: 0 all is well, 1 a check failed, 2 a mistake in the arguments or the set-up, 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import foveal
from foveal.cli import cache, demo, verify
from foveal.cli import compile as compile_command
from foveal.cli.errors import CliError

_COMMANDS = (demo, compile_command, cache, verify)
"""Modules with `add_parser(subparsers)`, which sets `run`, a function of the parsed arguments that returns an exit
code. They import what is slow or optional when run, not before."""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors take one line."""

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split())
        self.exit(2, f"{self.prog}: error: {line}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code.

    Args:
        argv: the arguments; those of the process by default.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file name that the terminal cannot show is no reason to stop
            stream.reconfigure(errors="backslashreplace")
    try:
        args = make_parser().parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    try:
        return args.run(args)
    except CliError as error:
        print(f"foveal {args.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output has left. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = _Parser(
        prog="foveal",
        description="Foveal: DeepSeek-V4 compressed attention for JAX. Sharp near, compressed far.",
        epilog="`foveal COMMAND --help` explains a command. "
        "Exit codes: 0 all is well, 1 a check failed, 2 a mistake in the arguments or the set-up, 130 interrupted.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"foveal {foveal.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(subparsers)
    return parser
