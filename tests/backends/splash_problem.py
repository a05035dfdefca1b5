"""Problems for the tests of Splash Attention, which is emulated on a CPU: an emulated case costs seconds."""

from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from foveal import Splash, SplashDynamic
from foveal.geometry import Documents, Visibility
from foveal.ops import core_attention
from tests.support import core_attention as support
from tests.support.core_attention import UNOPTIMIZED, both_ways, operands
from tests.support.programs import equations

B, H, D, W, M = 2, 4, 32, 128, 16
STATIC, DYNAMIC = Splash(interpret=True), SplashDynamic(interpret=True)


def problem(length: int, ratio: int, seed: int = 0, dtype: Any = np.float32):
    """Arguments, and cotangents of norm 1 for output and log-sum-exp."""
    rng, slots = np.random.default_rng([seed, length, ratio]), length // ratio if ratio else 0
    return operands(rng, B, length, H, D, slots, dtype)


def unpacked(length: int, ratio: int, window: int = W) -> Visibility:
    return Visibility(Documents.unpacked(B, length), window, ratio)


def output_only(args, visibility, indices, implementation):
    q, kv, entries, sinks = args
    return core_attention(
        q, kv, entries, visibility=visibility, indices=indices, sinks=sinks, implementation=implementation
    )


attend = jax.jit(both_ways, static_argnums=(4, 5), compiler_options=UNOPTIMIZED)
output_of = jax.jit(output_only, static_argnums=3, compiler_options=UNOPTIMIZED)


def densely(args, visibility, indices, cotangents, scale=None):
    """In float32."""
    args, cotangents = jax.tree.map(lambda a: np.asarray(a, np.float32), (args, cotangents))
    return attend(args, visibility, indices, cotangents, "dense", scale)


def assert_same(actual, expected, dtype: Any = np.float32) -> None:
    """Its kernels round weights to bfloat16, so that the log-sum-exp is no better either."""
    support.assert_same(actual, expected, dtype, lse_dtype=dtype)


def packed(length: int, seed: int, *, ratio: int = M, align: int = M, window: int = W) -> Visibility:
    """Documents at multiples of `align`, any length; padding at the left, between and at the end, and none between."""
    rng, ids = np.random.default_rng([seed, length]), np.zeros((B, length), np.int32)
    for b in range(B):
        row, number = align * int(rng.integers(0, 3)), 1
        while row < length - 20:
            size = align * int(rng.integers(1, 200 // align)) - int(rng.integers(0, 2)) * int(rng.integers(0, align))
            ids[b, row : min(row + size, length - 3)] = number
            gap = align * int(rng.integers(0, 2))
            row, number = -(-(row + size) // align) * align + gap, number + 1
    return Visibility(Documents.from_segment_ids(ids, alignment=align), window, ratio)


def of_other_queries(cotangents, lost: np.ndarray):
    """The cotangents without those of the queries `lost` [B, S, H]."""
    d_out, d_lse = cotangents
    return np.where(lost[..., None], 0.0, d_out).astype(d_out.dtype), np.where(lost, 0.0, d_lse).astype(d_lse.dtype)


def kernels(program: jex.ClosedJaxpr) -> int:
    return sum(e.primitive.name == "pallas_call" for e in equations(program.jaxpr))
