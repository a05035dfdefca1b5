"""How the work is cut: sizes known while tracing, by one rule."""

from __future__ import annotations

import dataclasses

from foveal.backends.request import AttentionRequest
from foveal.typing import Precision

_ROWS = 512
"""Rows of a tile's matmul, queries times heads: below, packing operands dominates; above, scores leave the cache."""

_FEW_SLOTS = 96
"""Up to so many slots are scored together with the window in one softmax; more are streamed in blocks."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static sizes of one call.

    Attributes:
        query_block: T, queries per tile; all heads of a query belong to its tile.
        entry_block: slots per step where entries are streamed.
        window_columns: raw keys per tile: the T + W - 1 that its queries can see, rounded up to whole vectors.
        entries: how entries are scored: "none", "few" (all slots together with the window), "stream" (block by
            block over the visible ones), or "gather" (each query's selected ones).
        scale: of the logits.
        precision: of the matmuls.
    """

    query_block: int
    entry_block: int
    window_columns: int
    entries: str
    scale: float
    precision: Precision

    @classmethod
    def of(cls, request: AttentionRequest, *, query_block: int | None = None, entry_block: int = 128) -> Plan:
        """The rule.

        T = 512 / H queries a tile, between 16 and 128: 512 to 1024 rows a matmul. Selected entries are gathered
        where that reads less: a query sees C / 2 slots on average, of which K are selected.
        """
        length, heads, slots = request.q.shape[1], request.q.shape[2], request.visibility.slots
        if query_block is None:
            query_block = min(max(_ROWS // heads, 16), 128)
        query_block = max(min(query_block, length), 1)
        columns = query_block + request.visibility.sliding_window - 1
        if request.entries is None:
            how = "none"
        elif slots <= _FEW_SLOTS:
            how = "few"
        elif request.indices is not None and 2 * request.indices.shape[2] < slots:
            how = "gather"
        else:
            how = "stream"
        return cls(
            query_block=query_block,
            entry_block=min(entry_block, slots) if slots else 0,
            window_columns=min(-(-columns // 16) * 16, length),
            entries=how,
            scale=request.scale,
            precision=request.precision,
        )
