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
    """Static parameters of a call.

    Attributes:
        blocks: sizes of tiles.
        interpret: emulate a TPU.
    """

    blocks: SplashBlocks
    interpret: bool

    @property
    def config(self) -> splash.SplashConfig:
        """Tokamax's configuration for the call.

        Natural exponentials: base 2 would scale the queries once more, in their own dtype. Three partial sums of the
        queries' gradient: otherwise there would be one per block of keys.
        """
        size, more = self.blocks, {}
        if CAN_STACK_HEADS:
            more["num_stacked_q_heads"] = size.stacked_heads
        # Tokamax's own `interpret=True` returns wrong gradients with three partial sums.
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
    """Tile lists of a mask, for the forward and the backward kernel."""

    forward: MaskInfo
    backward: MaskInfo


def static_masks(mask: HCAStaticMask, blocks: SplashBlocks) -> Masks:
    """Tile lists of a static mask: constants of the program."""
    forward = static_mask_info(mask, blocks.q, blocks.kv)
    backward = static_mask_info(mask, blocks.q_backward, blocks.kv_backward, is_dkv=True)
    return Masks(jax.tree.map(jnp.asarray, forward), jax.tree.map(jnp.asarray, backward))


@contextlib.contextmanager
def _promotion() -> Iterator[None]:
    """Allow Tokamax to mix dtypes and ranks, even where the user's configuration forbids it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def dynamic_masks(mask: Array, blocks: SplashBlocks) -> Masks:
    """Tile lists of a mask that is data, bool [rows, columns]."""
    process = splash.mask_info_lib._process_dynamic_mask
    with _promotion():
        return Masks(
            process(mask, (blocks.q, blocks.kv), is_dkv=False),
            process(mask, (blocks.q_backward, blocks.kv_backward), is_dkv=True),
        )


class RowOperands(NamedTuple):
    """Operands of one batch row: queries [H, rows, D], keys and values [columns, D], segment ids or None."""

    q: Array
    keys: Array
    values: Array
    segments: base.SegmentIds | None


def segment_ids(rows: Array, columns: Array) -> base.SegmentIds:
    """Tokamax's segment ids, from int32 [..., rows] and [..., columns]: only equal ones see each other."""
    return base.SegmentIds(rows, columns)


def forward(call: Call, info: MaskInfo, operands: RowOperands) -> tuple[Array, Array]:
    """Output [H, rows, D] in q's dtype and log-sum-exp float32 [H, rows], without sinks.

    Every row must see something. The kernel writes each log-sum-exp 128 times, and each largest logit too: at a head
    dim of 512 half of what the output takes.
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

    Splash itself takes no gradient of the log-sum-exp; its kernel does, as part of the offset. A row whose lse is far
    above all its logits gives no gradient. The kernel keeps three partial sums of the queries' gradient.
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
    """Share of non-empty blocks, for XLA's cost estimate; 1 where the mask is data."""
    blocks = operands.q.shape[1] // block_q * (operands.keys.shape[0] // block_kv)
    return 1.0 if info.block_mask is None else min(np.prod(info.block_mask.shape) / blocks, 1.0)
