"""Picture of Splash's tiles in docs/splash.md: `python -m benchmarks.tiles docs/splash-tiles.png`."""

from __future__ import annotations

import sys

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from foveal.backends.splash.layout import KeyLayout
from foveal.backends.splash.mask import HCAStaticMask
from foveal.backends.splash.mask_info import static_mask_info

ROWS, RATIO, WINDOW, BLOCK = 1000, 4, 128, 128
_EMPTY, _PARTIAL, _FULL, _SEEN = "#ffffff", "#fcd9a6", "#12365f", "#3f83cc"


def draw(path: str) -> None:
    """Draw the mask of a short row, with tiles coloured by how Splash treats them."""
    layout = KeyLayout.for_shapes(ROWS, ROWS // RATIO, BLOCK, BLOCK)
    mask = HCAStaticMask(layout, WINDOW, RATIO)
    info = static_mask_info(mask, BLOCK, BLOCK)
    states = np.zeros((layout.padded_rows // BLOCK, layout.columns // BLOCK), int)
    states[info.active_rows, info.active_cols] = info.block_mask
    picture = np.kron(states, np.ones((BLOCK, BLOCK), int))
    picture[mask[:, :] & (picture == 1)] = 3

    figure = Figure(figsize=(9, 6.4), dpi=110, layout="constrained")
    axes = figure.subplots()
    extent = (0, layout.columns, layout.padded_rows, 0)
    axes.imshow(picture, cmap=ListedColormap([_EMPTY, _PARTIAL, _FULL, _SEEN]), extent=extent, interpolation="nearest")
    axes.set_xticks(range(0, layout.columns + 1, BLOCK), labels=[])
    axes.set_yticks(range(0, layout.padded_rows + 1, BLOCK))
    axes.grid(color="#cccccc", linewidth=0.5)
    axes.axvline(layout.entry_start, color="#333333")
    axes.axhline(layout.rows, color="#333333", linestyle=":", linewidth=1)
    axes.set_ylabel("query row")
    axes.set_xlabel(f"{layout.entry_start} window keys (with padding)   |   {layout.slots} entries (with padding)")
    counts = [int((states == kind).sum()) for kind in range(3)]
    axes.legend(
        handles=[
            Patch(facecolor=_SEEN, label="seen"),
            Patch(facecolor=_PARTIAL, label=f"tile with a mask ({counts[1]})"),
            Patch(facecolor=_FULL, label=f"tile of which all is seen, without a mask ({counts[2]})"),
            Patch(facecolor=_EMPTY, edgecolor="#cccccc", label=f"tile that is left out ({counts[0]})"),
        ],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.06),
        ncols=2,
        frameon=False,
    )
    axes.set_title(f"{ROWS} rows, window {WINDOW}, an entry for {RATIO} tokens, tiles of {BLOCK} x {BLOCK}")
    figure.savefig(path)


if __name__ == "__main__":
    draw(sys.argv[1])
