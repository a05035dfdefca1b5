"""Who sees what: the geometry of documents, windows and entries, in integers only.

Everything follows from one integer per token, the row at which its document begins. Every other module asks this one.
"""

from foveal.geometry.blocks import Block, Blocks
from foveal.geometry.documents import Documents, as_documents
from foveal.geometry.packing import PackedDocuments, PaddedRows, Placement, left_aligned, pack_documents, unpack
from foveal.geometry.visibility import (
    EntryRange,
    TileRanges,
    Visibility,
    as_visibility,
    complete_windows,
    max_history,
    membership,
    union,
    window_first,
)
from foveal.geometry.windows import WindowLayout, as_layout, window_halo

__all__ = [
    "Block",
    "Blocks",
    "Documents",
    "EntryRange",
    "PackedDocuments",
    "PaddedRows",
    "Placement",
    "TileRanges",
    "Visibility",
    "WindowLayout",
    "as_documents",
    "as_layout",
    "as_visibility",
    "complete_windows",
    "left_aligned",
    "max_history",
    "membership",
    "pack_documents",
    "union",
    "unpack",
    "window_first",
    "window_halo",
]
