"""Real text for the demo: its source, and its paragraphs as documents."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from foveal.cli.errors import CliError
from foveal.geometry import pack_documents

_READ_LIMIT = 1 << 20
"""Bytes read per file: more than the demo can use, and a limit for files without an end."""


class Text(NamedTuple):
    """Text and its source.

    Attributes:
        source: description for the user, such as "README.md, CHANGELOG.md".
        paragraphs: the text's paragraphs, none of them blank.
    """

    source: str
    paragraphs: list[bytes]


class Pieces(NamedTuple):
    """Documents that fit into rows.

    Attributes:
        documents: pieces of text, none longer than a row.
        split: number of paragraphs that were cut to make them.
        complete: whether they contain the whole text.
    """

    documents: list[bytes]
    split: int
    complete: bool


def read_text(paths: Sequence[str]) -> Text:
    """Read the paragraphs of the files or, without files, of the project's own documents.

    Raises:
        CliError: a file cannot be read, or all text is blank.
    """
    source, contents = _files(paths) if paths else _own_documents()
    paragraphs = [paragraph for content in contents for paragraph in split_paragraphs(content)]
    if not paragraphs:
        raise CliError(f"no text in {source}: expected at least one byte that is not blank")
    return Text(source, paragraphs)


def split_paragraphs(content: bytes) -> list[bytes]:
    """Split text at blank lines, leaving out blank pieces."""
    return [piece for piece in re.split(rb"\r?\n(?:[ \t]*\r?\n)+", content) if piece.strip()]


def fit_rows(paragraphs: Iterable[bytes], length: int, rows: int) -> Pieces:
    """Cut long paragraphs, and keep the pieces, in order, that first fit places in `rows` rows of `length` tokens."""
    pieces: list[tuple[bytes, int]] = []  # each with the number of its paragraph
    lengths = []
    room = 2 * rows * length  # pieces beyond this would not fit
    paragraphs = list(paragraphs)
    for number, paragraph in enumerate(paragraphs):
        if sum(lengths) >= room:
            break
        for start in range(0, len(paragraph), length):
            pieces.append((paragraph[start : start + length], number))
            lengths.append(len(pieces[-1][0]))
    placements = pack_documents([np.zeros(n, np.int8) for n in lengths], length).placements
    kept = [piece for piece, place in zip(pieces, placements, strict=True) if place.row < rows]
    split = {number for _, number in kept if len(paragraphs[number]) > length}
    complete = sum(len(piece) for piece, _ in kept) == sum(map(len, paragraphs))
    return Pieces([piece for piece, _ in kept], len(split), complete)


def _files(paths: Sequence[str]) -> tuple[str, list[bytes]]:
    return ", ".join(paths), [_read(Path(path)) for path in paths]


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_READ_LIMIT)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise CliError(f"cannot read {str(path)!r}: {reason}") from None


def _own_documents() -> tuple[str, list[bytes]]:
    """Foveal's documents: those of the checkout in the current directory, else the installed package's description."""
    if _in_checkout():
        names = [Path(name) for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
        found = [path for path in (*names, *sorted(Path("docs").rglob("*.md"))) if path.is_file()]
        if found:
            return _files([str(path) for path in found])
    try:
        package = importlib.metadata.metadata("foveal")
    except importlib.metadata.PackageNotFoundError:
        raise CliError("foveal is not installed, so it has no description to read: name a text file") from None
    description = str(package.json.get("description", ""))
    return f"the description of the installed package foveal {package['Version']}", [description.encode()]


def _in_checkout() -> bool:
    try:
        project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
        return project["name"] == "foveal"
    except (OSError, ValueError, KeyError, TypeError):
        return False
