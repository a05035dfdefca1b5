"""Printing reports: the console, tables, progress bars and sizes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from foveal.layers import LayerType

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_ENDLESS = 1000
"""Line width in characters: wider than any table."""


def make_console() -> Console:
    """Return a console as wide as the terminal; elsewhere, plain text of any width, whatever the environment says."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    width = None if terminal else _ENDLESS
    return Console(force_terminal=terminal, width=width, markup=False, highlight=False, emoji=False, soft_wrap=True)


def print_table(console: Console, table: Table) -> None:
    """Print a table of plain text; if it is too wide, one line per cell, since rich would truncate the cells."""
    if console.measure(table, options=console.options.update(max_width=_ENDLESS)).maximum <= console.width:
        console.print(table)
        return
    if table.title:
        console.print(table.title)
    headers = [str(column.header) for column in table.columns]
    for row in zip(*(column.cells for column in table.columns), strict=True):
        for number, (header, cell) in enumerate(zip(headers, row, strict=True)):
            if cell:
                console.print("    " * (number > 0) + (f"{header}: {cell}" if header else str(cell)))


def print_step(console: Console, line: str) -> None:
    """Print a finished step immediately where no progress bar shows it."""
    if not console.is_terminal:
        console.print(line)


@contextmanager
def progress(console: Console, steps: int, *, disable: bool = False) -> Iterator[Callable[[str], None]]:
    """Show a progress bar, on a terminal only; call the yielded function with each step's name before the step."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    whole = Column(no_wrap=True)  # on a narrow terminal, the bar shrinks first
    numbers = (MofNCompleteColumn(table_column=whole), TimeElapsedColumn(table_column=whole))
    columns = (BarColumn(), *numbers, TextColumn("{task.description}"))
    off = disable or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=off) as bar:
        task, done = bar.add_task("", total=steps), itertools.count()

        def advance(what: str) -> None:
            bar.update(task, completed=next(done), description=what)

        yield advance


def short_name(kind: LayerType) -> str:
    """Return the name of a layer type in tables."""
    return {LayerType.SLIDING: "sliding", LayerType.CSA: "CSA", LayerType.HCA: "HCA"}[kind]


def size_text(size: int) -> str:
    """Format a number of bytes in the largest fitting unit, "-" for none."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} B" if size else "-"
