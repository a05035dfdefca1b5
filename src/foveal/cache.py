"""The decode state of a layer: what a token that comes later needs of those that came before."""

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
    """What a compressor keeps: all entries so far, and the last tokens' projections, of which entries will be made.

    Attributes:
        entries: [B, C, D] in the layer's dtype, by slot; C >= 1, be there a window that fits the capacity or not.
        kv: values [B, P, F] of the last P tokens in float32, a ring: position p is in row p % P.
        gate: their gates, the same.
    """

    entries: Float[Array, "B C D"]
    kv: Float[Array, "B P F"]
    gate: Float[Array, "B P F"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionCache:
    """The decode state of one layer for B rows, each a sequence of its own length. A pytree of static shapes.

    Build it with `init` or `CompressedAttention.init_cache`; `CompressedAttention.prefill` and `decode` return it with
    tokens appended. What a row holds is said by its length alone: whatever stands in the arrays beyond it, NaN
    included, changes nothing. DeepSeek-V4 technical report, arXiv 2606.19348, section 3.5.1.

    Attributes:
        lengths: int32 [B], tokens of each row.
        undoable: int32 [B], how many of them `rollback` and `truncate` can still take back.
        window: raw keys [B, W + max_rollback, D], a ring: position p is in row p % (W + max_rollback).
        compressor: the compressor's state; None in a sliding layer.
        indexer: the indexer's, whose entries are its keys; None but in a CSA layer.
        capacity: tokens that a row can hold. Static.
        max_rollback: how many tokens can be taken back at once. Static.
    """

    __no_type_check__ = True  # JAX builds pytrees of placeholders too: annotations cannot hold then

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
        """An empty cache.

        Args:
            config: sizes.
            layer_type: of the layer.
            batch: B; may be a symbolic dimension of `jax.export`.
            capacity: tokens that a row can hold, prompt included.
            max_rollback: how many tokens `rollback` and `truncate` must be able to take back at once: as many as are
                drafted and may be refused. Each costs a raw key, and what a compressor and an indexer project of it.
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
            # Two arrays, not one twice: each must be its own to be donated.
            projected = (batch, rows + max_rollback, layer.projections * width)
            kv, gate = (jnp.zeros(projected, wide) for _ in range(2))
            slots = max(capacity // layer.compress_ratio, 1)  # Orbax saves no empty array: one that nothing ever fills
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
        """B."""
        return self.lengths.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, B rows together; of `jax.eval_shape`'s placeholders too."""
        return sum(self.bytes_by_part().values())

    def bytes_by_part(self) -> dict[str, int]:
        """Bytes of window, entries, index_keys, compressor_state, indexer_state, lengths; 0 for what there is not."""
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
        """Rows made empty, for new sequences: all, or those where `rows`, bool [B], is True.

        Only lengths change. What the arrays held stays there until it is overwritten, and nothing reads it.

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
        """The rows `order`, integers [N], in that order: left out, repeated (beam search) or moved.

        Raises:
            ValueError: `order` is not integers [N], or, where it is concrete, names a row that there is not. A traced
                one is clipped to the rows there are.
        """
        index, concrete = as_lengths("order", order, None)
        require("order", concrete, lambda a: (a >= 0) & (a < self.batch), f"rows of the {self.batch} there are")
        return jax.tree.map(lambda leaf: jnp.take(leaf, index, axis=0, mode="clip"), self)

    @any_mesh(keep="self")
    def rollback(self, count: int | Int[Array, "*B"] | np.ndarray | Sequence[int]) -> AttentionCache:
        """The cache before its last `count` tokens: as if they had never been, exactly.

        The tokens counted are those that the cache holds. Of drafted ones some may have found no room, where lengths
        were traced: then only `truncate` knows what to keep.

        Args:
            count: how many, one for all rows or integers [B], each at most the row's `undoable`, which every appended
                token raises by one, up to `max_rollback`, and every token taken back lowers by one.

        Raises:
            ValueError: not such a number or, where it and the cache are concrete, negative or more than can be taken
                back. Where one is traced, rows go back as far as they can.
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
        """The cache with at most so many tokens a row: as if those after them had never been, exactly.

        After drafting it is `truncate(lengths before + accepted)`, whether or not all the drafted tokens found room.

        Args:
            lengths: tokens to keep, one number for all rows or integers [B]: at most the row's length, and at least
                its length less its `undoable`.

        Raises:
            ValueError: not such a number or, where it and the cache are concrete, more than the row has or fewer than
                it can go back to. Where one is traced, rows come as near as they can.
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
        """Without the last `count` tokens, as far as can be."""
        count = jnp.clip(count, 0, self.undoable)
        return dataclasses.replace(self, lengths=self.lengths - count, undoable=self.undoable - count)

    @any_mesh(like="self", dims=1)
    def recent_keys(self, count: int) -> Float[Array, "B T D"]:
        """The last `count` raw keys of each row, [B, count, D]; anything where a row has fewer.

        Raises:
            ValueError: `count` not an int from 0 to the sliding window: no more are kept for certain.
        """
        return self.last_keys(as_int("count", count, 0, self.window.shape[1] - self.max_rollback))

    def last_keys(self, count: int) -> Array:
        """`recent_keys`, for a count that was checked."""
        return _recent(self.window, self.lengths, count)

    def extended(
        self,
        counts: Int32[Array, " B"],
        kv: Float[Array, "B T D"],
        compressor: CompressorState | None,
        indexer: CompressorState | None,
    ) -> AttentionCache:
        """With `counts` tokens more a row, the first of T: their raw keys and the states after them (`extended_state`).

        Args:
            counts: int32 [B], each at most T and at most what the row has room for.
            kv: raw keys after RoPE, [B, T, D].
            compressor: the compressor's state.
            indexer: the indexer's.
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
    """Raises ValueError unless a cache is one of such a layer, for so many rows."""
    if not isinstance(cache, AttentionCache):
        raise ValueError(f"cache: expected an AttentionCache, got {type(cache).__name__}")
    for name in ("capacity", "max_rollback"):
        as_int(f"cache.{name}", getattr(cache, name), 0)
    sizes = (batch, cache.capacity, cache.max_rollback, dtype)
    expected = jax.eval_shape(lambda: AttentionCache._empty(config, layer, *sizes))
    kind = layer.layer_type.value
    for part in ("compressor", "indexer"):
        if (getattr(cache, part) is None) != (getattr(expected, part) is None):
            has = "none" if getattr(cache, part) is None else "one"
            raise ValueError(
                f"cache: expected one that this {kind} layer's init_cache makes, got one of another layer type: it has "
                f"{has} of a {part}'s states"
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
    """How many of the T tokens each row gets, int32 [B]; checked where known, else no more than fit."""
    batch, size, _ = x.shape
    if lengths is None:  # of a symbolic batch there are no values to look at
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
    """Projected tokens with the last `history` earlier ones before them: values and gates, [B, history + T, F]."""

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
    """The state with new tokens, and the entries of the windows that they complete, each in its slot.

    Slots past the end, `WindowLayout.entry_slots` gives them to windows that are not complete, take none.
    """
    return CompressorState(
        _put(state.entries, slots, entries),
        _pushed(state.kv, kv, lengths, counts),
        _pushed(state.gate, gate, lengths, counts),
    )


def _recent(ring: Array, lengths: Array, count: int) -> Array:
    """[B, count, F]: the rows of positions [length - count, length); anything for those below 0."""
    row = jnp.mod(lengths[:, None] - count + jnp.arange(count, dtype=jnp.int32)[None], ring.shape[1])
    return jnp.take_along_axis(ring, row[:, :, None], axis=1, mode="promise_in_bounds")


def _pushed(ring: Array, rows: Array, lengths: Array, counts: Array) -> Array:
    """The ring with the first `counts` of T rows behind `lengths` earlier ones; in place under jit."""
    size = ring.shape[1]
    index = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=jnp.int32)[None], rows.shape[:2])
    if rows.shape[1] > size:  # of so many only the last stay
        first = jnp.clip(counts - size, 0, rows.shape[1] - size)
        index = first[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
        rows = jnp.take_along_axis(rows, index[:, :, None], axis=1, mode="promise_in_bounds")
    row = jnp.where(index < counts[:, None], jnp.mod(lengths[:, None] + index, size), size + index)
    return _put(ring, row, rows)


def _put(array: Array, index: Array, rows: Array) -> Array:
    """`array` [B, N, F] with rows [B, T, F] at index [B, T], dropped where that is past the end; none comes twice.

    Mapped over the batch, so that it stays sharded.
    """
    return jax.vmap(lambda a, i, r: a.at[i].set(r.astype(a.dtype), mode="drop", unique_indices=True))(
        array, index, rows
    )
