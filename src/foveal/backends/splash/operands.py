"""Operands of the Splash kernels: keys, segment ids and masks of whole batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from foveal.backends.operands import Operands
from foveal.backends.splash.blocks import SplashBlocks
from foveal.backends.splash.kernel import Call, Masks, segment_ids, static_masks
from foveal.backends.splash.layout import KeyLayout
from foveal.backends.splash.mask import HCAStaticMask
from foveal.geometry import Visibility
from foveal.typing import Array


@dataclasses.dataclass(frozen=True)
class SplashPlan:
    """Static parameters.

    Attributes:
        call: parameters of the kernels.
        layout: positions of rows and columns.
        dynamic: whether the mask is data.
        sharding: sharding of q [B, S, H, D] over the mesh in context, or None.
    """

    call: Call
    layout: KeyLayout
    dynamic: bool
    sharding: PartitionSpec | None = None


def key_arrays(plan: SplashPlan, operands: Operands) -> tuple[Array, Array]:
    """Keys and values [B, columns, D]: raw tokens and entries, the keys scaled.

    The kernels do not scale logits. Scaling the queries would copy the largest array; the keys are of one head.
    """
    layout = plan.layout
    values = jnp.pad(operands.kv, ((0, 0), (0, layout.entry_start - layout.rows), (0, 0)))
    values = jnp.concatenate([values, operands.entries], axis=1)
    values = jnp.pad(values, ((0, 0), (0, layout.columns - values.shape[1]), (0, 0)))
    keys = values if operands.scale == 1.0 else (values.astype(jnp.float32) * operands.scale).astype(values.dtype)
    return keys, values


def key_gradients(plan: SplashPlan, operands: Operands, d_keys: Array, d_values: Array) -> tuple[Array, Array]:
    """Gradients of kv and entries from those of keys and values in float32: `key_arrays` transposed, rounded once."""
    layout = plan.layout
    both = d_values + d_keys * operands.scale
    d_kv, d_entries = both[:, : layout.rows], both[:, layout.entry_start : layout.entry_start + layout.slots]
    return d_kv.astype(operands.kv.dtype), d_entries.astype(operands.entries.dtype)


def static_masks_of(layout: KeyLayout, visibility: Visibility, blocks: SplashBlocks) -> Masks:
    """Tile lists of `static_mask`; `segments` tells packed documents apart."""
    return static_masks(static_mask(layout, visibility), blocks)


def static_mask(layout: KeyLayout, visibility: Visibility) -> HCAStaticMask:
    """Mask of rows that are one document each."""
    return HCAStaticMask(layout, visibility.sliding_window, visibility.compress_ratio if layout.slots else 0)


def segments(plan: SplashPlan, visibility: Visibility) -> Any:
    """Segment ids [B, rows] and [B, columns], equal for a query and the keys of its document; None if not needed.

    A document's id is the row at which it starts. Each padding row has an id of its own, so that it sees itself, and
    unused columns of entries have -1.
    """
    layout, documents = plan.layout, visibility.documents
    if documents.alignment == 0:  # rows of one document each: the mask alone is enough
        return None
    row = jnp.arange(layout.entry_start, dtype=jnp.int32)
    real = jnp.where(documents.is_padding, -2 - row[: layout.rows], documents.document_start)
    ids = jnp.broadcast_to(-2 - row, (real.shape[0], layout.entry_start)).at[:, : layout.rows].set(real)
    columns = jnp.concatenate([ids, visibility.slot_document_start], axis=1)
    columns = jnp.pad(columns, ((0, 0), (0, layout.columns - columns.shape[1])), constant_values=-1)
    return segment_ids(ids[:, : layout.padded_rows], columns)


def dynamic_mask(plan: SplashPlan, operands: Operands) -> Array:
    """Mask that is data, bool [B, rows, columns]; padding sees itself."""
    layout, visibility = plan.layout, operands.visibility
    more = layout.padded_rows - layout.rows
    alone = jnp.pad(visibility.documents.is_padding, ((0, 0), (0, more)), constant_values=True)
    alone = alone[:, :, None] & jnp.eye(layout.padded_rows, layout.columns, dtype=bool)[None]
    parts = [(visibility.window_mask(), 0)]
    if operands.slots:
        parts.append((visibility.entry_mask(operands.indices), layout.entry_start))
    mask = alone
    for part, column in parts:
        widths = (0, 0), (0, more), (column, layout.columns - column - part.shape[2])
        mask = mask | jnp.pad(part, widths)
    return mask
