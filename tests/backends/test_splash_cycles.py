"""Cycles of the Splash kernels, by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from foveal import Splash, SplashBlocks, SplashDynamic
from foveal.backends.splash import heads
from foveal.geometry import Documents, Visibility
from foveal.schedule import KernelSchedule

S, H, D, W, M = 1024, 4, 64, 128, 2
FORWARD = KernelSchedule("splash_mqa_fwd_residuals.3", 10**2, (1, 2 * 10**6, 10**6, 10**4), ())
BACKWARD = KernelSchedule("splash_mqa_dkv_no_residuals.1", 10**2, (1, 2 * 10**6, 10**6, 10**4, 3 * 10**4), ())
BLOCKS = SplashBlocks(128, 128, 256, 256, stacked_heads=2)
Q = jax.ShapeDtypeStruct((3, S, H, D), jnp.bfloat16)
VISIBILITY = Visibility(Documents.unpacked(3, S), W, M)


@functools.cache
def tiles(q: int, kv: int) -> tuple[int, int, int, int]:
    """All that are not empty, those that all see, the others; rows of tiles. From the mask itself, tile by tile."""
    mask = np.asarray(jax.jit(Visibility.dense)(VISIBILITY)[0])  # whole tiles, of raw keys or of entries
    parts = mask.reshape(S // q, q, -1, kv).transpose(0, 2, 1, 3).reshape(S // q, -1, q * kv)
    some, every = parts.any(axis=-1), parts.all(axis=-1)
    return some.sum(), every.sum(), (some & ~every).sum(), S // q


def test_forward_by_hand():
    every, full, partial, rows = tiles(128, 128)
    assert full
    assert partial
    of_a_pair = every * 100 + rows * (1 + 10**4) + full * 2 * 10**6 + partial * 10**6
    backend = Splash(blocks=BLOCKS)
    assert backend.cycles([FORWARD], Q, VISIBILITY) == 3 * (H // 2) * of_a_pair
    assert SplashDynamic(blocks=BLOCKS).cycles([FORWARD], Q, VISIBILITY) == 3 * (H // 2) * of_a_pair


@pytest.mark.parametrize(("together", "space"), [(4, 4), (2, 2), (1, 0)])
def test_backward_by_hand(together, space, monkeypatch):
    """Of the heads that a call takes the first writes gradients of keys, and the others add to them."""
    monkeypatch.setattr(heads, "_AT_A_TIME", space * S * 6 * D * 2)
    every, full, partial, _ = tiles(256, 256)
    columns = (S + S // M + 255) // 256
    of_a_head = every * 100 + columns + full * 2 * 10**6 + partial * 10**6
    of_a_call = together * of_a_head + columns * 10**4 + (together - 1) * columns * 3 * 10**4
    backend = Splash(blocks=BLOCKS)
    expected = 3 * H // together * of_a_call
    assert backend.cycles([BACKWARD], Q, VISIBILITY) == expected
    assert backend.cycles([FORWARD, BACKWARD], Q, VISIBILITY) == expected + backend.cycles([FORWARD], Q, VISIBILITY)


def test_other_kernels():
    backend = Splash(blocks=BLOCKS)
    assert backend.cycles([KernelSchedule("other.1", 5, (), ())], Q, VISIBILITY) is None
    for broken in (
        KernelSchedule("splash_mqa_fwd_residuals", 5, (1, 2), ()),  # parts are missing
        KernelSchedule("splash_mqa_fwd_residuals", 5, (1, 9, 2, 9), ()),  # those are others
        KernelSchedule("splash_mqa_fwd_residuals", 5, (1, 2, 2, 1), (5,)),  # a loop, whose count is not known
    ):
        with pytest.raises(ValueError, match="schedules: expected 4 conditional parts and no loop in a step"):
            backend.cycles([broken], Q, VISIBILITY)
