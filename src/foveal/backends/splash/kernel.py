"""Calls of Tokamax's Splash Attention kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from foveal.backends.splash.blocks import SplashBlocks
from foveal.backends.splash.mask import HCAStaticMask
from foveal.backends.splash.mask_info import static_mask_info
from foveal.backends.splash.tokamax_splash import MaskInfo, base
from foveal.backends.splash.tokamax_splash import splash_attention_kernel as splash
from foveal.typing import Array

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


class RowOperands(NamedTuple):
    """The arrays of one batch row: queries [H, rows, D], keys and values [columns, D], documents' ids or None."""

    q: Array
    keys: Array
    values: Array
    segments: base.SegmentIds | None


def segment_ids(rows: Array, columns: Array) -> base.SegmentIds:
    """Tokamax's form of int32 ids [..., rows] and [..., columns]: only equal ones see each other."""
    return base.SegmentIds(rows, columns)


def forward(call: Call, info: MaskInfo, operands: RowOperands) -> tuple[Array, Array]:
    """Output [H, rows, D] in q's dtype and log-sum-exp float32 [H, rows], without sinks.

    Every row must see something. The kernel writes each log-sum-exp 128 times over, and the largest logit too: at a
    head dim of 512 half of what the output takes.
    """
    kernel: Any = splash.SplashAttentionKernel(
        info,
        None,
        config=call.config,
        is_mqa=True,
        save_residuals=True,
        mask_value=base.DEFAULT_MASK_VALUE,
        mask_function=None,
        fwd_mask_sparsity=_share_of_blocks(info, operands, call.blocks.q, call.blocks.kv),
        dkv_mask_sparsity=1.0,
    )
    with _promotion():
        out, stats = kernel(operands.q, operands.keys, operands.values, operands.segments)
    return out, stats["logsumexp"]


def backward(
    call: Call, info: MaskInfo, operands: RowOperands, lse: Array, d_out: Array, offset: Array
) -> tuple[Array, Array, Array]:
    """Gradients of queries, keys and values: a logit's is exp(logit - lse) (d_out . v + offset).

    Splash itself takes no gradient of the log-sum-exp; its kernel does, within the offset. A lse beyond all logits
    leaves a row without any. The kernel keeps three partial sums of the queries' gradient.
    """
    size = call.blocks
    with _promotion():
        return splash._splash_attention_bwd_dkv(
            operands.q,
            operands.keys,
            operands.values,
            operands.segments,
            lse,
            d_out,
            -offset,
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


def _share_of_blocks(info: MaskInfo, operands: RowOperands, block_q: int, block_kv: int) -> float:
    """Of the blocks, those that are not empty, for XLA's cost estimate; 1 where that is data."""
    blocks = operands.q.shape[1] // block_q * (operands.keys.shape[0] // block_kv)
    return 1.0 if info.block_mask is None else min(np.prod(info.block_mask.shape) / blocks, 1.0)
