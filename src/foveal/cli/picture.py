"""The demo's picture: who sees what in one packed row."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from foveal.cli.errors import CliError
from foveal.cli.layer import DEMO_CONFIG, make_layer, make_sample
from foveal.geometry import Documents, Visibility, WindowLayout
from foveal.layers import LayerType
from foveal.testing.choices import selected_entries

# The released window and ratios only show over thousands of tokens; these show the same in a row that fits a page.
PICTURE_CONFIG = dataclasses.replace(DEMO_CONFIG, sliding_window=16, hca_ratio=16, index_topk=4)
_ROW = 112
_MOST_TOKENS = 100  # leaves some padding to show
_LONGEST, _MOST_DOCUMENTS = 43, 6  # odd, so that documents start at no multiple of a ratio
_WORDS = 18  # characters of a document in its label

# One hue family for raw keys and one for entries; neighbouring documents take turns within it.
_KEYS = ("#1f5fa8", "#3aa0b8")
_SELECTED = ("#c2410c", "#b91c5c")
_SEEN = ("#fcd9a6", "#f6c6d6")
_PADDING, _NOTHING, _LINE = "#c9c9c9", "#ffffff", "#333333"


class _PictureRow(NamedTuple):
    """The picture's data for one row of S tokens; documents are numbered from 0, padding is -1."""

    texts: list[bytes]
    starts: list[int]
    document: np.ndarray  # int [S]
    keys: np.ndarray  # bool [S, S]
    entries: dict[LayerType, np.ndarray]  # bool [S, C]
    selected: np.ndarray  # bool [S, C] of the CSA layer
    filled: dict[LayerType, np.ndarray]  # bool [C], slots that hold an entry


def draw(paragraphs: Sequence[bytes], seed: int, path: Path) -> None:
    """Draw the beginning of the text, packed into one short row.

    Args:
        paragraphs: the text's paragraphs, at least one.
        seed: seed of the sample and of the CSA layer whose indexer selects.
        path: the file to write; its ending determines the format.

    Raises:
        CliError: matplotlib does not write this format.
        OSError: the file cannot be written.
    """
    figure = Figure(figsize=(13.5, 7.6), dpi=120, layout="constrained")
    known = figure.canvas.get_supported_filetypes()
    form = path.suffix[1:].lower() or "png"
    if form not in known:
        raise CliError(f"cannot write {str(path)!r}: expected an ending such as .png, .svg or .pdf")
    _fill(figure, _row(paragraphs, seed))
    figure.savefig(path, format=form)


def _row(paragraphs: Sequence[bytes], seed: int) -> _PictureRow:
    config = PICTURE_CONFIG
    texts: list[bytes] = []
    for paragraph in paragraphs:
        text = paragraph.strip()[:_LONGEST]
        if len(texts) < _MOST_DOCUMENTS and sum(map(len, texts)) + len(text) <= _MOST_TOKENS:
            texts.append(text)
    sample = make_sample(texts, _ROW, config, seed)
    documents = sample.packed.documents
    ratios = {kind: config.compress_ratio(kind) for kind in (LayerType.CSA, LayerType.HCA)}
    sees = {kind: Visibility(documents, config.sliding_window, ratio) for kind, ratio in ratios.items()}
    slots, _ = selected_entries(make_layer(config, LayerType.CSA, seed), sample.packed.values, documents)
    csa_slots = np.arange(sees[LayerType.CSA].slots)
    return _PictureRow(
        texts=texts,
        starts=[place.start for place in sample.packed.placements],
        document=sample.packed.segment_ids[0] - 1,
        keys=np.asarray(sees[LayerType.CSA].window_mask()[0]),
        entries={kind: np.asarray(see.entry_mask()[0]) for kind, see in sees.items()},
        selected=(slots[0][:, :, None] == csa_slots).any(axis=1),
        filled={kind: _filled(documents, ratio) for kind, ratio in ratios.items()},
    )


def _filled(documents: Documents, ratio: int) -> np.ndarray:
    return np.asarray(WindowLayout.of(documents, ratio).valid[0])


def _fill(figure: Figure, row: _PictureRow) -> None:
    config = PICTURE_CONFIG
    raw, csa, hca = figure.subplots(1, 3, sharey=True, width_ratios=(1.0, 0.62, 0.34))
    size = len(row.document)
    keys = _colours(row, row.keys, _KEYS)
    keys[:, row.document < 0] = to_rgb(_PADDING)
    _paint(raw, keys, "raw keys, by row")
    raw.set_title(f"every layer type: the last {config.sliding_window} tokens,\neach as a raw key", fontsize=11)
    raw.set_ylabel("queries, by row")
    raw.set_xticks(range(0, size + 1, 16))
    raw.set_yticks(range(0, size + 1, 16))
    _name_documents(raw, row)

    seen = _colours(row, row.entries[LayerType.CSA], _SEEN)
    _paint(csa, _colours(row, row.selected, _SELECTED, onto=seen), "entry slots")
    csa.set_title(f"CSA: one entry per {config.csa_ratio} tokens,\nat most {config.index_topk} selected", fontsize=11)
    _paint(hca, _colours(row, row.entries[LayerType.HCA], _SELECTED), "entry slots")
    hca.set_title(f"HCA: one entry per\n{config.hca_ratio} tokens, all used", fontsize=11)
    for axes, kind, every in ((csa, LayerType.CSA, 4), (hca, LayerType.HCA, 1)):
        _mark_slots(axes, row.filled[kind], every)
    for axes in (raw, csa, hca):
        for start in row.starts[1:]:
            axes.axhline(start, color=_LINE, linewidth=0.9, linestyle=(0, (4, 2)))
    figure.suptitle(
        f"Who sees what in a packed row of {size} tokens\n"
        f"paragraphs cut to {_LONGEST} bytes, sliding window {config.sliding_window}, CSA ratio {config.csa_ratio}, "
        f"HCA ratio {config.hca_ratio}: small enough to draw",
        fontsize=13,
    )
    _legend(figure)


def _colours(row: _PictureRow, shown: np.ndarray, palette: Sequence[str], onto: np.ndarray | None = None) -> np.ndarray:
    """Return an image, float [S, N, 3]: its query's document's colour where `shown` is True; grey rows for padding."""
    image = np.full((*shown.shape, 3), to_rgb(_NOTHING)) if onto is None else onto.copy()
    image[row.document < 0] = to_rgb(_PADDING)
    colours = np.array([to_rgb(colour) for colour in palette])[row.document % len(palette)]
    return np.where(shown[:, :, None], colours[:, None], image)


def _paint(axes: Axes, image: np.ndarray, label: str) -> None:
    rows, columns, _ = image.shape
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=(0, columns, rows, 0))
    axes.set_xlabel(label)


def _mark_slots(axes: Axes, filled: np.ndarray, every: int) -> None:
    """Draw lines between slots, and hatch the slots without an entry."""
    for slot, full in enumerate(filled):
        axes.axvline(slot, color="#dddddd", linewidth=0.5)
        if not full:
            axes.axvspan(slot, slot + 1, facecolor="none", edgecolor="#aaaaaa", hatch="////", linewidth=0)
    axes.set_xticks(np.arange(0, len(filled), every) + 0.5, labels=[str(s) for s in range(0, len(filled), every)])
    axes.tick_params(axis="x", length=0)


def _name_documents(axes: Axes, row: _PictureRow) -> None:
    """Write each document's first words beside its part of the diagonal, on the side that has room."""
    for number, (start, text) in enumerate(zip(row.starts, row.texts, strict=True)):
        if len(text) < 4:  # too thin for a label
            continue
        words = "".join(c if c.isprintable() and c < "\u0250" else "·" for c in text.decode("utf-8", "replace"))
        label = f"document {number + 1}: “{words[:_WORDS]}{'…' if len(words) > _WORDS else ''}”"
        middle, end = start + len(text) / 2, start + len(text)
        right = len(row.document) - end >= start
        side = "left" if right else "right"
        written = axes.text(end + 2 if right else start - 2, middle, label, ha=side, va="center", fontsize=9)
        written.set_parse_math(False)
        written.set_in_layout(False)  # a long label must not push the panels apart


def _legend(figure: Figure) -> None:
    handles = [
        Patch(facecolor=_KEYS[0], label="raw key in the window"),
        Patch(facecolor=_SELECTED[0], label="entry used (in CSA: selected by the indexer)"),
        Patch(facecolor=_SEEN[0], label="entry visible but not selected"),
        Patch(facecolor=_PADDING, label="padding: sees nothing, is not seen"),
        Patch(facecolor="none", edgecolor="#aaaaaa", hatch="////", label="slot without an entry"),
        Line2D([], [], color=_LINE, linewidth=0.9, linestyle=(0, (4, 2)), label="next document (hues alternate)"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=10, frameon=False)
