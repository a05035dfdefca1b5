"""Where reports go."""

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
"""Characters in a line: more than any table has."""


def make_console() -> Console:
    """Plain text, whatever the environment says, unless that is a terminal; only that limits the length of a line."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    width = None if terminal else _ENDLESS
    return Console(force_terminal=terminal, width=width, markup=False, highlight=False, emoji=False, soft_wrap=True)


def print_table(console: Console, table: Table) -> None:
    """Prints a table of plain text; where a line is too short for a row, a line a cell, since rich would cut them."""
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
    """Prints, at once, what has been done, where no progress bar shows it."""
    if not console.is_terminal:
        console.print(line)


@contextmanager
def progress(console: Console, steps: int, *, disable: bool = False) -> Iterator[Callable[[str], None]]:
    """A progress bar, on a terminal only; call what it gives before each step, with the step's name."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    whole = Column(no_wrap=True)  # on a narrow terminal it is the bar that gives way
    numbers = (MofNCompleteColumn(table_column=whole), TimeElapsedColumn(table_column=whole))
    columns = (BarColumn(), *numbers, TextColumn("{task.description}"))
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
