"""Memory of the choice of entries: scores of one block at a time, and nothing that grows faster than the rows."""

import jax
import jax.numpy as jnp

from foveal.geometry import Documents, Visibility
from foveal.ops import select_entries
from tests.support.programs import largest_array


def largest_of_call(length: int, *, block_size: int | None, heads: int = 8, dim: int = 2, ratio: int = 4) -> int:
    """Elements of the largest array of a call with `length` rows, by tracing alone."""

    def run(q, weights, keys, start):
        visibility = Visibility(Documents(document_start=start), 128, ratio)
        return select_entries(q, weights, keys, visibility=visibility, top_k=16, block_size=block_size)

    slots = length // ratio
    floats = [
        jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, length, heads, dim), (1, length, heads), (1, slots, dim))
    ]
    return largest_array(run, *floats, jax.ShapeDtypeStruct((1, length), jnp.int32))


def test_scores_exist_for_one_block_at_a_time():
    length, slots, heads = 512, 128, 8
    assert largest_of_call(length, block_size=None) <= length * slots * heads  # all of it: 2 MiB are no matter
    for block_size in (16, 60):
        assert largest_of_call(length, block_size=block_size) == block_size * slots * heads
    assert largest_of_call(length, block_size=16) < length * slots


def test_memory_is_linear_in_the_rows():
    sizes = {length: largest_of_call(length, block_size=None) for length in (1 << 14, 1 << 17, 1 << 20)}
    assert sizes[1 << 14] <= 1 << 22
    assert sizes[1 << 20] <= 8 * sizes[1 << 17]
    assert sizes[1 << 20] < (1 << 20) * (1 << 18) / 1000  # S x C
