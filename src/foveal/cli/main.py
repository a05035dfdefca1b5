"""`foveal`: the parser and the exit codes of all commands."""

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
code. They import slow or optional packages only when run."""

_EXIT_CODES = """\
Exit codes: 0 success, 1 a check failed, 2 a mistake in the arguments or the set-up, or output that cannot be written,
130 interrupted, 141 the reader of the output has closed it (128 + SIGPIPE, as shells report it)."""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message on one line and exit with code 2."""
        line = " ".join(message.split())
        self.exit(2, f"{self.prog}: error: {line}; see {self.prog} --help\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse's own method ignores write errors.
        if file is None or file is sys.stderr:
            complain(message)
        else:
            file.write(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        argv: the arguments; by default those of the process.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # escape what cannot be encoded, such as file names
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
    """Raise a KeyboardInterrupt again where Python drops it.

    Python drops one that arrives in a destructor or in a callback of the garbage collector, of which JAX has one: the
    command would continue and print that an exception was ignored.
    """
    previous, timers = sys.unraisablehook, []

    def hook(unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            previous(unraisable)
            return
        # Not at once: raised within the hook, it would be dropped as well.
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
    """Return the parser of all commands."""
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
