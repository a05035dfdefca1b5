"""Sizes of tiles and blocks, chosen at trace time by one rule."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from foveal.backends.operands import Operands
from foveal.program import platform
from foveal.typing import Precision, accumulation_dtype, lowest

_ROWS = 256
"""Rows of a tile's matmul, queries times heads. With fewer, packing the operands dominates; with more, a tile reads
more raw keys than its queries see, and its scores outgrow the cache."""

_FEW_SLOTS = 96
"""Up to this many slots are scored together with the window in one softmax; more are streamed or gathered."""


@dataclasses.dataclass(frozen=True)
class ChunkedPlan:
    """Static sizes of one call.

    Attributes:
        query_block: T, queries per tile; all heads of a query belong to its tile.
        entry_block: slots per step where entries are streamed.
        window_columns: raw keys per tile: the T + W - 1 that its queries can see, rounded up to whole vectors.
        entries: how entries are scored: "none", "few" (all slots together with the window), "stream" (block by
            block over the visible ones), or "gather" (each query's selected ones, and the visible ones where these
            are few).
        stream_up_to: with "gather", a tile that sees at most this many entries streams them instead.
        gather_block: queries that gather at a time, a divisor of `query_block`: on CPUs one, whose keys stay in the
            cache.
        transpose: whether to transpose all keys once for all tiles. Not where one tile holds all queries, as in
            decoding: it would cost as much as attending to them.
        scale: factor on the logits.
        precision: matmul precision.
        wide: dtype of logits, softmax and sums.
        lowest: logit of a masked key, whose weight is exactly 0.
        shield: whether to keep XLA, by a branch that is always taken, from computing the gradient of the scores twice.
            On CPUs the second time, transposed, costs more than the matmul it feeds; elsewhere the branch costs more.
        slice_bits: whether to slice bfloat16 arrays as 16-bit integers. On CPUs, JAX before 0.11.2 widens the whole
            array each time a slice is read or replaced; in later versions the detour costs a copy.
    """

    query_block: int
    entry_block: int
    window_columns: int
    entries: str
    stream_up_to: int
    gather_block: int
    transpose: bool
    scale: float
    precision: Precision
    wide: jnp.dtype
    lowest: float
    shield: bool
    slice_bits: bool

    @classmethod
    def for_operands(
        cls, operands: Operands, *, query_block: int | None = None, entry_block: int | None = None
    ) -> ChunkedPlan:
        """Choose the sizes for a call.

        T = 256 / H queries per tile, between 8 and 64. Entries are streamed in blocks of C / 8, between 32 and 128:
        each tile wastes half a block. Tiles that see more than 3/2 K entries gather the selected ones; others stream
        all they see, masked: no slower, since the small matmuls of single queries run at two thirds of the rate.
        """
        length, heads, slots = operands.q.shape[1], operands.q.shape[2], operands.entries.shape[1]
        selected = 0 if operands.indices is None else operands.indices.shape[2]
        if query_block is None:
            query_block = min(max(_ROWS // heads, 8), 64)
        query_block = max(min(query_block, length), 1)
        if entry_block is None:
            entry_block = min(max(slots // 8 // 32 * 32, 32), 128)
        wide = accumulation_dtype(operands.q.dtype)
        least, cpu = lowest(wide), platform() == "cpu"
        columns = query_block + operands.visibility.sliding_window - 1
        if slots == 0:
            how = "none"
        elif slots <= _FEW_SLOTS:
            how = "few"
        elif 0 < selected * 3 // 2 < slots:
            how = "gather"
        else:
            how = "stream"
        return cls(
            query_block=query_block,
            entry_block=min(entry_block, slots) if slots else 0,
            window_columns=min(-(-columns // 16) * 16, operands.kv.shape[1]),
            stream_up_to=selected * 3 // 2,
            gather_block=1 if cpu else query_block,
            transpose=query_block < length,
            entries=how,
            scale=operands.scale,
            precision=operands.precision,
            wide=wide,
            lowest=least,
            shield=cpu,
            slice_bits=cpu and jax.__version_info__ < (0, 11, 2),
        )
