"""The decode states of a model's layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from foveal.cache import AttentionCache
from foveal.config import AttentionConfig, as_config
from foveal.typing import Array, Bool, DTypeLike, Int, Int32, Size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CacheStack:
    """The caches of several layers, whose rows are the same sequences. A pytree; indexes and iterates like a tuple.

    Attributes:
        layers: one cache per layer.
    """

    layers: tuple[AttentionCache, ...]

    @classmethod
    def init(
        cls,
        config: AttentionConfig,
        *,
        batch: Size,
        capacity: int,
        max_rollback: int = 0,
        dtype: DTypeLike = jnp.float32,
    ) -> CacheStack:
        """Create empty caches for every layer of `config`; see `AttentionCache.init`.

        Raises:
            ValueError: as `AttentionCache.init`.
        """
        sizes: Any = {"batch": batch, "capacity": capacity, "max_rollback": max_rollback, "dtype": dtype}
        return cls(tuple(AttentionCache.init(config, kind, **sizes) for kind in as_config(config).layer_types))

    def __getitem__(self, layer: int) -> AttentionCache:
        return self.layers[layer]

    def __iter__(self) -> Iterator[AttentionCache]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def lengths(self) -> Int32[Array, " B"]:
        """Number of tokens in each row, int32 [B]."""
        return self.layers[0].lengths

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(cache.nbytes for cache in self.layers)

    def bytes_by_part(self) -> dict[str, int]:
        """Bytes of each part (see `AttentionCache.bytes_by_part`), summed over layers."""
        each = [cache.bytes_by_part() for cache in self.layers]
        return {name: sum(parts[name] for parts in each) for name in each[0]}

    def reset(self, rows: Bool[Array, " B"] | np.ndarray | Sequence[bool] | None = None) -> CacheStack:
        """Apply `AttentionCache.reset` to every layer."""
        return CacheStack(tuple(cache.reset(rows) for cache in self.layers))

    def reorder(self, order: Int[Array, " rows"] | np.ndarray | Sequence[int]) -> CacheStack:
        """Apply `AttentionCache.reorder` to every layer."""
        return CacheStack(tuple(cache.reorder(order) for cache in self.layers))

    def rollback(self, count: int | Int[Array, "*B"] | np.ndarray | Sequence[int]) -> CacheStack:
        """Apply `AttentionCache.rollback` to every layer."""
        return CacheStack(tuple(cache.rollback(count) for cache in self.layers))

    def truncate(self, lengths: int | Int[Array, "*B"] | np.ndarray | Sequence[int]) -> CacheStack:
        """Apply `AttentionCache.truncate` to every layer."""
        return CacheStack(tuple(cache.truncate(lengths) for cache in self.layers))
