"""Properties of a layer's outputs that hold for every memory it can attend to (`MEMORIES`)."""

import functools

import numpy as np
import pytest

from foveal.testing.numerics import assert_close
from tests.nn.layers import compiled_reference, every_layer_type
from tests.nn.memories import MEMORIES
from tests.nn.serving import served, text

every_memory = pytest.mark.parametrize("memory", MEMORIES)
LENGTHS = (19, 33, 1, 26, 8)  # a token, less than any window, whole windows and not


@functools.cache
def documents() -> tuple[np.ndarray, ...]:
    return tuple(row[:length] for row, length in zip(text(21, rows=len(LENGTHS)), LENGTHS, strict=True))


@functools.cache
def outputs(memory, layer_type) -> list[np.ndarray]:
    return MEMORIES[memory](layer_type, documents())


@every_memory
@every_layer_type
def test_every_document_comes_out_as_the_reference_has_it_alone(memory, layer_type):
    params = served(layer_type).params
    for document, got in zip(documents(), outputs(memory, layer_type), strict=True):
        want, _ = compiled_reference(layer_type).vjp(params, document[None], None, np.zeros_like(document[None]))
        assert_close(got, want[0], np.float32)


@every_memory
@every_layer_type
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e4])
def test_what_one_document_holds_changes_no_bit_of_another(memory, layer_type, value):
    for changed in range(len(LENGTHS)):
        other = [value * d[::-1] if i == changed else d for i, d in enumerate(documents())]
        got = MEMORIES[memory](layer_type, other)
        for i, (new, old) in enumerate(zip(got, outputs(memory, layer_type), strict=True)):
            assert np.array_equal(new, old) == (i != changed), i


@every_memory
@every_layer_type
@pytest.mark.parametrize("value", [np.nan, 2.0])
def test_a_token_changes_no_bit_before_it(memory, layer_type, value):
    """And its own output, whatever it is."""
    for token in (0, 3, 7, 18, 25):
        other = [np.where(np.arange(len(d))[:, None] == token, np.float32(value), d) for d in documents()]
        got = MEMORIES[memory](layer_type, other)
        for new, old in zip(got, outputs(memory, layer_type), strict=True):
            np.testing.assert_array_equal(new[:token], old[:token])
            if token < len(old):
                assert not np.array_equal(new[token], old[token])
