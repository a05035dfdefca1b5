"""Problems for the tests of Splash Attention, which is emulated on a CPU: an emulated case costs seconds."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from foveal import Splash, SplashDynamic
from foveal.geometry import Documents, Visibility
from foveal.ops import core_attention
from foveal.testing.numerics import assert_close, assert_gradients_close

B, H, D, W, M = 2, 4, 32, 128, 16
NAMES = ("q", "kv", "entries", "sinks")
STATIC, DYNAMIC = Splash(interpret=True), SplashDynamic(interpret=True)


def problem(length: int, ratio: int, seed: int = 0, dtype: Any = np.float32):
    """Arguments, and cotangents of norm 1 for output and log-sum-exp."""
    rng = np.random.default_rng([seed, length, ratio])
    slots = length // ratio if ratio else 0
    q, kv, entries, d_out = (
        rng.normal(size=shape) for shape in ((B, length, H, D), (B, length, D), (B, slots, D), (B, length, H, D))
    )
    sinks, d_lse = rng.normal(size=H).astype(np.float32), rng.normal(size=(B, length, H))
    cotangents = (d_out / np.linalg.norm(d_out)).astype(dtype), (d_lse / np.linalg.norm(d_lse)).astype(np.float32)
    args = (2 * q).astype(dtype), kv.astype(dtype), entries.astype(dtype) if slots else None, sinks
    return args, cotangents


def unpacked(length: int, ratio: int, window: int = W) -> Visibility:
    return Visibility(Documents.unpacked(B, length), window, ratio)


def both_ways(args, visibility, indices, cotangents, implementation, scale=None):
    """Output and log-sum-exp, and every gradient."""

    def run(q, kv, entries, sinks):
        return core_attention(
            q, kv, entries, visibility=visibility, indices=indices, sinks=sinks, scale=scale, return_lse=True,
            implementation=implementation,
        )  # fmt: skip

    results, pull = jax.vjp(run, *args)
    return results, dict(zip(NAMES, pull(cotangents), strict=True))


def output_only(args, visibility, indices, implementation):
    q, kv, entries, sinks = args
    return core_attention(
        q, kv, entries, visibility=visibility, indices=indices, sinks=sinks, implementation=implementation
    )


UNOPTIMIZED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
attend = jax.jit(both_ways, static_argnums=(4, 5), compiler_options=UNOPTIMIZED)
output_of = jax.jit(output_only, static_argnums=3, compiler_options=UNOPTIMIZED)


def densely(args, visibility, indices, cotangents, scale=None):
    """In float32."""
    args, cotangents = jax.tree.map(lambda a: np.asarray(a, np.float32), (args, cotangents))
    return attend(args, visibility, indices, cotangents, "dense", scale)


def assert_same(actual, expected, dtype: Any = np.float32) -> None:
    (out, lse), gradients = actual
    (expected_out, expected_lse), expected_gradients = expected
    assert out.dtype == dtype
    assert lse.dtype == np.float32
    assert_close(out, expected_out, dtype)
    assert_close(lse, expected_lse, np.float32 if dtype == np.float32 else dtype, what="lse")
    assert_gradients_close(gradients, expected_gradients, dtype)


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


TPU = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=AbstractDevice("TPU v5p", 2, "tpu"))
"""A mesh of a TPU that is not here."""


def shapes(length: int, heads: int, ratio: int, *, with_documents: bool, selected: int | None = None):
    """Arguments of `both_ways` without data, for one batch row of 16 dims a head."""
    dim, f32, i32 = 16, jnp.float32, jnp.int32
    of = jax.ShapeDtypeStruct
    q, lse = of((1, length, heads, dim), f32), of((1, length, heads), f32)
    args = q, of((1, length, dim), f32), of((1, length // ratio, dim), f32), of((heads,), f32)
    visibility = Visibility(Documents.unpacked(1, length), W, ratio)
    if with_documents:
        ids = of((1, length), i32)
        visibility = jax.eval_shape(
            lambda ids: Visibility(Documents.from_segment_ids(ids, alignment=ratio), W, ratio), ids
        )
    indices = None if selected is None else of((1, length, selected), i32)
    return args, visibility, indices, (q, lse)


def equations(jaxpr: jex.Jaxpr) -> Iterator[jex.JaxprEqn]:
    """Every equation of a program, those of loops, calls and kernels included."""

    def is_jaxpr(value: object) -> bool:
        return isinstance(value, jex.Jaxpr | jex.ClosedJaxpr)

    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                yield from equations(getattr(inner, "jaxpr", inner))


def program_for_a_tpu(function, *args) -> jex.ClosedJaxpr:
    with jax.sharding.use_abstract_mesh(TPU):
        return jax.make_jaxpr(function)(*args)


def largest(program: jex.ClosedJaxpr) -> int:
    """Elements of the largest array that a program computes or carries along."""
    arrays = [v.aval for e in equations(program.jaxpr) for v in e.outvars]
    return max(math.prod(getattr(a, "shape", ())) for a in (*arrays, *program.consts))


def kernels(program: jex.ClosedJaxpr) -> int:
    return sum(e.primitive.name == "pallas_call" for e in equations(program.jaxpr))
