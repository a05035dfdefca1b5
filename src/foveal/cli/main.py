"""`foveal`: the parser, and how every command ends."""

from __future__ import annotations

import _thread
import argparse
import contextlib
import io
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import foveal
from foveal.cli import cache, demo, verify
from foveal.cli import compile as compile_command
from foveal.cli.errors import CliError
from foveal.cli.streams import OutputError, complain, guarded_output

_COMMANDS = (demo, compile_command, cache, verify)
"""Modules with `add_parser(subparsers)`, which sets `run`, a function of the parsed arguments that returns an exit
code. They import what is slow or optional when run, not before."""

_EXIT_CODES = """\
Exit codes: 0 all is well, 1 a check failed, 2 a mistake in the arguments or the set-up, or output that cannot be
written, 130 interrupted, 141 whoever read the output has left (as a shell has it of other programs)."""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors take one line."""

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split())
        self.exit(2, f"{self.prog}: error: {line}; see {self.prog} --help\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse's own passes over what cannot be written.
        if file is None or file is sys.stderr:
            complain(message)
        else:
            file.write(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code.

    Args:
        argv: the arguments; those of the process by default.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file name that the terminal cannot show is no reason to stop
            stream.reconfigure(errors="backslashreplace")
    try:
        with guarded_output():
            return _run(argv)
    except KeyboardInterrupt:
        return 130
    except OutputError as error:
        if error.reader_left:
            return 141
        complain(f"foveal: error: {error}\n")
        return 2


def _run(argv: Sequence[str] | None) -> int:
    parser = make_parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        with _interrupts_kept():
            return args.run(args)
    except CliError as error:
        complain(f"foveal {args.command}: error: {' '.join(str(error).split())}\n")
        return 2


@contextlib.contextmanager
def _interrupts_kept() -> Iterator[None]:
    """Raises a KeyboardInterrupt again that Python drops.

    It does so with one that arrives in a destructor, or in a callback of the garbage collector, of which JAX has one:
    the command would go on, and say that an exception was ignored.
    """
    previous, timers = sys.unraisablehook, []

    def hook(unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            previous(unraisable)
            return
        # Not at once: that would be in the hook, and be dropped as well.
        timers.append(threading.Timer(0.05, _thread.interrupt_main))
        timers[-1].start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = previous
        for timer in timers:
            timer.cancel()


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = _Parser(
        prog="foveal",
        description="Foveal: DeepSeek-V4 compressed attention for JAX. Sharp near, compressed far.",
        epilog=f"`foveal COMMAND --help` explains a command. {_EXIT_CODES}",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"foveal {foveal.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(subparsers)
    return parser
