"""Standard output and error, and what happens where nothing can be written to them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


class OutputError(Exception):
    """Standard output cannot be written.

    Attributes:
        reader_left: whether it is a pipe that nobody reads any more.
    """

    def __init__(self, reason: str, *, reader_left: bool = False) -> None:
        super().__init__(f"cannot write to standard output: {reason}")
        self.reader_left = reader_left


@contextlib.contextmanager
def guarded_output() -> Iterator[None]:
    """Tells failures of standard output from those of any other file, and flushes it at the end.

    Raises:
        OutputError: it is closed, or the first write to it that fails; what is written to it after that is lost.
    """
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
        # As the first file that is opened would take its place, nothing is begun.
        raise OutputError("it is closed")
    guarded = _Guarded(sys.stdout)
    with contextlib.redirect_stdout(guarded):
        try:
            yield
        finally:
            guarded.flush()  # not when Python ends: then it could only complain


def complain(message: str) -> None:
    """Writes to standard error. Where that cannot be written either, the exit code must do."""
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
        """As the stream's."""
        with self._telling():
            return self._stream.write(text)

    def flush(self) -> None:
        """As the stream's."""
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
    """Lets what the stream still holds go nowhere: Python would try once more to write it when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
