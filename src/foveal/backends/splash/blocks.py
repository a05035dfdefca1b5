"""Block sizes of the Splash kernels."""

from __future__ import annotations

import dataclasses

from foveal.checks import as_int

LANES = 128
"""Width of a vector register, which divides all block sizes."""

_SIZES = (128, 256, 512, 1024)

_TILE_BYTES = 20
"""Bytes of scalar memory that Splash needs per non-empty tile."""

_SCALAR_MEMORY = 512 << 10
"""Bytes that the list of tiles may take of the 1 MiB of scalar memory."""

_STACKED_HEADS, _STACKED_ROWS = 8, 1024
"""Limits of a tile of stacked heads, for a head dim of 512: 2048 rows do not fit into VMEM."""


@dataclasses.dataclass(frozen=True)
class SplashBlocks:
    """Sizes of the tiles that the kernels work on: multiples of 128.

    Attributes:
        q: queries of a forward tile.
        kv: keys of a forward tile.
        q_backward: queries of a backward tile.
        kv_backward: keys of a backward tile.
        stacked_heads: query heads that a forward tile takes together, which load the shared keys once for all of them.
            1 where Tokamax has no such tiles (before 0.0.17).

    Raises:
        ValueError: a size that is not a positive multiple of 128, or `stacked_heads` below 1.
    """

    q: int
    kv: int
    q_backward: int
    kv_backward: int
    stacked_heads: int = 1

    def __post_init__(self) -> None:
        """Check every size, and make it a plain `int`."""
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), 1 if field.name == "stacked_heads" else LANES
            size = as_int(field.name, value, least)
            if size % least:
                raise ValueError(f"{field.name}: expected a multiple of {LANES}, got {size}")
            object.__setattr__(self, field.name, size)

    @classmethod
    def for_shapes(
        cls, length: int, slots: int, heads: int, *, sliding_window: int, can_stack: bool, dynamic: bool = False
    ) -> SplashBlocks:
        """Default sizes for these shapes.

        Forward: keys in the smallest blocks whose list of tiles fits the scalar memory, since a window of 128 keys
        wastes least in small ones. As many queries, or at least 256 where heads are not stacked: 128 rows alone do not
        fill the matrix unit. Backward: at least 256 by 256, which still fit into VMEM at a head dim of 512; smaller
        ones compute less but move the partial sums of the queries' gradient more often. The list of a mask that is data
        has every tile, even empty ones.
        """

        def stacked(rows: int) -> int:
            most = min(_STACKED_HEADS, _STACKED_ROWS // rows) if can_stack else 1
            return next(n for n in range(min(most, heads), 0, -1) if heads % n == 0)

        def least(q_least: int, kv_least: int) -> tuple[int, int]:
            """The smallest blocks that fit, q's and kv's."""
            for kv in _SIZES:
                q = max(kv, q_least)
                if kv >= kv_least and tiles(q, kv) * _TILE_BYTES <= _SCALAR_MEMORY:
                    return q, kv
            return _SIZES[-1], _SIZES[-1]

        def tiles(q: int, kv: int) -> int:
            if dynamic:
                return -(-length // q) * (-(-length // kv) + -(-slots // kv))
            return _tiles(length, slots, sliding_window, q, kv)

        q, kv = least(LANES if stacked(LANES) > 1 else 256, LANES)
        return cls(q, kv, *least(256, 256), stacked(q))


def _tiles(length: int, slots: int, sliding_window: int, q: int, kv: int) -> int:
    """Approximate number of non-empty tiles: the window's diagonal, and the triangle of the entries."""
    rows = -(-length // q)
    return rows * (-(-(sliding_window + q) // kv) + 1) + rows * (-(-slots // kv) + 1) // 2
