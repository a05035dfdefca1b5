"""Who sees what: integers only, and the only place that knows.

Everything follows from one integer per token, the row at which its document begins. Every other module asks here.
"""

from foveal.geometry.documents import Documents
from foveal.geometry.packing import PackedDocuments, Placement, pack_documents
from foveal.geometry.visibility import TileRanges, Visibility
from foveal.geometry.windows import WindowLayout

__all__ = ["Documents", "PackedDocuments", "Placement", "TileRanges", "Visibility", "WindowLayout", "pack_documents"]
