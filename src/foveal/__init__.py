"""Foveal: DeepSeek-V4 compressed attention for JAX. Sharp near, compressed far."""

from foveal import exporting as exporting  # registers the pytrees with jax.export
from foveal.backends.splash import Splash, SplashBlocks, SplashDynamic
from foveal.backends.tpu import Fused
from foveal.cache import AttentionCache
from foveal.cache_stack import CacheStack
from foveal.checkpoint import CheckpointError, Dialect, from_maxtext, load_attention, save_attention, to_maxtext
from foveal.config import AttentionConfig
from foveal.geometry import (
    Documents,
    EntryRange,
    PackedDocuments,
    PaddedRows,
    Visibility,
    WindowLayout,
    left_aligned,
    pack_documents,
    unpack,
)
from foveal.layers import LayerType, RopeConfig, YarnConfig, layer_types_from_compress_ratios
from foveal.nn import CompressedAttention, Compressor, GroupedLinear, LightningIndexer
from foveal.ops import (
    IndexerLoss,
    IndexerRecall,
    RopeTable,
    apply_rope,
    core_attention,
    explain,
    grouped_projection,
    indexer_loss,
    indexer_recall,
    pool_windows,
    rope_frequencies,
    rope_table,
    select_entries,
)

__version__ = "0.1.0"

__all__ = [
    "AttentionCache",
    "AttentionConfig",
    "CacheStack",
    "CheckpointError",
    "CompressedAttention",
    "Compressor",
    "Dialect",
    "Documents",
    "EntryRange",
    "Fused",
    "GroupedLinear",
    "IndexerLoss",
    "IndexerRecall",
    "LayerType",
    "LightningIndexer",
    "PackedDocuments",
    "PaddedRows",
    "RopeConfig",
    "RopeTable",
    "Splash",
    "SplashBlocks",
    "SplashDynamic",
    "Visibility",
    "WindowLayout",
    "YarnConfig",
    "__version__",
    "apply_rope",
    "core_attention",
    "explain",
    "from_maxtext",
    "grouped_projection",
    "indexer_loss",
    "indexer_recall",
    "layer_types_from_compress_ratios",
    "left_aligned",
    "load_attention",
    "pack_documents",
    "pool_windows",
    "rope_frequencies",
    "rope_table",
    "save_attention",
    "select_entries",
    "to_maxtext",
    "unpack",
]
