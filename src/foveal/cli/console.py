"""Where reports go."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def make_console() -> Console:
    """Plain text, whatever the environment says, unless that is a terminal."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    width = None if terminal else 100
    return Console(force_terminal=terminal, width=width, markup=False, highlight=False, emoji=False, soft_wrap=True)


@contextmanager
def progress(console: Console, steps: int, *, disable: bool = False) -> Iterator[Callable[[str], None]]:
    """A progress bar, on a terminal only; call what it gives before each step, with the step's name."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    off = disable or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=off) as bar:
        task, done = bar.add_task("", total=steps), itertools.count()

        def advance(what: str) -> None:
            bar.update(task, completed=next(done), description=what)

        yield advance
