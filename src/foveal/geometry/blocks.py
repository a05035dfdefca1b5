"""Loops over rows or slots in blocks of one static size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from foveal.program import varying
from foveal.typing import Array, Bool, Int32

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The range [0, total) in blocks of `size` <= total, the last of which is shifted to end at `total`.

    All blocks thus have the same shape. The last may repeat rows of the one before; `Block.fresh` marks the new ones.
    """

    size: int
    total: int

    @property
    def count(self) -> int:
        """Number of blocks."""
        return -(-self.total // self.size)

    def at(self, index: Int32[Array, ""]) -> Block:
        """Return the block at a traced index below `count`."""
        return Block(jnp.minimum(index * self.size, self.total - self.size), index * self.size, self.size)

    def fold(
        self,
        step: Callable[[Block, T], T],
        start: T,
        *,
        like: Any = (),
        bounds: tuple[int | Array, int | Array] | None = None,
        backwards: bool = False,
    ) -> T:
        """Loop over the blocks: `made = step(block, made)`, with `start` as the first `made`.

        Args:
            step: returns `made` with what one block adds or replaces.
            start: a pytree of arrays.
            like: operands of the steps; `start` is cast to vary over the same mesh axes as they do (`varying`).
            bounds: the first block and one past the last, int32 scalars; all blocks by default.
            backwards: begin with the last block; the rows that it repeats are then overwritten by the one before it.
        """
        first, end = (jnp.int32(0), jnp.int32(self.count)) if bounds is None else bounds
        last = self.count - 1

        def at(i: Array, made: T) -> T:
            return step(self.at(last - i if backwards else i), made)

        return jax.lax.fori_loop(first, end, at, varying(start, like))


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows [start, start + size), of which those from `own` on are in no earlier block.

    Attributes:
        start: first row, an int32 scalar.
        own: first row that is in no earlier block, an int32 scalar.
        size: number of rows, static.
    """

    start: Int32[Array, ""]
    own: Int32[Array, ""]
    size: int

    @property
    def fresh(self) -> Bool[Array, " T"]:
        """bool [size]: whether each row is in no earlier block."""
        return self.start + jnp.arange(self.size, dtype=jnp.int32) >= self.own

    def take(self, arrays: T, axis: int = 1) -> T:
        """Return the block's rows of an array, or of each array of a pytree."""
        return jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, self.start, self.size, axis=axis), arrays)

    def put(self, arrays: T, rows: T, axis: int = 1) -> T:
        """Return the arrays with the block's rows replaced by `rows`, in place under jit."""

        def put(array: Array, rows: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(array, rows, self.start, axis=axis)

        return jax.tree.map(put, arrays, rows)

    def add(self, array: Array, rows: Array, axis: int = 1) -> Array:
        """Return the array with `rows` added to the block's rows."""
        return self.put(array, self.take(array, axis) + rows, axis)
