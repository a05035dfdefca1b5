"""Block sizes of the Splash kernels."""

from __future__ import annotations

import dataclasses

LANES = 128
"""Blocks are whole vector registers wide."""

_SIZES = (128, 256, 512, 1024)

_TILE_BYTES = 20
"""Scalar memory that Splash needs for one tile that is not empty."""

_SCALAR_MEMORY = 512 << 10
"""Of the 1 MiB of scalar memory, what the list of tiles may take."""

_STACKED_HEADS = 8


@dataclasses.dataclass(frozen=True)
class SplashBlocks:
    """Sizes of the tiles that the kernels work on: multiples of 128.

    Attributes:
        q: queries of a forward tile.
        kv: keys of a forward tile.
        q_backward: queries of a backward tile.
        kv_backward: keys of a backward tile.
        stacked_heads: query heads that a forward tile takes together: the shared keys are then loaded once for all of
            them. 1 where Tokamax has no such tiles (before 0.0.17).

    Raises:
        ValueError: a size that is not a positive multiple of 128, or `stacked_heads` below 1.
    """

    q: int
    kv: int
    q_backward: int
    kv_backward: int
    stacked_heads: int = 1

    def __post_init__(self) -> None:
        """Checks every size."""
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), 1 if field.name == "stacked_heads" else LANES
            if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value % least:
                wanted = "an int >= 1" if least == 1 else f"a positive multiple of {LANES}"
                raise ValueError(f"{field.name}: expected {wanted}, got {value!r}")

    @classmethod
    def of(
        cls, length: int, slots: int, heads: int, *, sliding_window: int, can_stack: bool, dynamic: bool = False
    ) -> SplashBlocks:
        """The table.

        Forward, the smallest block whose tiles fit the scalar memory: a window of 128 keys wastes the least in small
        blocks, and stacked heads fill the matrix unit however small they are. Without stacking 256 is the least, as
        128 rows do not fill it. Backward, 256 at least, which a head dim of 512 still fits into VMEM. The list of a
        mask that is data has every tile, also the empty ones.
        """
        stacked = next(n for n in range(min(_STACKED_HEADS, heads), 0, -1) if heads % n == 0) if can_stack else 1

        def tiles(size: int) -> int:
            if dynamic:
                return -(-length // size) * (-(-length // size) + -(-slots // size))
            return _tiles(length, slots, sliding_window, size)

        fits = [size for size in _SIZES if tiles(size) * _TILE_BYTES <= _SCALAR_MEMORY]
        least = fits[0] if fits else _SIZES[-1]
        forward = least if stacked > 1 else max(least, 256)
        backward = max(least, 256)
        return cls(forward, forward, backward, backward, stacked)


def _tiles(length: int, slots: int, sliding_window: int, size: int) -> int:
    """About how many square tiles are not empty: the window's diagonal, and the triangle of the entries."""
    rows = -(-length // size)
    return rows * (-(-sliding_window // size) + 1) + rows * (-(-slots // size) + 1) // 2
