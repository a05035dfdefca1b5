"""Reports of rows: JSON lines, a table and a plot."""

from __future__ import annotations

import io
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
COLUMNS = (
    "case",
    "chunked ms",
    "use of peak",
    "dense / chunked",
    "transformers / chunked",
    "MiB planned",
    "MiB chunked",
    "dense",
    "transformers",
)


def table(rows: Sequence[Row]) -> str:
    """Table of rows, without ratios where the contenders disagree.

    "MiB planned" is what the compiler allocates for the temporaries of `chunked`; the columns after it are the growth
    of resident memory while a contender runs.
    """
    grid = Table()
    for i, name in enumerate(COLUMNS):
        grid.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        seconds, memory = row["seconds"], row["resident_bytes"]
        cells = [row["case"], f"{seconds['chunked'] * 1e3:.0f}", f"{row['utilisation']['chunked']:.0%}"]
        for name in ("dense", "transformers"):
            if row["disagreement"]:
                cells.append("disagree")
            else:
                cells.append(f"{seconds[name] / seconds['chunked']:.1f}x" if name in seconds else "-")
        planned = row["temporaries_bytes"].get("chunked")
        cells.append("-" if planned is None else f"{planned / 2**20:.0f}")
        cells += [f"{memory[n] / 2**20:.0f}" if n in memory else "-" for n in ("chunked", "dense", "transformers")]
        grid.add_row(*cells)
    text = io.StringIO()
    Console(file=text, width=160).print(grid)
    problems = [f"{row['case']}: {row['disagreement']}" for row in rows if row["disagreement"]]
    left_out = [
        f"{row['case']}: {row['queries_not_compared']} queries not compared, since rounding decides what they select"
        for row in rows
        if row.get("queries_not_compared")
    ]
    return "\n".join([text.getvalue(), *problems, *left_out])


def write(rows: Sequence[Row], folder: pathlib.Path, name: str) -> None:
    """Write `folder`/`name`-jaxVERSION.jsonl, .txt and .png."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name}-jax{rows[0]['versions']['jax']}"
    (folder / f"{stem}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f"{stem}.txt").write_text(table(rows))
    plot(rows, folder / f"{stem}.png")


def plot(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Plot the CPU time of every contender in every case, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [n for n in ("chunked", "dense", "transformers") if any(n in row["seconds"] for row in rows)]
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(rows) * len(names) / 2 + 1.5), layout="constrained")
    height = 0.8 / len(names)
    for k, name in enumerate(names):
        where = [i + k * height for i, row in enumerate(rows) if name in row["seconds"]]
        axes.barh(where, [row["seconds"][name] for row in rows if name in row["seconds"]], height, label=name)
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(rows))], [row["case"] for row in rows])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("CPU seconds, one thread (log scale)")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
