"""Where reports go."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from foveal.config import LayerType

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


def short_name(kind: LayerType) -> str:
    """What a table calls a layer type."""
    return {LayerType.SLIDING: "sliding", LayerType.CSA: "CSA", LayerType.HCA: "HCA"}[kind]


def size_text(size: int) -> str:
    """Bytes, in the unit that keeps them short."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} B" if size else "-"
