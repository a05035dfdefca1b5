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

B, H, D, W, M = 2, 2, 32, 128, 16
STATIC, DYNAMIC = Splash(interpret=True), SplashDynamic(interpret=True)


def problem(length: int, ratio: int, seed: int = 0, dtype: Any = np.float32, heads: int = H):
    """Arguments, and cotangents of norm 1 for output and log-sum-exp."""
    rng, slots = np.random.default_rng([seed, length, ratio]), length // ratio if ratio else 0
    return operands(rng, B, length, heads, D, slots, dtype)


def unpacked(length: int, ratio: int, window: int = W) -> Visibility:
    return Visibility(Documents.unpacked(B, length), window, ratio)


def output_only(args, visibility, indices, implementation):
    q, kv, entries, sinks = args
    return core_attention(
        q, kv, entries, visibility=visibility, indices=indices, sinks=sinks, implementation=implementation
    )


_both_ways = jax.jit(both_ways, static_argnums=(4, 5), compiler_options=UNOPTIMIZED)
from_segment_ids = jax.jit(Documents.from_segment_ids, static_argnames="alignment")


def attend(args, visibility, indices, cotangents, implementation, scale=None):
    return _both_ways(args, visibility, indices, cotangents, implementation, scale)


def densely(args, visibility, indices, cotangents, scale=None):
    """In float32, and by one program for a shape, whatever is known about its documents."""
    args, cotangents = jax.tree.map(lambda a: np.asarray(a, np.float32), (args, cotangents))
    documents = Documents(document_start=visibility.documents.document_start)
    visibility = Visibility(documents, visibility.sliding_window, visibility.compress_ratio)
    return attend(args, visibility, indices, cotangents, "dense", scale)


def assert_matches_dense(args, visibility, cotangents, implementation, indices=None, scale=None):
    """Returns the results. Its kernels round weights to bfloat16, so that the log-sum-exp is no better either."""
    got, dtype = attend(args, visibility, indices, cotangents, implementation, scale), args[0].dtype
    support.assert_same(got, densely(args, visibility, indices, cotangents, scale), dtype, lse_dtype=dtype)
    return got


def packed(length: int, seed: int, *, ratio: int = M, align: int = M) -> Visibility:
    """Documents at multiples of `align`, any length; padding at the left, between and at the end, and none between."""
    rng, ids = np.random.default_rng([seed, length]), np.zeros((B, length), np.int32)
    for b in range(B):
        row, number = align * int(rng.integers(0, 3)), 1
        while row < length - 20:
            size = align * int(rng.integers(1, 200 // align)) - int(rng.integers(0, 2)) * int(rng.integers(0, align))
            ids[b, row : min(row + size, length - 3)] = number
            gap = align * int(rng.integers(0, 2))
            row, number = -(-(row + size) // align) * align + gap, number + 1
    return Visibility(from_segment_ids(ids, alignment=align).checked(), W, ratio)


def padding_of(visibility: Visibility) -> np.ndarray:
    starts = np.asarray(visibility.documents.document_start)
    return starts > np.arange(starts.shape[1])


def kernels(program: jex.ClosedJaxpr) -> int:
    return sum(e.primitive.name == "pallas_call" for e in equations(program.jaxpr))
