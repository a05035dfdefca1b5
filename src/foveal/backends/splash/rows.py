"""Around the kernels: what they take and what becomes of what they give, for whole batches."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from foveal.backends.dense import entry_mask
from foveal.backends.request import AttentionRequest
from foveal.backends.splash.blocks import LANES, SplashBlocks
from foveal.backends.splash.kernel import (
    Call,
    Masks,
    Operands,
    attention,
    dynamic_masks,
    output_alone,
    segment_ids,
    static_masks,
)
from foveal.backends.splash.layout import KeyLayout
from foveal.backends.splash.mask import HCAStaticMask
from foveal.geometry import Visibility
from foveal.typing import Array

_LOG_SUM_EXPS = 1 << 30
"""Bytes of log-sum-exps and largest logits beyond which a forward pass alone does without them."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static.

    Attributes:
        call: of the kernels.
        layout: of rows and columns.
        scale: of the logits.
        return_lse: whether the log-sum-exp is wanted.
        dynamic: whether the mask is data.
        sharding: of q [B, S, H, D] over the mesh in context, or None.
    """

    call: Call
    layout: KeyLayout
    scale: float
    return_lse: bool
    dynamic: bool
    sharding: PartitionSpec | None = None


class Arrays(NamedTuple):
    """The arrays of a request."""

    q: Array
    kv: Array
    entries: Array | None
    sinks: Array | None
    visibility: Visibility
    indices: Array | None
    tainted: Array | None

    @classmethod
    def of(cls, request: AttentionRequest) -> Arrays:
        """Those of `request`."""
        return cls(**{name: getattr(request, name) for name in cls._fields})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(plan: Plan, arrays: Arrays) -> tuple[Array, Array]:
    """Output [B, S, H, D] and log-sum-exp [B, S, H].

    Without a gradient to come and over long rows, the output is all there is: then it is the kernel's own, changed
    where it must be, in place. The log-sum-exp comes as zeros.
    """
    batch, _, heads, _ = arrays.q.shape
    wanted = plan.return_lse or 2 * 4 * LANES * batch * heads * plan.layout.padded_rows <= _LOG_SUM_EXPS
    if wanted:
        return _attend(plan, arrays)
    out = _over_batch(plan, arrays, output_alone)
    return _mend_in_place(arrays, jnp.swapaxes(out, 1, 2)), jnp.zeros(arrays.q.shape[:3], jnp.float32)


def _forward_rule(plan: Plan, arrays: Arrays) -> tuple[tuple[Array, Array], Any]:
    def run(q: Array, kv: Array, entries: Array | None, sinks: Array | None) -> tuple[Array, Array]:
        return _attend(plan, arrays._replace(q=q, kv=kv, entries=entries, sinks=sinks))

    return jax.vjp(run, arrays.q, arrays.kv, arrays.entries, arrays.sinks)


def _backward_rule(plan: Plan, pull: Any, cotangents: tuple[Array, Array]) -> tuple[Arrays]:
    del plan
    nothing: Any = None  # for all of an argument, integers here, that has no gradient
    d_q, d_kv, d_entries, d_sinks = pull(cotangents)
    return (Arrays(d_q, d_kv, d_entries, d_sinks, nothing, nothing, nothing),)


attend.defvjp(_forward_rule, _backward_rule)


def _attend(plan: Plan, arrays: Arrays) -> tuple[Array, Array]:
    out, lse = _over_batch(plan, arrays, attention)
    length = plan.layout.rows
    padding, lost = _padding(arrays), jnp.swapaxes(_lost(arrays), 1, 2)
    out, lse = out[:, :, :length], lse[:, :, :length]
    out = jnp.where(padding[..., None], 0.0, jnp.where(lost[..., None], jnp.nan, out))
    lse = jnp.where(padding, -jnp.inf, jnp.where(lost, jnp.nan, lse))
    return jnp.swapaxes(out, 1, 2), jnp.swapaxes(lse, 1, 2)


def _over_batch(plan: Plan, arrays: Arrays, function: Any) -> Any:
    """`function` of every batch row: results [B, H, rows, ...]."""
    operands, sinks = _operands(plan, arrays), arrays.sinks
    if plan.dynamic:

        def row(both: tuple[Operands, Array]) -> Any:
            operands, mask = both
            return function(plan.call, dynamic_masks(mask, plan.call.blocks), operands, sinks)

        return jax.lax.map(row, (operands, _mask(plan, arrays)))

    masks = static_masks_of(plan.layout, arrays.visibility, plan.call.blocks)

    def every_row(operands: Operands, sinks: Array | None) -> Any:
        def row(operands: Operands) -> Any:
            return function(plan.call, masks, operands, sinks)

        # JAX's emulator of TPUs has no batched kernels.
        return jax.lax.map(row, operands) if plan.call.interpret else jax.vmap(row)(operands)

    if plan.sharding is None:
        return every_row(operands, sinks)
    batch, _, heads = (*plan.sharding, None, None, None)[:3]
    by_row, by_head = PartitionSpec(batch), PartitionSpec(heads)
    specs = jax.tree.map(lambda _: by_row, operands)._replace(q=PartitionSpec(batch, heads))
    return jax.shard_map(
        every_row,
        in_specs=(specs, None if sinks is None else by_head),
        out_specs=PartitionSpec(batch, heads),
        check_vma=False,
    )(operands, sinks)


def static_masks_of(layout: KeyLayout, visibility: Visibility, blocks: SplashBlocks) -> Masks:
    """Of rows that are one document each, as everything but the documents' ids takes them."""
    ratio = visibility.compress_ratio if layout.slots else 0
    return static_masks(HCAStaticMask(layout, visibility.sliding_window, ratio), blocks)


def _operands(plan: Plan, arrays: Arrays) -> Operands:
    """The kernels do not scale logits. Scaled queries would copy the largest array there is; keys are one head's."""
    layout = plan.layout
    q = jnp.swapaxes(arrays.q, 1, 2)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, layout.padded_rows - layout.rows), (0, 0)))
    values = jnp.pad(arrays.kv, ((0, 0), (0, layout.entry_start - layout.rows), (0, 0)))
    if arrays.entries is not None:
        values = jnp.concatenate([values, arrays.entries], axis=1)
    values = jnp.pad(values, ((0, 0), (0, layout.columns - values.shape[1]), (0, 0)))
    keys = values if plan.scale == 1.0 else (values.astype(jnp.float32) * plan.scale).astype(values.dtype)
    return Operands(q, keys, values, None if plan.dynamic else _documents(plan, arrays))


def _documents(plan: Plan, arrays: Arrays) -> Any:
    """Ids of documents [B, rows] and [B, columns], equal for a query and the keys of its document; None if not needed.

    A document is told by the row at which it starts, padding by a number of its own each, so that it sees itself.
    """
    layout, documents = plan.layout, arrays.visibility.documents
    if documents.alignment == 0:  # what stands before a token is of its document: the mask alone says it
        return None
    row = jnp.arange(layout.entry_start, dtype=jnp.int32)
    real = jnp.where(documents.is_padding, -1 - row[: layout.rows], documents.document_start)
    ids = jnp.broadcast_to(-1 - row, (real.shape[0], layout.entry_start)).at[:, : layout.rows].set(real)
    # Documents start at multiples of m, so an entry is of the document in which its window starts.
    ratio = max(arrays.visibility.compress_ratio, 1)
    entries = real[:, : layout.slots * ratio : ratio]
    unseen = layout.columns - layout.entry_start - layout.slots
    columns = jnp.concatenate([ids, entries], axis=1)
    columns = jnp.pad(columns, ((0, 0), (0, unseen)), constant_values=jnp.iinfo(jnp.int32).min)
    return segment_ids(ids[:, : layout.padded_rows], columns)


def _mask(plan: Plan, arrays: Arrays) -> Array:
    """bool [B, rows, columns]; padding sees itself."""
    layout, visibility = plan.layout, arrays.visibility
    more = layout.padded_rows - layout.rows
    alone = jnp.pad(visibility.documents.is_padding, ((0, 0), (0, more)), constant_values=True)
    alone = alone[:, :, None] & jnp.eye(layout.padded_rows, layout.columns, dtype=bool)[None]
    parts = [(visibility.window_mask(), 0)]
    if arrays.entries is not None:
        parts.append((entry_mask(visibility, arrays.indices), layout.entry_start))
    mask = alone
    for part, column in parts:
        widths = (0, 0), (0, more), (column, layout.columns - column - part.shape[2])
        mask = mask | jnp.pad(part, widths)
    return mask


def _padding(arrays: Arrays) -> Array:
    """bool [B, 1, S]."""
    return arrays.visibility.documents.is_padding[:, None]


def _lost(arrays: Arrays) -> Array:
    """bool [B, S, H]: queries that hold NaN or see what was."""
    lost = ~jnp.isfinite(arrays.q).all(axis=-1)
    return lost if arrays.tainted is None else lost | arrays.tainted[:, :, None]


def _mend_in_place(arrays: Arrays, out: Array) -> Array:
    """Zeros for padding and NaN for what is lost, [B, S, H, D]: in a loop that does not run where there are none.

    TPUs have no elementwise operation in place: as one operation it would take the output's memory again.
    """
    length = arrays.q.shape[1]
    out = out[:, :length]
    lost, padding = _lost(arrays), arrays.visibility.documents.is_padding[:, :, None]
    touched = lost | padding if arrays.visibility.documents.padded else lost
    size = min(length, LANES)

    def mend(step: Array, out: Array) -> Array:
        row = jnp.minimum(step * size, length - size)
        some, zero, nan = (jax.lax.dynamic_slice_in_dim(a, row, size, axis=1) for a in (out, padding, lost))
        some = jnp.where(zero[..., None], 0.0, jnp.where(nan[..., None], jnp.nan, some))
        return jax.lax.dynamic_update_slice_in_dim(out, some, row, axis=1)

    steps = jnp.where(touched.any(), -(-length // size), 0)
    return jax.lax.fori_loop(jnp.int32(0), steps.astype(jnp.int32), mend, out)
