"""Generated inputs are reproducible and hold the hard cases that tests rely on."""

import numpy as np
import pytest

from foveal.config import AttentionConfig
from foveal.layers import LayerType
from foveal.testing.generators import distinct_values, random_params, random_segment_ids


def test_random_segment_ids_cover_the_hard_cases():
    ids = random_segment_ids(0, 40, 30, max_document=9)
    assert ids.shape == (40, 30)
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, random_segment_ids(0, 40, 30, max_document=9))
    assert (ids != random_segment_ids(1, 40, 30, max_document=9)).any()
    padding = ids == 0
    inner = ~padding[:, :-2] & padding[:, 1:-1] & ~padding[:, 2:]
    adjacent = ~padding[:, :-1] & ~padding[:, 1:] & (ids[:, :-1] != ids[:, 1:])
    for case in (padding[:, 0], ~padding[:, 0], padding[:, -1], ~padding[:, -1], inner, adjacent):
        assert case.any()
    assert any(len(np.flatnonzero(np.diff(row == 3, prepend=False, append=False))) > 2 for row in ids)

    full = random_segment_ids(5, 20, 30, max_document=9, padding=False)
    assert (full != 0).all()
    for row in full:
        edges = np.flatnonzero(np.diff(row, prepend=0, append=0))
        assert np.diff(edges).max() <= 9


def test_distinct_values_are_distinct_and_shuffled():
    values = distinct_values((30, 50), 1)
    assert values.shape == (30, 50)
    assert values.dtype == np.float32
    assert len(np.unique(values)) == values.size
    assert np.abs(values).max() < 1
    assert (values != distinct_values((30, 50), 2)).any()
    assert (np.diff(values.ravel()) < 0).any()


@pytest.mark.parametrize(("layer_type", "count"), [(LayerType.SLIDING, 8), (LayerType.CSA, 18), (LayerType.HCA, 12)])
def test_random_params_follow_seed_and_layer(layer_type, count):
    params, again, other = (random_params(AttentionConfig.tiny(), layer_type, seed) for seed in (3, 3, 4))
    assert len(params) == count
    for name, value in params.items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, again[name])
        assert (value != other[name]).any()


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="max_document: expected at least 1, got 0"):
        random_segment_ids(0, 1, 8, max_document=0)
