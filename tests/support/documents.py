"""Rows of documents, for property tests."""

import itertools

import jax
import numpy as np
from hypothesis import strategies as st

from foveal.geometry import Documents

documents_in = jax.jit(Documents.from_segment_ids, static_argnames="alignment")
"""Documents of segment ids by one compiled program, where it does not matter that the ids are concrete."""


def segment_ids(length: int, *, multiple: int = 1, batch: int = 2) -> st.SearchStrategy[np.ndarray]:
    """Rows of runs that start at multiples of `multiple`.

    Ids come in no order and come back, padding (0) stands anywhere, and the last run is cut short.
    """
    sizes = st.one_of(st.integers(1, 4), st.integers(1, length))
    runs = st.lists(st.tuples(st.sampled_from([0, 7, 2, 5]), sizes), min_size=1, max_size=length)

    def lay(runs: list[tuple[int, int]]) -> np.ndarray:
        row = [i for value, size in runs for i in [value] * size + [0] * (-size % multiple)]
        return np.array((row + [0] * length)[:length], np.int32)

    return st.lists(runs.map(lay), min_size=batch, max_size=batch).map(np.stack)


def documents_of(row: np.ndarray) -> list[tuple[int, int]]:
    """First row and one past the last of every document, which is a maximal run of one nonzero id."""
    found, t = [], 0
    for value, run in itertools.groupby(row.tolist()):
        size = len(list(run))
        found += [(t, t + size)] if value else []
        t += size
    return found


def each_alone(ids: np.ndarray, window: int, ratio: int) -> tuple[np.ndarray, np.ndarray]:
    """Both masks in which each document sees what it would see in a row of its own, and nothing else.

    A key is seen from its own row on for `window` rows, an entry from its last token on to its document's end.
    """
    batch, length = ids.shape
    keys = np.zeros((batch, length, length), bool)
    entries = np.zeros((batch, length, length // ratio if ratio else 0), bool)
    for b, row in enumerate(ids):
        for begin, end in documents_of(row):
            mine, token = slice(begin, end), np.arange(end - begin)
            keys[b, mine, mine] = (token[:, None] >= token) & (token[:, None] < token + window)
            if ratio:
                last = np.arange(ratio - 1, end - begin, ratio)
                entries[b, mine, begin // ratio : begin // ratio + len(last)] = token[:, None] >= last
    return keys, entries
