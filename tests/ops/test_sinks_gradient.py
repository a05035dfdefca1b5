"""The sinks' gradient where the output is rounded to bfloat16: it keeps float32's digits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from foveal.geometry import Documents, Visibility
from foveal.ops import core_attention
from foveal.testing.reference import reference_core_attention, reference_visibility

H, D, W = 8, 16, 16
LIMIT = 1e-5  # of the largest component


def problem(seed: int, length: int, slots: int) -> tuple[jax.Array, ...]:
    """q, kv, entries and a cotangent in bfloat16, sinks in float32."""
    rng = np.random.default_rng(seed)
    shapes = ((1, length, H, D), (1, length, D), (1, slots, D), (1, length, H, D))
    q, kv, entries, d_out = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes)
    return q, kv, entries, d_out, jnp.asarray(rng.normal(size=H), jnp.float32)


@pytest.mark.parametrize(
    ("implementation", "length", "ratio", "selected", "seeds"),
    [
        pytest.param("chunked", 64, 4, None, 20, id="chunked, few entries"),
        pytest.param("dense", 64, 4, None, 20, id="dense"),
        pytest.param("chunked", 300, 2, None, 3, id="chunked, streamed, the last tile overlaps"),
        pytest.param("chunked", 300, 2, 9, 3, id="chunked, gathered"),
    ],
)
def test_the_sinks_gradient_of_bfloat16_inputs_is_that_of_float64(implementation, length, ratio, selected, seeds):
    visibility = Visibility(Documents.unpacked(1, length), W, ratio)
    slots = length // ratio
    window, entry = (mask[0] for mask in reference_visibility(np.ones((1, length), int), W, ratio))

    @jax.jit
    def gradient(q, kv, entries, d_out, sinks, indices):
        def attend(sinks):
            return core_attention(
                q, kv, entries, visibility=visibility, indices=indices, sinks=sinks, implementation=implementation
            )

        return jax.vjp(attend, sinks)[1](d_out)[0]

    @jax.jit
    def expected(q, kv, entries, d_out, sinks, mask):
        def attend(sinks):
            return reference_core_attention(q[0], kv[0], entries[0], window, mask, sinks, D**-0.5)[0]

        return jax.vjp(attend, sinks)[1](d_out[0])[0]

    for seed in range(seeds):
        arrays, indices, mask = problem(seed, length, slots), None, entry
        if selected is not None:
            indices = np.random.default_rng([seed, 1]).integers(0, slots, (1, length, selected)).astype(np.int32)
            mask = entry & (indices[0, :, :, None] == np.arange(slots)).any(1)
            indices = jnp.asarray(indices)
        got = np.asarray(gradient(*arrays, indices), np.float64)
        with jax.enable_x64(True):
            want = np.asarray(expected(*(jnp.asarray(np.asarray(a, np.float64)) for a in arrays), mask))
        error = float(np.abs(got - want).max() / np.abs(want).max())
        assert error <= LIMIT
