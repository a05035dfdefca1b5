"""Every memory that a layer can attend to, as one function: documents in, their outputs out.

A new memory is a line in `MEMORIES`; test_memories.py then holds it to what all of them must do.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from foveal import LayerType
from tests.nn.serving import CAPACITY, served

Documents = Sequence[np.ndarray]  # hidden states [n, E] each
ROW = 60


def fresh(layer_type: LayerType, documents: Documents) -> list[np.ndarray]:
    """One pass over two packed rows, with padding before, between and after the documents, which holds NaN."""
    layer = served(layer_type)
    x, ids = np.full((2, ROW, layer.config.hidden_size), np.nan, np.float32), np.zeros((2, ROW), np.int32)
    places, ends = [], [3, 0]
    for number, document in enumerate(documents):
        row = int(np.argmin(ends))
        places.append((row, slice(ends[row], ends[row] + len(document))))
        x[places[-1]], ids[places[-1]] = document, number + 1
        ends[row] += len(document) + number % 2
    out = np.asarray(layer.packed(jnp.asarray(x), jnp.asarray(ids)))
    np.testing.assert_array_equal(out[ids == 0], 0.0)
    return [out[place] for place in places]


def cached(layer_type: LayerType, documents: Documents) -> list[np.ndarray]:
    """A row per document behind a cache, in chunks that differ from row to row."""
    layer, outputs = served(layer_type), [[]] * len(documents)
    cache, done = layer.layer.init_cache(len(documents), CAPACITY), [0] * len(documents)
    for sizes in ((0, 5, 10, 2, 1), (7, 1, 0, 3, 12), (1, 4, 1, 11, 2), (ROW,) * 5):
        ends = [min(len(d), n + size) for d, n, size in zip(documents, done, sizes, strict=True)]
        chunks = [d[n:end] for d, n, end in zip(documents, done, ends, strict=True)]
        new, cache = layer.append(cache, chunks)
        outputs, done = [[*old, more] for old, more in zip(outputs, new, strict=True)], ends
    return [np.concatenate(output) for output in outputs]


MEMORIES: dict[str, Callable[[LayerType, Documents], list[np.ndarray]]] = {"fresh": fresh, "cached": cached}
