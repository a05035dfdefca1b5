"""Standard output and standard error, and handling of failures to write to them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


class OutputError(Exception):
    """Standard output cannot be written.

    Attributes:
        reader_left: whether it is a pipe whose reader has closed it.
    """

    def __init__(self, reason: str, *, reader_left: bool = False) -> None:
        super().__init__(f"cannot write to standard output: {reason}")
        self.reader_left = reader_left


@contextlib.contextmanager
def guarded_output() -> Iterator[None]:
    """Tell failures of standard output from those of any other file, and flush standard output at the end.

    Raises:
        OutputError: standard output is closed, or a write to it fails; anything written after that is lost.
    """
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
        # Stop before any work: the first file opened would take the place of standard output.
        raise OutputError("it is closed")
    guarded = _Guarded(sys.stdout)
    with contextlib.redirect_stdout(guarded):
        try:
            yield
        finally:
            guarded.flush()  # at exit, Python could only complain about a failure


def complain(message: str) -> None:
    """Write to standard error. If that fails too, only the exit code reports the error."""
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison]
        return
    try:
        sys.stderr.write(message)
        sys.stderr.flush()
    except OSError:
        _silence(sys.stderr)


class _Guarded:
    """A stream that raises `OutputError` instead of `OSError`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write to the stream."""
        with self._telling():
            return self._stream.write(text)

    def flush(self) -> None:
        """Flush the stream."""
        with self._telling():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            _silence(self._stream)
            reason = error.strerror or str(error)
            raise OutputError(reason, reader_left=isinstance(error, BrokenPipeError)) from error


def _silence(stream: Any) -> None:
    """Discard what the stream still holds: Python would try again to write it at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
