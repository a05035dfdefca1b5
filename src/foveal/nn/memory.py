"""Memories: the source of the keys, entries and selections that a layer attends to.

A layer asks its memory for the documents of its rows, raw keys, entries, index keys and the selection. Training
(`Fresh`) and serving (`Cached`) differ in nothing else.
"""

from __future__ import annotations

import abc
from collections.abc import Callable

import jax.numpy as jnp

from foveal.cache import AttentionCache, CompressorState, extended_state, with_history
from foveal.config import AttentionConfig
from foveal.geometry import Documents, EntryRange, Visibility, WindowLayout, max_history, window_halo
from foveal.layers import LayerSpec
from foveal.nn.compressor import Compressor, pool, project
from foveal.ops.rope import RopeTable, table_for
from foveal.typing import Array, Int32


class Memory(abc.ABC):
    """Memory of one call; each method is called at most once.

    Attributes:
        documents: the documents that the rows belong to.
        padding: bool [B, S], True on rows of no document; None where there is no padding.
        visibility: which raw keys and entries each row sees.
        layout: the windows that these rows complete; None in a layer without entries.
        table: RoPE at the rows' positions.
        entry_table: RoPE at the entries' positions, those of their windows' first tokens; None without entries.
    """

    documents: Documents
    padding: Array | None
    visibility: Visibility
    layout: WindowLayout | None
    table: RopeTable
    entry_table: RopeTable | None

    def __init__(
        self,
        config: AttentionConfig,
        layer: LayerSpec,
        documents: Documents,
        visibility: Visibility,
        layout: WindowLayout | None,
    ) -> None:
        self.documents, self.visibility, self.layout = documents, visibility, layout
        self.padding = documents.is_padding if documents.padded else None
        positions, dim = documents.positions, config.qk_rope_head_dim
        self.table = table_for(positions, layer.rope, dim)
        self.entry_table = None if layout is None else table_for(layout.positions, layer.rope, dim)

    @abc.abstractmethod
    def raw_keys(self, kv: Array) -> Array:
        """All raw keys, [B, N, D]; the last S are `kv`, these rows' own."""

    @abc.abstractmethod
    def entries(self, compressor: Compressor, x: Array) -> Array:
        """All entries by slot, [B, C, D]; the compressor makes those of the windows that x, [B, S, E], completes."""

    @abc.abstractmethod
    def index_keys(self, indexer: Compressor, x: Array) -> Array:
        """All index keys by slot, [B, C, J]; the indexer makes those of the windows that x completes."""

    def selection(self, select: Callable[[], Array]) -> Array:
        """Slots selected for each row, int32 [B, S, K]; `select` computes the indexer's own choice."""
        return select()


class Fresh(Memory):
    """Memory of these rows alone, packed or not, as in training."""

    def __init__(self, config: AttentionConfig, layer: LayerSpec, documents: Documents) -> None:
        entries = EntryRange(layer.compress_ratio, None) if layer.has_entries else None
        visibility = Visibility.made(documents, config.sliding_window, entries, 0)
        layout = WindowLayout.made(documents, layer.compress_ratio) if layer.has_entries else None
        super().__init__(config, layer, documents, visibility, layout)

    def raw_keys(self, kv: Array) -> Array:
        """These rows' own raw keys."""
        return kv

    def entries(self, compressor: Compressor, x: Array) -> Array:
        """Entries of these rows' windows."""
        assert self.layout is not None
        assert self.entry_table is not None
        return pool(compressor, *project(compressor, x), self.layout, self.entry_table)

    def index_keys(self, indexer: Compressor, x: Array) -> Array:
        """Index keys of these rows' windows."""
        return self.entries(indexer, x)


class Cached(Memory):
    """Memory of rows that continue those of a cache; `after` returns the cache with them."""

    def __init__(
        self, config: AttentionConfig, layer: LayerSpec, cache: AttentionCache, counts: Int32[Array, " B"], size: int
    ) -> None:
        ratio, lengths = layer.compress_ratio, cache.lengths
        self._cache, self._counts = cache, counts
        self._kv: Array | None = None
        self._states: dict[str, CompressorState] = {}
        self._slots = cache.capacity // ratio if layer.has_entries else 0  # where this is 0, the arrays still have one
        self._history = window_halo(ratio, overlap=layer.overlap) if layer.has_entries else 0
        entries = EntryRange(ratio, self._slots) if layer.has_entries else None
        documents, window = Documents.made(lengths, counts, size), config.sliding_window
        visibility, layout = Visibility.made(documents, window, entries, max_history(window)), None
        if layer.has_entries:
            layout = WindowLayout.completed(lengths, counts, size, ratio, self._history)
            assert cache.compressor is not None
            self._completed_slots = layout.slots_of(cache.compressor.entries.shape[1])
        super().__init__(config, layer, documents, visibility, layout)

    def raw_keys(self, kv: Array) -> Array:
        """The last keys of the sliding window, followed by these rows' own."""
        self._kv = kv
        return jnp.concatenate([self._cache.last_keys(self.visibility.history), kv], axis=1)

    def entries(self, compressor: Compressor, x: Array) -> Array:
        """The cache's entries and those that these rows complete."""
        return self._extended("compressor", compressor, x)

    def index_keys(self, indexer: Compressor, x: Array) -> Array:
        """The cache's index keys and those that these rows complete."""
        return self._extended("indexer", indexer, x)

    def after(self) -> AttentionCache:
        """The cache with these rows appended. Call it last: it stores what the layer has asked for."""
        assert self._kv is not None
        states = (self._states.get(part) for part in ("compressor", "indexer"))
        return self._cache.extended(self._counts, self._kv, *states)

    def _extended(self, part: str, compressor: Compressor, x: Array) -> Array:
        assert self.layout is not None
        assert self.entry_table is not None
        state, new = getattr(self._cache, part), project(compressor, x)
        rows = with_history(state, self._cache.lengths, self._history, *new)
        made = pool(compressor, *rows, self.layout, self.entry_table)
        self._states[part] = extended_state(state, self._cache.lengths, self._counts, *new, self._completed_slots, made)
        return self._states[part].entries[:, : self._slots]
