"""Rows, or slots, in blocks of one size."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from foveal.typing import Array, Bool, Int32


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

    def take(self, array: Array, axis: int = 1) -> Array:
        """Its rows of an array."""
        return jax.lax.dynamic_slice_in_dim(array, self.start, self.size, axis=axis)

    def put(self, array: Array, rows: Array, axis: int = 1) -> Array:
        """The array with its rows replaced, in place under jit."""
        return jax.lax.dynamic_update_slice_in_dim(array, rows, self.start, axis=axis)

    def add(self, array: Array, rows: Array, axis: int = 1) -> Array:
        """The array with `rows` added to its rows."""
        return self.put(array, self.take(array, axis) + rows, axis)
