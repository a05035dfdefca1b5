"""Static sizes of the fused kernels, chosen at trace time by one rule."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from foveal.backends.operands import Operands
from foveal.geometry import Visibility, max_history
from foveal.program import device_kind
from foveal.typing import DTypeLike, Precision

LANES = 128
SUBLANES = 16
"""Rows of a packed bfloat16 vector: where slabs and blocks of slots begin."""

_CHUNK = 512
"""Rows whose scores are computed at a time: with twice or half as many, the v5p compiler's schedule of the forward
kernel is 13 % to 17 % longer."""

_FEW_SLOTS, _FIRST_SLOTS = 32, 112
"""Slots scored together with the window: all, where there are so few, else the first of those that a tile sees."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """Sizes that suit a TPU generation.

    Attributes:
        block_slots: slots of a block: those that fill the matrix unit.
        backward_chunk: rows that the backward kernel scores at a time.
        vmem_bytes: VMEM that a kernel may ask for.
    """

    block_slots: int
    backward_chunk: int
    vmem_bytes: int


_V5P, _V6E, _V7X = Chip(128, 512, 48 << 20), Chip(256, 256, 90 << 20), Chip(256, 256, 40 << 20)
CHIPS = {"TPU v5": _V5P, "TPU v5p": _V5P, "TPU v5 lite": _V6E, "TPU v6 lite": _V6E, "TPU7x": _V7X}
"""Chips by the name that JAX has for their devices."""


def chip() -> Chip:
    """Return the chip of the program's devices; for one that is not in `CHIPS`, the one with the least VMEM."""
    return CHIPS.get(device_kind(), _V7X)


@dataclasses.dataclass(frozen=True)
class FusedPlan:
    """Static parameters of a call. A tile is T tokens with all their heads: T x H rows, in order of heads, then tokens.

    Attributes:
        length: S.
        tokens: T, tokens per tile.
        heads: H.
        dim: D.
        sliding_window: W.
        history: raw keys before the first query's own.
        slots: C.
        first_slots: slots that are scored together with the window.
        block_slots: slots per step of the loop over the others.
        chunk: rows that are scored at a time.
        scale: factor on the logits.
        precision: matmul precision.
        vmem_bytes: VMEM that a kernel may ask for.
        interpret: emulate a TPU.
    """

    length: int
    tokens: int
    heads: int
    dim: int
    sliding_window: int
    history: int
    slots: int
    first_slots: int
    block_slots: int
    chunk: int
    scale: float
    precision: Precision
    vmem_bytes: int
    interpret: bool

    @property
    def tiles(self) -> int:
        """Number of tiles per batch row."""
        return -(-self.length // self.tokens)

    @property
    def rows(self) -> int:
        """Rows of a tile: T x H."""
        return self.tokens * self.heads

    @property
    def chunk_heads(self) -> int:
        """Heads per chunk."""
        return self.chunk // self.tokens

    @property
    def chunks(self) -> int:
        """Number of chunks of a tile."""
        return self.rows // self.chunk

    @property
    def reach(self) -> int:
        """Raw keys of a tile's slab before its first token's own: at least W - 1, a multiple of T and of 16."""
        return up(max_history(self.sliding_window), math.lcm(self.tokens, SUBLANES))

    @property
    def slab(self) -> int:
        """Raw keys that a tile is scored with."""
        return self.reach + self.tokens

    @property
    def loops(self) -> bool:
        """Whether a tile may see more slots than its first."""
        return self.slots > self.first_slots

    @property
    def padded_slots(self) -> int:
        """Slots of the kernel's array: any 16-aligned block that begins at a slot ends within."""
        if not self.slots:
            return 0
        return up(self.slots, SUBLANES) + self.first_slots + (self.block_slots if self.loops else 0)

    @property
    def padded_keys(self) -> int:
        """Raw keys of the kernel's array: tile i's slab begins at i x T."""
        return self.reach + self.tiles * self.tokens


@dataclasses.dataclass(frozen=True)
class FusedSizes:
    """Choices of a user that a plan follows.

    Attributes:
        block_slots: slots per step of the loop; None for the chip's.
        interpret: emulate a TPU.
    """

    block_slots: int | None = None
    interpret: bool = False

    def plan(self, operands: Operands, *, heads: int | None = None, backward: bool = False) -> FusedPlan:
        """Choose the sizes for a call, or for the share of it that a device with `heads` of the heads computes."""
        _, length, all_heads, dim = operands.q.shape
        size = length, all_heads if heads is None else heads, dim
        return self.plan_for(size, operands.visibility, operands.scale, operands.precision, backward=backward)

    def plan_for(
        self,
        size: tuple[int, int, int],
        visibility: Visibility,
        scale: float = 1.0,
        precision: Precision = None,
        *,
        backward: bool = False,
    ) -> FusedPlan:
        """Choose the sizes for queries of `size` S, H and D."""
        (length, heads, dim), slots, device = size, visibility.slots, chip()
        tokens = tokens_per_tile(heads)
        # Tiles of packed rows see few slots: in the backward pass the room for more costs them more than a block.
        many = slots > _FEW_SLOTS and (visibility.documents.is_unpacked or not backward)
        return FusedPlan(
            length=length,
            tokens=tokens,
            heads=heads,
            dim=dim,
            sliding_window=visibility.sliding_window,
            history=visibility.history,
            slots=slots,
            first_slots=0 if not slots else _FIRST_SLOTS if many else _FEW_SLOTS,
            block_slots=self.block_slots or device.block_slots,
            chunk=_chunk(tokens, heads, device.backward_chunk if backward else _CHUNK),
            scale=scale,
            precision=precision,
            vmem_bytes=device.vmem_bytes,
            interpret=self.interpret,
        )


def vmem_needed(plan: FusedPlan, dtype: DTypeLike) -> int:
    """Bytes of VMEM that the backward kernel needs, the larger of the two, apart from what the compiler adds."""
    element, wide = jnp.dtype(dtype).itemsize, 4
    blocks = 2 * 4 * plan.rows * plan.dim * element  # of q, out and their gradients, each twice
    keys = (2 * element + wide) * plan.slab * plan.dim
    entries = (element + wide) * plan.padded_slots * plan.dim
    sums = wide * plan.rows * plan.dim if plan.loops else 0
    scores = 6 * wide * plan.chunk * (plan.slab + plan.first_slots)
    return blocks + keys + entries + sums + scores


def tokens_per_tile(heads: int) -> int:
    """T: 16, or as many as make whole vectors of 128 rows."""
    return max(SUBLANES, LANES // math.gcd(heads, LANES // SUBLANES))


def _chunk(tokens: int, heads: int, most: int) -> int:
    """Rows of a chunk: as many, up to `most`, as are whole heads and whole vectors and divide the tile."""
    sizes = [tokens * n for n in range(1, heads + 1) if not heads % n and not tokens * n % LANES]
    return max((size for size in sizes if size <= most), default=sizes[0])


def up(value: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-value // multiple) * multiple
