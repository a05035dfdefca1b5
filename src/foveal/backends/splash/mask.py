"""Visibility in an unpacked row, as a Splash Attention mask known at trace time."""

from __future__ import annotations

import dataclasses

import numpy as np

from foveal.backends.splash.layout import KeyLayout
from foveal.backends.splash.tokamax_splash import Mask
from foveal.geometry import complete_windows, window_first


@dataclasses.dataclass(frozen=True)
class HCAStaticMask(Mask):
    """Mask of query rows by columns [window keys | padding | entries | padding]; `mask[rows, columns]` is bool.

    A real row sees the last `sliding_window` rows and the entries of the windows complete by then, like `Visibility` of
    a row that is one document. A padded row sees only its own column. Nothing is inferred from shapes. Two masks of the
    same numbers are equal and hash alike.

    Attributes:
        layout: where rows, raw keys and entries stand.
        sliding_window: W.
        compress_ratio: m; 0 without entries.

    Raises:
        ValueError: a layout in which a padded row has no column, or whose slots are not rows // compress_ratio.
    """

    layout: KeyLayout
    sliding_window: int
    compress_ratio: int

    def __post_init__(self) -> None:
        """Check that the numbers fit each other."""
        at, ratio = self.layout, self.compress_ratio
        slots = at.rows // ratio if ratio else 0
        if at.slots != slots:
            raise ValueError(f"layout: expected rows // compress_ratio = {slots} slots, got {at}")
        if not at.rows <= at.padded_rows <= at.entry_start <= at.columns - slots:
            raise ValueError(f"layout: expected rows <= padded_rows <= entry_start <= columns - slots, got {at}")

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of padded rows and of columns."""
        return self.layout.padded_rows, self.layout.columns

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        """Bool array of a slice of rows and a slice of columns."""
        row, column = (np.arange(size)[part] for part, size in zip(index, self.shape, strict=True))
        return self.at(row[:, None], column[None, :])

    def at(self, row: np.ndarray, column: np.ndarray) -> np.ndarray:
        """Bool array at integer rows and columns, which broadcast against each other."""
        real = row < self.layout.rows
        seen = (column >= window_first(row, self.sliding_window)) & (column <= row)
        if self.compress_ratio:
            slot = column - self.layout.entry_start
            seen = seen | ((slot >= 0) & (slot < complete_windows(row, self.compress_ratio)))
        return np.where(real, seen, column == row)
