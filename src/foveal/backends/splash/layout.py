"""Positions of raw keys and entries in the columns of one key array."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class KeyLayout:
    """Layout of rows of queries, and of columns [window keys | padding | entries | padding].

    The window part has a column for every padded row, so each padded row sees its own column. Every row must see
    something: Splash leaves the output of a block of queries that see nothing uninitialised.

    Attributes:
        rows: S, the length without padding.
        slots: C, the number of entries; 0 for none.
        padded_rows: rows with padding.
        entry_start: column of the first entry.
        columns: columns with padding.
    """

    rows: int
    slots: int
    padded_rows: int
    entry_start: int
    columns: int

    @classmethod
    def for_shapes(cls, rows: int, slots: int, q_block: int, kv_block: int) -> KeyLayout:
        """Layout with the least padding to multiples of `q_block` and `kv_block`; entries start a block.

        At least three blocks of columns: with fewer, Tokamax 0.0.12's backward kernel reads sums before they are
        written.
        """
        padded_rows = _up(rows, q_block)
        entry_start = _up(padded_rows, kv_block)
        return cls(rows, slots, padded_rows, entry_start, max(_up(entry_start + slots, kv_block), 3 * kv_block))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
