"""Floating-point ops: arrays in, arrays out. `foveal.geometry` decides who sees what."""

from foveal.ops.core_attention import core_attention, explain
from foveal.ops.indexer_loss import IndexerLoss, indexer_loss
from foveal.ops.indexer_recall import IndexerRecall, indexer_recall
from foveal.ops.indexing import select_entries
from foveal.ops.output_projection import grouped_projection
from foveal.ops.pooling import pool_windows
from foveal.ops.rope import RopeTable, apply_rope, rope_frequencies, rope_table

__all__ = [
    "IndexerLoss",
    "IndexerRecall",
    "RopeTable",
    "apply_rope",
    "core_attention",
    "explain",
    "grouped_projection",
    "indexer_loss",
    "indexer_recall",
    "pool_windows",
    "rope_frequencies",
    "rope_table",
    "select_entries",
]
