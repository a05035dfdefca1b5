"""Pytrees, held against each other."""

import jax
import numpy as np


def assert_equal_leaves(got, want) -> None:
    """One structure, and every leaf of one dtype and equal to the bit."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        where = jax.tree_util.keystr(path)
        assert one.dtype == other.dtype, where
        np.testing.assert_array_equal(one, other, err_msg=where)
