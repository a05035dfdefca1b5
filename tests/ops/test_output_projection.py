"""The grouped projection against loops over groups in float64."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from foveal.ops import grouped_projection
from foveal.testing.generators import distinct_values
from foveal.testing.numerics import assert_close, assert_gradients_close

B, S, H, D, L = 2, 5, 6, 4, 3

project = jax.jit(grouped_projection, static_argnames="precision")


def project_by_hand(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    groups = kernel.shape[0]
    each = x.shape[2] // groups
    out = []
    for g in range(groups):
        heads = [x[:, :, h].astype(np.float64) for h in range(g * each, (g + 1) * each)]
        out.append(np.concatenate(heads, axis=-1) @ kernel[g].astype(np.float64))
    return np.concatenate(out, axis=-1)


def problem(groups: int) -> tuple[np.ndarray, np.ndarray]:
    return distinct_values((B, S, H, D), groups), distinct_values((groups, H // groups * D, L), groups + 10)


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_contiguous_groups_of_heads_have_a_matrix_each(groups):
    x, kernel = problem(groups)
    actual = project(x, kernel)
    assert actual.shape == (B, S, groups * L)
    assert actual.dtype == jnp.float32
    assert_close(actual, project_by_hand(x, kernel), np.float32)


def test_a_wrong_grouping_is_told_from_the_right_one():
    x, kernel = problem(3)
    expected = project_by_hand(x, kernel)
    strided = x.reshape(B, S, 2, 3, D).swapaxes(2, 3).reshape(x.shape)  # heads g, g + 3 instead of 2 g, 2 g + 1
    features_first = x.swapaxes(2, 3).reshape(x.shape)
    for wrong_x, wrong_kernel in (
        (strided, kernel),
        (features_first, kernel),
        (x, kernel[::-1]),
        (x[:, :, ::-1], kernel),
    ):
        with pytest.raises(AssertionError, match="elements differ"):
            assert_close(project(wrong_x.copy(), wrong_kernel.copy()), expected, np.float32)
    interleaved = np.asarray(project(x, kernel)).reshape(B, S, 3, L).swapaxes(2, 3).reshape(B, S, -1)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_close(interleaved, expected, np.float32)


def test_one_group_reaches_its_own_outputs_alone():
    x, kernel = problem(3)
    before = np.asarray(project(x, kernel))
    x[:, :, 2:4] += 1.0
    changed = (np.asarray(project(x, kernel)) != before).any((0, 1))
    np.testing.assert_array_equal(changed, [False] * L + [True] * L + [False] * L)


def test_gradients_match_float64():
    x, kernel = problem(2)
    cotangent = distinct_values((B, S, 2 * L), 9)
    actual = jax.vjp(project, *map(jnp.asarray, (x, kernel)))[1](jnp.asarray(cotangent))
    grouped, of_groups = x.reshape(B, S, 2, -1).astype(np.float64), cotangent.reshape(B, S, 2, L).astype(np.float64)
    expected = (
        np.einsum("bsgl,gnl->bsgn", of_groups, kernel).reshape(x.shape),
        np.einsum("bsgn,bsgl->gnl", grouped, of_groups),
    )
    assert_gradients_close(actual, expected, np.float32)


def test_the_output_takes_the_dtype_of_x():
    x, kernel = problem(2)
    narrow = jnp.asarray(x).astype(jnp.bfloat16)
    actual = project(narrow, kernel)  # a float32 parameter in a bfloat16 layer
    assert actual.dtype == jnp.bfloat16
    assert_close(actual, project_by_hand(np.asarray(narrow), kernel), jnp.bfloat16)
    with jax.enable_x64(True):
        wide = project(x.astype(np.float64), kernel.astype(np.float64))
        assert_close(wide, project_by_hand(x, kernel), np.float64)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(
    ("name", "x", "kernel"),
    [
        pytest.param("kernel", (B, S, 6, 4), (4, 6, L), id="heads do not divide into groups"),
        pytest.param("kernel", (B, S, 6, 4), (2, 8, L), id="another width"),
        pytest.param("kernel", (B, S, 6, 4), (24, L), id="no groups"),
        pytest.param("x", (B, S, 24), (2, 12, L), id="heads already flat"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_name(monkeypatch, name, x, kernel, jitted):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as users call it
    with pytest.raises(ValueError, match=f"^{name}: expected .*got "):
        (project if jitted else grouped_projection)(jnp.zeros(x), jnp.zeros(kernel))
