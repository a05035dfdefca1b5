"""The decode state of a layer: what later tokens need of earlier ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from foveal.checks import as_dtype, as_flags, as_int, as_lengths, as_size, on_host, require
from foveal.config import AttentionConfig, as_config
from foveal.geometry import window_halo
from foveal.layers import LayerSpec, LayerType, as_layer_type
from foveal.meshes import any_mesh
from foveal.typing import Array, Bool, DTypeLike, Float, Int, Int32, Size, accumulation_dtype, narrowed


class CompressorState(NamedTuple):
    """State of a compressor: all entries so far, and the last tokens' projections, to make further entries of.

    Attributes:
        entries: [B, C, D] in the layer's dtype, by slot; C >= 1, even where the capacity is less than a window.
        kv: values of the last P tokens, [B, P, F] in float32, a ring buffer: position p is in row p % P.
        gate: gates of the same tokens, stored alike.
    """

    entries: Float[Array, "B C D"]
    kv: Float[Array, "B P F"]
    gate: Float[Array, "B P F"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionCache:
    """The decode state of one layer for B rows, each a sequence of its own length. A pytree of static shapes.

    Build it with `init` or `CompressedAttention.init_cache`; `CompressedAttention.prefill` and `decode` return it with
    tokens appended. A row's length alone says what the row holds: array contents beyond it, NaN included, have no
    effect. DeepSeek-V4 technical report, arXiv 2606.19348, section 3.5.1.

    Attributes:
        lengths: int32 [B], number of tokens in each row.
        undoable: int32 [B], how many of them `rollback` and `truncate` can still take back.
        window: raw keys [B, W + max_rollback, D], a ring buffer: position p is in row p % (W + max_rollback).
        compressor: the compressor's state; None in a sliding layer.
        indexer: the indexer's state, whose entries are the index keys; None except in a CSA layer.
        capacity: maximum number of tokens per row. Static.
        max_rollback: maximum number of tokens that can be taken back at once. Static.
    """

    __no_type_check__ = True  # JAX also builds pytrees of placeholders, which do not match the annotations

    lengths: Int32[Array, " B"]
    undoable: Int32[Array, " B"]
    window: Float[Array, "B P D"]
    compressor: CompressorState | None
    indexer: CompressorState | None
    capacity: int = dataclasses.field(metadata={"static": True})
    max_rollback: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def init(
        cls,
        config: AttentionConfig,
        layer_type: LayerType | str,
        *,
        batch: Size,
        capacity: int,
        max_rollback: int = 0,
        dtype: DTypeLike = jnp.float32,
    ) -> AttentionCache:
        """Create an empty cache.

        Args:
            config: sizes.
            layer_type: type of the layer.
            batch: B; may be a symbolic dimension of `jax.export`.
            capacity: maximum number of tokens per row, prompt included.
            max_rollback: number of tokens that `rollback` and `truncate` must be able to take back at once: as many as
                may be drafted and rejected. Each takes room for a raw key and its compressor and indexer projections.
            dtype: the layer's.

        Raises:
            ValueError: `batch`, `capacity` or `max_rollback` not an int from 0 to 2**31 - 1, or an unknown layer type.
        """
        largest = np.iinfo(np.int32).max
        batch, capacity = as_size("batch", batch, 0, largest), as_int("capacity", capacity, 0, largest)
        max_rollback = as_int("max_rollback", max_rollback, 0, largest)
        config, layer_type = as_config(config), as_layer_type("layer_type", layer_type)
        return cls._empty(config, config.layer(layer_type), batch, capacity, max_rollback, as_dtype("dtype", dtype))

    @classmethod
    def _empty(
        cls, config: AttentionConfig, layer: LayerSpec, batch: Size, capacity: int, max_rollback: int, dtype: DTypeLike
    ) -> AttentionCache:
        wide, rows = accumulation_dtype(dtype), window_halo(layer.compress_ratio, overlap=layer.overlap) + 1

        def state(width: int) -> CompressorState:
            # Two arrays, not the same one twice: donation needs distinct buffers.
            projected = (batch, rows + max_rollback, layer.projections * width)
            kv, gate = (jnp.zeros(projected, wide) for _ in range(2))
            slots = max(capacity // layer.compress_ratio, 1)  # Orbax saves no empty array: at least one slot
            return CompressorState(jnp.zeros((batch, slots, width), dtype), kv, gate)

        return cls(
            lengths=jnp.zeros((batch,), jnp.int32),
            undoable=jnp.zeros((batch,), jnp.int32),
            window=jnp.zeros((batch, config.sliding_window + max_rollback, config.head_dim), dtype),
            compressor=state(config.head_dim) if layer.has_entries else None,
            indexer=state(config.index_head_dim) if layer.has_indexer else None,
            capacity=capacity,
            max_rollback=max_rollback,
        )

    @property
    def batch(self) -> Size:
        """Number of rows, B."""
        return self.lengths.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, all B rows together; also for placeholders from `jax.eval_shape`."""
        return sum(self.bytes_by_part().values())

    def bytes_by_part(self) -> dict[str, int]:
        """Bytes of window, entries, index_keys, compressor_state, indexer_state, lengths; 0 for absent ones."""
        entries, *state = self.compressor or (None,)
        index_keys, *indexer_state = self.indexer or (None,)
        parts = {
            "window": self.window,
            "entries": entries,
            "index_keys": index_keys,
            "compressor_state": state,
            "indexer_state": indexer_state,
            "lengths": (self.lengths, self.undoable),
        }
        return {
            name: sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(part))
            for name, part in parts.items()
        }

    @any_mesh(keep="self")
    def reset(self, rows: Bool[Array, " B"] | np.ndarray | Sequence[bool] | None = None) -> AttentionCache:
        """Return the cache with rows emptied for new sequences: all, or those where `rows`, bool [B], is True.

        Only lengths change. Old array contents stay until they are overwritten, and nothing reads them.

        Raises:
            ValueError: `rows` is not bool [B].
        """
        if rows is None:
            keep = jnp.zeros_like(self.lengths)
        else:
            keep = jnp.where(as_flags("rows", rows, self.batch), 0, 1).astype(jnp.int32)
        return dataclasses.replace(self, lengths=self.lengths * keep, undoable=self.undoable * keep)

    @any_mesh(keep="self")
    def reorder(self, order: Int[Array, " rows"] | np.ndarray | Sequence[int]) -> AttentionCache:
        """Return a cache of the rows numbered in `order`, integers [N], in that order.

        Rows can be moved, dropped or repeated (beam search).

        Raises:
            ValueError: `order` is not integers [N], or, where it is concrete, has a row number out of range. Traced
                numbers are clipped into range.
        """
        index, concrete = as_lengths("order", order, None)
        require("order", concrete, lambda a: (a >= 0) & (a < self.batch), f"row numbers >= 0 and < {self.batch}")
        return jax.tree.map(lambda leaf: jnp.take(leaf, index, axis=0, mode="clip"), self)

    @any_mesh(keep="self")
    def rollback(self, count: int | Int[Array, "*B"] | np.ndarray | Sequence[int]) -> AttentionCache:
        """Return the cache without its last `count` tokens, exactly as if they had never been appended.

        Only tokens that the cache holds are counted. Where lengths were traced, some drafted tokens may not have fit:
        use `truncate` then, which says what to keep.

        Args:
            count: one integer for all rows or integers [B], each at most the row's `undoable`. Every appended token
                raises that by one, up to `max_rollback`, and every token taken back lowers it by one.

        Raises:
            ValueError: `count` is not an integer or integers [B] or, where it and the cache are concrete, is negative
                or more than can be taken back. Where either is traced, rows go back as far as they can.
        """
        back, concrete = as_lengths("count", count, self.batch, or_one=True)
        require("count", concrete, lambda a: a >= 0, "no negative number")
        undoable = None if concrete is None else on_host(self.undoable)
        if concrete is not None and undoable is not None:
            able = f"at most what can be taken back, {undoable.tolist()} (max_rollback is {self.max_rollback})"
            require("count", np.broadcast_to(concrete, undoable.shape), lambda a: a <= undoable, able)
        return self._taken_back(back)

    @any_mesh(keep="self")
    def truncate(self, lengths: int | Int[Array, "*B"] | np.ndarray | Sequence[int]) -> AttentionCache:
        """Return the cache with at most `lengths` tokens per row, exactly as if later ones had never been appended.

        After drafting, call `truncate(lengths before + accepted)`, whether or not all the drafted tokens fit.

        Args:
            lengths: tokens to keep, one integer for all rows or integers [B]: at most the row's length, and at least
                its length minus its `undoable`.

        Raises:
            ValueError: `lengths` is not an integer or integers [B] or, where it and the cache are concrete, is more
                than a row has or fewer than it can go back to. Where either is traced, rows come as near as they can.
        """
        kept, concrete = as_lengths("lengths", lengths, self.batch, or_one=True)
        require("lengths", concrete, lambda a: a >= 0, "no negative number")
        held, undoable = (None if concrete is None else on_host(a) for a in (self.lengths, self.undoable))
        if concrete is not None and held is not None and undoable is not None:
            wanted, least = np.broadcast_to(concrete, held.shape), held - undoable
            require("lengths", wanted, lambda a: a <= held, f"at most what the rows have, {held.tolist()}")
            able = f"at least what cannot be taken back, {least.tolist()} (max_rollback is {self.max_rollback})"
            require("lengths", wanted, lambda a: a >= least, able)
        return self._taken_back(self.lengths - jnp.maximum(kept, 0))

    def _taken_back(self, count: Int32[Array, "*B"]) -> AttentionCache:
        """The cache without its last `count` tokens, or as many of them as can be taken back."""
        count = jnp.clip(count, 0, self.undoable)
        return dataclasses.replace(self, lengths=self.lengths - count, undoable=self.undoable - count)

    @any_mesh(like="self", dims=1)
    def recent_keys(self, count: int) -> Float[Array, "B T D"]:
        """The last `count` raw keys of each row, [B, count, D]; arbitrary where a row has fewer.

        Raises:
            ValueError: `count` is not an int from 0 to the sliding window; the cache may not have kept more.
        """
        return self.last_keys(as_int("count", count, 0, self.window.shape[1] - self.max_rollback))

    def last_keys(self, count: int) -> Array:
        """`recent_keys` for a checked count."""
        return _recent(self.window, self.lengths, count)

    def extended(
        self,
        counts: Int32[Array, " B"],
        kv: Float[Array, "B T D"],
        compressor: CompressorState | None,
        indexer: CompressorState | None,
    ) -> AttentionCache:
        """Append the first `counts` of T tokens to each row: raw keys, and the states after them (`extended_state`).

        Args:
            counts: int32 [B], each at most T and at most what the row has room for.
            kv: raw keys after RoPE, [B, T, D].
            compressor: the compressor's new state, or None.
            indexer: the indexer's new state, or None.
        """
        return dataclasses.replace(
            self,
            lengths=self.lengths + counts,
            undoable=jnp.minimum(self.undoable + counts, self.max_rollback),
            window=_pushed(self.window, kv, self.lengths, counts),
            compressor=compressor,
            indexer=indexer,
        )


def check_cache(cache: object, config: AttentionConfig, layer: LayerSpec, batch: Size, dtype: DTypeLike) -> None:
    """Raise ValueError unless `cache` is one of this layer, for `batch` rows and this dtype."""
    if not isinstance(cache, AttentionCache):
        raise ValueError(f"cache: expected an AttentionCache, got {type(cache).__name__}")
    for name in ("capacity", "max_rollback"):
        as_int(f"cache.{name}", getattr(cache, name), 0)
    sizes = (batch, cache.capacity, cache.max_rollback, dtype)
    expected = jax.eval_shape(lambda: AttentionCache._empty(config, layer, *sizes))
    kind = layer.layer_type.value
    for part in ("compressor", "indexer"):
        if (getattr(cache, part) is None) != (getattr(expected, part) is None):
            has = "without" if getattr(cache, part) is None else "with"
            raise ValueError(
                f"cache: expected one that this {kind} layer's init_cache makes, got one of another layer type, "
                f"{has} {part} state"
            )
    leaves = jax.tree_util.tree_leaves_with_path
    wanted, got = (
        [(jax.tree_util.keystr(path), leaf.shape, leaf.dtype) for path, leaf in leaves(tree)]
        for tree in (expected, cache)
    )
    if wanted != got:
        differing = next(pair for pair in zip(wanted, got, strict=True) if pair[0] != pair[1])
        raise ValueError(
            f"cache: expected one that this {kind} layer's init_cache makes for {batch} rows, {differing[0]}, "
            f"got {differing[1]}"
        )


def counts_of(
    cache: AttentionCache, x: Float[Array, "B T E"], lengths: Int[Array, " B"] | np.ndarray | Sequence[int] | None
) -> Int32[Array, " B"]:
    """Tokens that each row gets of T, int32 [B]; checked where they are concrete, else limited to what fits."""
    batch, size, _ = x.shape
    if lengths is None:  # a symbolic batch has no concrete values
        lengths = (np if isinstance(batch, int) else jnp).full((batch,), size, np.int32)
    counts, values = as_lengths("lengths", lengths, batch)
    require("lengths", values, lambda a: (a >= 0) & (a <= size), f"0 to {size}, the tokens of x")
    held = None if values is None else on_host(cache.lengths)
    if values is not None and held is not None:
        room = cache.capacity - held
        most = f"{room[int((values > room).argmax())]} of {cache.capacity}" if room.size else "none"
        require("lengths", values, lambda a: a <= room, f"at most what the cache has room for, {most}")
    return jnp.minimum(narrowed(counts, 0, size), cache.capacity - cache.lengths)


def with_history(
    state: CompressorState,
    lengths: Int32[Array, " B"],
    history: int,
    kv: Float[Array, "B T F"],
    gate: Float[Array, "B T F"],
) -> tuple[Float[Array, "B rows F"], Float[Array, "B rows F"]]:
    """Prepend the last `history` earlier tokens to projected ones: values and gates, [B, history + T, F]."""

    def joined(ring: Array, new: Array) -> Array:
        return jnp.concatenate([_recent(ring, lengths, history).astype(new.dtype), new], axis=1)

    return joined(state.kv, kv), joined(state.gate, gate)


def extended_state(
    state: CompressorState,
    lengths: Int32[Array, " B"],
    counts: Int32[Array, " B"],
    kv: Float[Array, "B T F"],
    gate: Float[Array, "B T F"],
    slots: Int32[Array, "B windows"],
    entries: Float[Array, "B windows D"],
) -> CompressorState:
    """The state with new tokens, and with the entries of the windows that they complete, each in its slot.

    Entries with slots past the end are dropped; `WindowLayout.entry_slots` gives such slots to incomplete windows.
    """
    return CompressorState(
        _put(state.entries, slots, entries),
        _pushed(state.kv, kv, lengths, counts),
        _pushed(state.gate, gate, lengths, counts),
    )


def _recent(ring: Array, lengths: Array, count: int) -> Array:
    """Rows of positions [length - count, length), [B, count, F]; arbitrary for positions below 0."""
    row = jnp.mod(lengths[:, None] - count + jnp.arange(count, dtype=jnp.int32)[None], ring.shape[1])
    return jnp.take_along_axis(ring, row[:, :, None], axis=1, mode="promise_in_bounds")


def _pushed(ring: Array, rows: Array, lengths: Array, counts: Array) -> Array:
    """Append the first `counts` of T rows to a ring after `lengths` earlier ones; in place under jit."""
    size = ring.shape[1]
    index = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=jnp.int32)[None], rows.shape[:2])
    if rows.shape[1] > size:  # only the last `size` of them stay
        first = jnp.clip(counts - size, 0, rows.shape[1] - size)
        index = first[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
        rows = jnp.take_along_axis(rows, index[:, :, None], axis=1, mode="promise_in_bounds")
    row = jnp.where(index < counts[:, None], jnp.mod(lengths[:, None] + index, size), size + index)
    return _put(ring, row, rows)


def _put(array: Array, index: Array, rows: Array) -> Array:
    """Scatter rows [B, T, F] into `array` [B, N, F] at unique index [B, T]; those past the end are dropped.

    Mapped over the batch, so that it stays sharded.
    """
    return jax.vmap(lambda a, i, r: a.at[i].set(r.astype(a.dtype), mode="drop", unique_indices=True))(
        array, index, rows
    )
