"""Rows, or slots, in blocks of one size."""

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
    """[0, total) in blocks of `size`, at most `total`. The last one is moved up to end with the whole.

    Shapes are then the same for all blocks; what the last one repeats of the one before, its `fresh` tells.
    """

    size: int
    total: int

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return -(-self.total // self.size)

    def at(self, index: Int32[Array, ""]) -> Block:
        """The block of a traced index below `count`."""
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
        """Loops over the blocks: `made = step(block, made)`, from `start` on.

        Args:
            step: what one block adds or replaces.
            start: a pytree of arrays.
            like: operands of the steps: `start` must vary over the mesh axes that they vary over (`varying`).
            bounds: the first block and one past the last, int32 scalars; all blocks by default.
            backwards: begin with the last block, so that the rows it repeats are written again by the one before it.
        """
        first, end = (jnp.int32(0), jnp.int32(self.count)) if bounds is None else bounds
        last = self.count - 1

        def at(i: Array, made: T) -> T:
            return step(self.at(last - i if backwards else i), made)

        return jax.lax.fori_loop(first, end, at, varying(start, like))


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows [start, start + size), of which those from `own` on are in no block before.

    Attributes:
        start: int32 scalar.
        own: int32 scalar.
        size: static.
    """

    start: Int32[Array, ""]
    own: Int32[Array, ""]
    size: int

    @property
    def fresh(self) -> Bool[Array, " T"]:
        """bool [size]: rows that no block before has."""
        return self.start + jnp.arange(self.size, dtype=jnp.int32) >= self.own

    def take(self, arrays: T, axis: int = 1) -> T:
        """Its rows of an array, or of each array of a pytree."""
        return jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, self.start, self.size, axis=axis), arrays)

    def put(self, arrays: T, rows: T, axis: int = 1) -> T:
        """The arrays with its rows replaced, in place under jit."""

        def put(array: Array, rows: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(array, rows, self.start, axis=axis)

        return jax.tree.map(put, arrays, rows)

    def add(self, array: Array, rows: Array, axis: int = 1) -> Array:
        """The array with `rows` added to its rows."""
        return self.put(array, self.take(array, axis) + rows, axis)
