"""Calls of Tokamax's Splash Attention kernels, with a derivative rule that takes a gradient of the log-sum-exp too.

The kernels stand in a private module of Tokamax; both versions that are supported (0.0.12 and 0.0.17) have them at the
same place with the same arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from tokamax._src.ops.experimental.tpu.splash_attention import base
from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as splash
from tokamax._src.ops.experimental.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from foveal.backends.sinks import share_of_keys
from foveal.backends.splash.blocks import SplashBlocks
from foveal.backends.splash.mask import HCAStaticMask
from foveal.backends.splash.mask_info import static_mask_info
from foveal.typing import Array

_PARTIAL_SUMS = 1 << 30
"""Bytes of partial sums of the queries' gradient that the backward kernel may keep at a time."""

_LARGEST_SINK = 1e30
"""Inside a kernel an infinite one would be NaN; this one leaves as little to the keys."""

CAN_STACK_HEADS = "num_stacked_q_heads" in inspect.signature(splash.SplashConfig).parameters


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static in a call.

    Attributes:
        blocks: sizes.
        interpret: emulate a TPU.
    """

    blocks: SplashBlocks
    interpret: bool

    @property
    def config(self) -> splash.SplashConfig:
        """Tokamax's form of it.

        Natural exponentials: base 2 would scale the queries once more, in their own dtype. Three sums of query
        gradients: without, there is one for each block of keys.
        """
        size, more = self.blocks, {}
        if CAN_STACK_HEADS:
            more["num_stacked_q_heads"] = size.stacked_heads
        # Tokamax's own `interpret=True` returns wrong gradients together with three sums.
        interpret: Any = pltpu.InterpretParams() if self.interpret else False
        return splash.SplashConfig(
            block_q=size.q,
            block_kv=size.kv,
            block_q_dkv=size.q_backward,
            block_kv_dkv=size.kv_backward,
            block_kv_dkv_compute=size.kv_backward,
            use_base2_exp=False,
            dq_reduction_steps=3,
            interpret=interpret,
            **more,
        )


class Masks(NamedTuple):
    """What the forward and the backward kernel look at."""

    forward: MaskInfo
    backward: MaskInfo


def static_masks(mask: HCAStaticMask, blocks: SplashBlocks) -> Masks:
    """Of a mask known while tracing: constants of the program."""
    forward = static_mask_info(mask, blocks.q, blocks.kv)
    backward = static_mask_info(mask, blocks.q_backward, blocks.kv_backward, is_dkv=True)
    return Masks(jax.tree.map(jnp.asarray, forward), jax.tree.map(jnp.asarray, backward))


@contextlib.contextmanager
def _promotion() -> Iterator[None]:
    """Tokamax mixes dtypes and ranks; whoever forbids that to their own code must not be stopped by it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def dynamic_masks(mask: Array, blocks: SplashBlocks) -> Masks:
    """Of a mask bool [rows, columns] that is data."""
    process = splash.mask_info_lib._process_dynamic_mask
    with _promotion():
        return Masks(
            process(mask, (blocks.q, blocks.kv), is_dkv=False),
            process(mask, (blocks.q_backward, blocks.kv_backward), is_dkv=True),
        )


class Operands(NamedTuple):
    """The arrays of one batch row: queries [H, rows, D], keys and values [columns, D], documents' ids or None."""

    q: Array
    keys: Array
    values: Array
    segments: base.SegmentIds | None


def segment_ids(rows: Array, columns: Array) -> base.SegmentIds:
    """Tokamax's form of int32 ids [..., rows] and [..., columns]: only equal ones see each other."""
    return base.SegmentIds(rows, columns)


def attention(call: Call, masks: Masks, operands: Operands, sinks: Array | None) -> tuple[Array, Array]:
    """Output [H, rows, D] in q's dtype and log-sum-exp float32 [H, rows], both differentiable.

    Every row must see something; rows that hold NaN give zeros. Sinks, float32 [H], are applied to the output:
    Tokamax's own have gradients in the dtype of the queries and exclude stacked heads.
    """
    results: Any = _attend(call, masks, operands)
    out, lse = results
    # A row that holds NaN must not bring it into the sinks' gradient; the caller makes its results NaN.
    sound = _sound(operands.q)
    out, lse = jnp.where(sound[..., None], out, 0.0), jnp.where(sound, lse, 0.0)
    share = share_of_keys(lse.T[None], sinks)[0].T
    return (out.astype(jnp.float32) * share[..., None]).astype(out.dtype), lse


def output_alone(call: Call, masks: Masks, operands: Operands, sinks: Array | None) -> Array:
    """The output, without a derivative, from a kernel that writes nothing else.

    Log-sum-exps come out of the kernels 128 times over, and the largest logits with them: at a head dim of 512 half of
    what the output takes.
    """
    config = dataclasses.replace(call.config, **({"num_stacked_q_heads": 1} if CAN_STACK_HEADS else {}))
    kernel: Any = _forward_kernel(call, masks.forward, operands, config, save_residuals=False)
    if sinks is not None:
        sinks = jnp.minimum(sinks, _LARGEST_SINK)
    with _promotion():
        return kernel(operands.q, operands.keys, operands.values, operands.segments, sinks)


def _sound(q: Array) -> Array:
    """bool [H, rows]."""
    return jnp.isfinite(q).all(axis=-1)


def _forward_kernel(
    call: Call, info: MaskInfo, operands: Operands, config: splash.SplashConfig, *, save_residuals: bool
) -> splash.SplashAttentionKernel:
    return splash.SplashAttentionKernel(
        info,
        None,
        config=config,
        is_mqa=True,
        save_residuals=save_residuals,
        mask_value=base.DEFAULT_MASK_VALUE,
        mask_function=None,
        fwd_mask_sparsity=_share_of_blocks(info, operands, call.blocks.q, call.blocks.kv),
        dkv_mask_sparsity=1.0,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Call, masks: Masks, operands: Operands) -> tuple[Array, Array]:
    """Without sinks."""
    kernel: Any = _forward_kernel(call, masks.forward, operands, call.config, save_residuals=True)
    with _promotion():
        out, stats = kernel(operands.q, operands.keys, operands.values, operands.segments)
    return out, stats["logsumexp"]


def _attend_forward(call: Call, masks: Masks, operands: Operands) -> tuple[tuple[Array, Array], tuple]:
    results: Any = _attend(call, masks, operands)
    return results, (masks.backward, operands, *results)


def _attend_backward(call: Call, residuals: tuple, cotangents: tuple[Array, Array]) -> tuple[Any, Operands]:
    """Some heads at a time: the kernel keeps three partial sums of the queries' gradient."""
    info, operands, out, lse = residuals
    heads, rows, dim = operands.q.shape
    partial_sums = 3 * rows * dim * operands.q.dtype.itemsize
    together = next(n for n in range(heads, 0, -1) if heads % n == 0 and (n * partial_sums <= _PARTIAL_SUMS or n == 1))

    def grouped(array: Array) -> Array:
        return array.reshape(heads // together, together, *array.shape[1:])

    def group(sums: tuple[Array, Array], part: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        q, *results = part
        d_q, d_k, d_v = _backward_kernel(call, info, operands._replace(q=q), *results)
        return (sums[0] + d_k.astype(jnp.float32), sums[1] + d_v.astype(jnp.float32)), d_q

    nothing: Any = None  # for all of an argument, integers here, that has no gradient
    start = jnp.zeros(operands.keys.shape, jnp.float32), jnp.zeros(operands.keys.shape, jnp.float32)
    parts = jax.tree.map(grouped, (operands.q, out, lse, *cotangents))
    (d_keys, d_values), d_q = jax.lax.scan(group, start, parts)
    dtype = operands.keys.dtype
    return nothing, Operands(d_q.reshape(operands.q.shape), d_keys.astype(dtype), d_values.astype(dtype), nothing)


def _backward_kernel(
    call: Call, info: MaskInfo, operands: Operands, out: Array, lse: Array, d_out: Array, d_lse: Array
) -> tuple[Array, Array, Array]:
    """With p the weights and v the values, a logit's gradient is p (d_out . v - d_out . out + d_lse)."""
    inner = jnp.einsum("hsd,hsd->hs", out.astype(jnp.float32), d_out.astype(jnp.float32), precision="highest")
    # Rows that hold NaN give no gradient, but 0 x NaN is NaN: they become rows of weight zero.
    sound = _sound(operands.q)
    lse, inner = jnp.where(sound, lse, jnp.inf), jnp.where(sound, inner, 0.0)
    size = call.blocks
    with _promotion():
        return splash._splash_attention_bwd_dkv(
            jnp.where(sound[..., None], operands.q, 0.0),
            operands.keys,
            operands.values,
            operands.segments,
            lse,
            d_out,
            inner - d_lse,
            bq=size.q_backward,
            bkv=size.kv_backward,
            bkv_compute=size.kv_backward,
            is_mqa=True,
            mask_info=info,
            mask_value=base.DEFAULT_MASK_VALUE,
            mask_function=None,
            config=call.config,
            dkv_mask_sparsity=_share_of_blocks(info, operands, size.q_backward, size.kv_backward),
        )


_attend.defvjp(_attend_forward, _attend_backward)


def _share_of_blocks(info: MaskInfo, operands: Operands, block_q: int, block_kv: int) -> float:
    """Of the blocks, those that are not empty, for XLA's cost estimate; 1 where that is data."""
    blocks = operands.q.shape[1] // block_q * (operands.keys.shape[0] // block_kv)
    return 1.0 if info.block_mask is None else min(np.prod(info.block_mask.shape) / blocks, 1.0)
