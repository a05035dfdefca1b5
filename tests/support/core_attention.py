"""Core attention as tests call it: with every gradient, through every implementation, beside the reference."""

import functools
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from foveal.backends import registry
from foveal.geometry import Documents, Visibility
from foveal.ops import core_attention
from foveal.testing.numerics import assert_close, assert_gradients_close
from foveal.testing.reference import reference_core_attention

EMULATED = ("splash", "splash_dynamic", "fused")
"""Backends whose kernels take seconds per case to emulate: their tests are `test_splash*.py` and `test_fused.py`."""
IMPLEMENTATIONS = tuple(name for name in registry.names() if name not in EMULATED)
"""All others, each of which the tests of core attention run: a new backend is among them once it is registered."""
NAMES = ("q", "kv", "entries", "sinks")
# For what is compiled often and runs seldom.
UNOPTIMIZED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def operands(rng: np.random.Generator, batch: int, length: int, heads: int, dim: int, slots: int, dtype: Any):
    """q, kv, entries and sinks, and cotangents of norm 1 for output and log-sum-exp; entries None without slots."""
    shapes = (batch, length, heads, dim), (batch, length, dim), (batch, slots, dim), (batch, length, heads, dim)
    q, kv, entries, d_out = (rng.normal(size=shape) for shape in shapes)
    sinks, d_lse = rng.normal(size=heads).astype(np.float32), rng.normal(size=(batch, length, heads))
    cotangents = (d_out / np.linalg.norm(d_out)).astype(dtype), (d_lse / np.linalg.norm(d_lse)).astype(np.float32)
    args = (2 * q).astype(dtype), kv.astype(dtype), entries.astype(dtype) if slots else None, sinks
    return args, cotangents


def both_ways(args, visibility, indices, cotangents, implementation=None, scale=None):
    """Output and log-sum-exp, and the gradients of q, kv, entries and sinks by name."""

    def run(q, kv, entries, sinks):
        return core_attention(
            q, kv, entries, visibility=visibility, indices=indices, sinks=sinks, scale=scale, return_lse=True,
            implementation=implementation,
        )  # fmt: skip

    results, pull = jax.vjp(run, *args)
    cotangents = tuple(c.astype(r.dtype) for c, r in zip(cotangents, results, strict=True))
    return results, dict(zip(NAMES, pull(cotangents), strict=True))


@functools.partial(jax.jit, static_argnums=3)
def _by_the_reference(args, masks, cotangents, scale):
    def run(q, kv, entries, sinks):
        a_row = functools.partial(reference_core_attention, sinks=sinks, scale=scale)
        return jax.vmap(a_row)(q, kv, entries, *masks)

    results, pull = jax.vjp(run, *args)
    return results, dict(zip(NAMES, pull(tuple(cotangents)), strict=True))


def expectation(args, masks: tuple[np.ndarray, np.ndarray], cotangents, scale: float):
    """The same as `both_ways` from the reference, in float64; `masks` are of the window and of the entries."""
    with jax.enable_x64(True):
        wide = [None if a is None else jnp.asarray(np.asarray(a), jnp.float64) for a in args]
        return jax.device_get(_by_the_reference(wide, masks, [c.astype(np.float64) for c in cotangents], scale))


def assert_same(actual, expected, dtype: Any = np.float32, lse_dtype: Any = np.float32) -> None:
    """Both results and every gradient, by the tolerances of a dtype; the output and q's gradient are of it."""
    (out, lse), gradients = actual
    (expected_out, expected_lse), expected_gradients = expected
    assert out.dtype == gradients["q"].dtype == dtype
    wide = np.float64 if dtype == np.float64 else np.float32
    assert lse.dtype == wide
    assert {a.dtype for a in jax.tree.leaves(gradients)} <= {np.dtype(dtype), np.dtype(wide)}
    assert_close(out, expected_out, dtype)
    assert_close(lse, expected_lse, lse_dtype, what="lse")
    assert_gradients_close(gradients, expected_gradients, dtype)


def shapes(length: int, heads: int, ratio: int, *, window: int, with_documents: bool, selected=None, alignment=1):
    """Arguments of `both_ways` without data, for one batch row of 16 dims per head."""
    dim, f32, i32 = 16, jnp.float32, jnp.int32
    of = jax.ShapeDtypeStruct
    q, lse = of((1, length, heads, dim), f32), of((1, length, heads), f32)
    args = q, of((1, length, dim), f32), of((1, length // ratio, dim), f32), of((heads,), f32)
    visibility = Visibility(Documents.unpacked(1, length), window, ratio)
    if with_documents:
        visibility = jax.eval_shape(
            lambda ids: Visibility(Documents.from_segment_ids(ids, alignment=alignment), window, ratio),
            of((1, length), i32),
        )
    indices = None if selected is None else of((1, length, selected), i32)
    return args, visibility, indices, (q, lse)


TPU = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=AbstractDevice("TPU v5p", 2, "tpu"))
"""A mesh of a TPU that is not here."""


def program_for_a_tpu(function, *args) -> jex.ClosedJaxpr:
    with jax.sharding.use_abstract_mesh(TPU):
        return jax.make_jaxpr(function)(*args)
