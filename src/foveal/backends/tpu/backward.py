"""Backward kernel: one pass over a batch row's tiles in order, which recomputes their weights.

A tile adds the gradient of its slab's raw keys to a ring in VMEM, of which each step finishes the oldest T; the
gradient of all entries stays in VMEM until the last tile. Documents need no care: where nothing is seen, zeros are
added.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from foveal.backends.operands import Operands, silent
from foveal.backends.tpu.kernel import (
    LOG2_E,
    MASKED,
    OVER_DIM,
    OVER_KEYS,
    OVER_ROWS,
    Bounds,
    as_column,
    chunk_of,
    chunk_slice,
    dot,
    first_keys,
    masked_first,
    masked_slots,
    once,
    one_ahead,
    put_chunk,
    run_kernel,
    sink_rows,
    slab_spec,
)
from foveal.backends.tpu.plan import LANES, SUBLANES, FusedPlan
from foveal.backends.tpu.tiles import (
    BLOCKS,
    FIRST_SLOT,
    QUIET,
    as_rows,
    from_padded_keys,
    padded_entries,
    padded_keys,
    tile_arrays,
)
from foveal.typing import Array

_QUIET_LSE = 1e30
"""Log-sum-exp of a row that passes no gradient on: its weights are then exactly 0."""


class Gradients(NamedTuple):
    """Gradients of q, [B, H, S, D], and kv in their dtype, and of entries and sinks in float32."""

    q: Array
    kv: Array
    entries: Array
    sinks: Array


def backward(
    plan: FusedPlan, operands: Operands, q: Array, out: Array, lse: Array, d_out: Array, d_lse: Array
) -> Gradients:
    """Gradients of a call.

    Args:
        plan: of the backward pass.
        operands: of the call; their q is not used.
        q: queries, [B, H, S, D].
        out: output, likewise.
        lse: log-sum-exp, [B, S, H].
        d_out: cotangent of `out`.
        d_lse: cotangent of `lse`.
    """
    batch, dim, last = q.shape[0], plan.dim, plan.tiles - 1
    quiet = silent(lse, operands.visibility.documents.is_padding[..., None])
    tiles = tile_arrays(plan, operands.visibility, quiet=quiet.any(axis=2))

    def tile(b: Any, i: Any) -> tuple[Any, Any]:
        return b, jnp.minimum(i, last)  # the steps after the last tile only finish raw keys

    def of_tile(*shape: int, **kinds: Any) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, *shape), lambda b, i: (*tile(b, i), 0, 0), **kinds)

    heads = pl.BlockSpec((1, plan.heads, plan.tokens, dim), lambda b, i: (b, 0, tile(b, i)[1], 0))
    rows = of_tile(1, plan.rows)
    inputs = {
        "spans": (tiles.spans, of_tile(1, 4, memory_space=pltpu.SMEM)),
        "bounds": (tiles.bounds, of_tile(8, LANES)),
        "q": (q, heads),
        "d_out": (d_out, heads),
        "out": (out, heads),
        "keys": (padded_keys(plan, operands.kv), slab_spec(plan, tile)),
        "sinks": (sink_rows(plan, operands.sinks), once(plan, (1, plan.rows), lambda b, i: (0, 0))),
        "lse": (as_rows(plan, jnp.where(quiet, _QUIET_LSE, lse), _QUIET_LSE), rows),
        "d_lse": (as_rows(plan, jnp.where(quiet, 0.0, d_lse), 0.0), rows),
    }
    of = jax.ShapeDtypeStruct
    results = {
        "d_q": (of(q.shape, q.dtype), heads),
        "d_keys": (
            of((batch, plan.padded_keys, dim), operands.kv.dtype),
            pl.BlockSpec((1, plan.tokens, dim), lambda b, i: (b, i, 0)),
        ),
        "d_sinks": (
            of((batch, 1, plan.rows), jnp.float32),
            pl.BlockSpec((1, 1, plan.rows), lambda b, i: (b, 0, 0)),
        ),
    }
    scratch: dict[str, tuple[int, ...]] = {"ring": (plan.slab, dim)}
    if plan.slots:
        entries = padded_entries(plan, operands.entries)
        inputs["entries"] = entries, once(plan, (1, *entries.shape[1:]), lambda b, i: (b, 0, 0))
        results["d_entries"] = of(entries.shape, jnp.float32), pl.BlockSpec(memory_space=pl.ANY)
        scratch["entry_sums"] = entries.shape[1:]
    if plan.loops:
        scratch |= {"q_sums": (plan.rows, dim), "offset": (1, plan.rows)}
    made = run_kernel(
        plan,
        "foveal_backward",
        lambda refs: _Step(plan, **refs).run(),
        (batch, plan.tiles + plan.reach // plan.tokens),
        inputs,
        results,
        scratch,
        in_order=True,
    )
    d_sinks = made["d_sinks"].reshape(batch, plan.heads, plan.tokens).sum(axis=(0, 2))
    d_entries = made["d_entries"][:, : plan.slots] if plan.slots else operands.entries
    return Gradients(made["d_q"], from_padded_keys(plan, made["d_keys"]), d_entries, d_sinks)


@dataclasses.dataclass(frozen=True)
class _Step:
    """A step of the kernel's grid: a tile or, after the last one, T raw keys that are finished.

    Attributes:
        plan: the call's.
        spans: int32 [1, 1, 1, 4], in scalar memory: see `TileArrays`.
        bounds: int32 [1, 1, 8, 128], likewise.
        q: [1, H, T, D].
        d_out: [1, H, T, D].
        out: [1, H, T, D].
        keys: [1, slab, D].
        sinks: float32 [1, rows].
        lse: float32 [1, 1, 1, rows].
        d_lse: float32 [1, 1, 1, rows].
        d_q: [1, H, T, D], written.
        d_keys: [1, T, D], written: those of `padded_keys` at the step's place.
        d_sinks: float32 [1, 1, rows], added to.
        ring: float32 [slab, D], the gradient so far of the slab's raw keys.
        entries: [1, padded slots, D]; None without entries, as the next two.
        d_entries: float32 [B, padded slots, D], in HBM, written by the last step.
        entry_sums: float32 [padded slots, D], the gradient so far of the entries.
        q_sums: float32 [rows, D], the tile's gradient so far of q; None where no tile loops, as the next.
        offset: float32 [1, rows], the part of a logit's gradient that all keys share.
    """

    plan: FusedPlan
    spans: Any
    bounds: Any
    q: Any
    d_out: Any
    out: Any
    keys: Any
    sinks: Any
    lse: Any
    d_lse: Any
    d_q: Any
    d_keys: Any
    d_sinks: Any
    ring: Any
    entries: Any = None
    d_entries: Any = None
    entry_sums: Any = None
    q_sums: Any = None
    offset: Any = None

    def run(self) -> None:
        """Add the tile's part to all sums, and write what is finished."""
        plan, batch_row, step = self.plan, pl.program_id(0), pl.program_id(1)

        @pl.when(step == 0)
        def _() -> None:
            for ref in (self.ring, self.d_sinks, *([self.entry_sums] if plan.slots else [])):
                ref[...] = jnp.zeros_like(ref)

        pl.when(step < plan.tiles)(self.tile)
        self.d_keys[0] = self.ring[: plan.tokens, :].astype(self.d_keys.dtype)
        if plan.reach:
            self.ring[: plan.reach, :] = self.ring[plan.tokens :, :]
        self.ring[plan.reach :, :] = jnp.zeros((plan.tokens, plan.dim), jnp.float32)
        if plan.slots:

            @pl.when(step == pl.num_programs(1) - 1)
            def _() -> None:
                pltpu.sync_copy(self.entry_sums, self.d_entries.at[batch_row])

    def tile(self) -> None:
        """Add a tile's part."""
        plan, bounds = self.plan, Bounds.read(self.plan, self.bounds)
        first_slot, blocks = self.spans[0, 0, 0, FIRST_SLOT], self.spans[0, 0, 0, BLOCKS]
        pl.when(self.spans[0, 0, 0, QUIET] > 0)(self.silence)
        if not plan.loops:
            self.slab(bounds, first_slot, alone=True)
            return

        @pl.when(blocks == 0)
        def _() -> None:
            self.slab(bounds, first_slot, alone=True)

        @pl.when(blocks > 0)
        def _() -> None:
            self.slab(bounds, first_slot, alone=False)
            lax.fori_loop(0, blocks, functools.partial(self.block, bounds, first_slot + plan.first_slots), None)
            for chunk in range(plan.chunks):
                put_chunk(plan, self.d_q, chunk, self.q_sums[chunk_slice(plan, chunk), :])

    def silence(self) -> None:
        """Replace quiet rows, and rows past the last token, by zeros: they may hold NaN, and 0 x NaN is NaN."""
        for chunk in range(self.plan.chunks):
            quiet = self.lse[0, 0, :, chunk_slice(self.plan, chunk)] == _QUIET_LSE
            sound = as_column(jnp.where(quiet, 0.0, 1.0)) > 0.0
            for ref in (self.q, self.d_out, self.out):
                rows = chunk_of(self.plan, ref, chunk).astype(jnp.float32)
                put_chunk(self.plan, ref, chunk, jnp.where(sound, rows, 0.0))

    def slab(self, bounds: Bounds, first_slot: Array, *, alone: bool) -> None:
        """Add the slab's and the first slots' part; write d_q if these are all that the tile sees (`alone`)."""
        plan = self.plan

        def offset_of(chunk: int, keys_share: Array, sink_share: Array) -> Array:
            rows = chunk_slice(plan, chunk)
            offset = self.d_lse[0, 0, :, rows] - keys_share * self.inner(chunk)
            self.d_sinks[0, :, rows] += sink_share * offset
            if not alone:
                self.offset[:, rows] = offset
            return offset

        def take(chunk: int, d_q: Array, d_keys: Array) -> None:
            self.ring[...] += d_keys[: plan.slab]
            if plan.slots:
                here = pl.ds(pl.multiple_of(first_slot, SUBLANES), plan.first_slots)
                self.entry_sums[here, :] += d_keys[plan.slab :]
            if alone:
                put_chunk(plan, self.d_q, chunk, d_q)
            else:
                self.q_sums[chunk_slice(plan, chunk), :] = d_q

        keys = first_keys(plan, self.keys, self.entries, first_slot)
        self.differentiate(keys, functools.partial(masked_first, plan, bounds, first_slot), offset_of, take)

    def block(self, bounds: Bounds, start: Array, number: Array, _: Any) -> None:
        """Add the part of one block of the slots from `start` on."""
        plan = self.plan
        start = pl.multiple_of(start + number * plan.block_slots, SUBLANES)
        here = pl.ds(start, plan.block_slots)

        def offset_of(chunk: int, *_: Array) -> Array:
            return self.offset[:, chunk_slice(plan, chunk)]

        def take(chunk: int, d_q: Array, d_keys: Array) -> None:
            self.entry_sums[here, :] += d_keys
            self.q_sums[chunk_slice(plan, chunk), :] += d_q

        self.differentiate(self.entries[0, here, :], functools.partial(masked_slots, bounds, start), offset_of, take)

    def differentiate(
        self, keys: Array, masked: Callable[[Array, float], Array], offset_of: Callable[..., Array], take: Any
    ) -> None:
        """Compute the part of some keys in the gradients, chunk by chunk.

        Args:
            keys: [n, D].
            masked: replaces values [n, chunk] of keys that a row does not see.
            offset_of: returns the offset of a chunk of rows, of which it gets the number and the two shares.
            take: gets the number of a chunk, and the parts in the gradients of its queries and of the keys.
        """
        plan = self.plan
        to_base_2, narrow = plan.scale * LOG2_E, self.q.dtype

        def dots(chunk: int) -> tuple[Array, Array]:
            q, d_out = chunk_of(plan, self.q, chunk), chunk_of(plan, self.d_out, chunk)
            return dot(plan, keys, q, OVER_DIM), dot(plan, keys, d_out, OVER_DIM)

        for chunk, (scores, d_weights) in one_ahead(plan.chunks, dots):
            rows, (keys_share, sink_share) = chunk_slice(plan, chunk), self.shares(chunk)
            offset = offset_of(chunk, keys_share, sink_share)
            weights = jnp.exp2(masked(scores * to_base_2, MASKED) - self.lse[0, 0, :, rows] * LOG2_E)
            # The product with an unseen key may be infinite: its weight is 0, but 0 x inf is NaN.
            d_scores = weights * (masked(d_weights, 0.0) * (keys_share * plan.scale) + offset * plan.scale)
            # Over all keys these sum to offset + share x (d_out . out), with an `out` that was not rounded.
            total = jnp.sum(d_scores, axis=0, keepdims=True)
            self.d_sinks[0, :, rows] -= sink_share * (total * (1.0 / plan.scale))
            d_scores, of_keys = d_scores.astype(narrow), (weights * keys_share).astype(narrow)
            d_keys = dot(plan, d_scores, chunk_of(plan, self.q, chunk), OVER_ROWS)
            d_keys = d_keys + dot(plan, of_keys, chunk_of(plan, self.d_out, chunk), OVER_ROWS)
            take(chunk, dot(plan, d_scores, keys, OVER_KEYS), d_keys)

    def shares(self, chunk: int) -> tuple[Array, Array]:
        """The keys' and the sink's share of the softmax, [1, chunk]; 0 for quiet rows."""
        rows = chunk_slice(self.plan, chunk)
        lse = self.lse[0, 0, :, rows]
        margin, quiet = (lse - self.sinks[:, rows]) * LOG2_E, lse == _QUIET_LSE
        keys, sink = 1.0 / (1.0 + jnp.exp2(-margin)), 1.0 / (1.0 + jnp.exp2(margin))
        return jnp.where(quiet, 0.0, keys), jnp.where(quiet, 0.0, sink)

    def inner(self, chunk: int) -> Array:
        """Sums of out x d_out per row, [1, chunk]."""
        out, d_out = (chunk_of(self.plan, ref, chunk).astype(jnp.float32) for ref in (self.out, self.d_out))
        products = out * d_out
        lanes = functools.reduce(jnp.add, (products[:, at : at + LANES] for at in range(0, self.plan.dim, LANES)))
        return jnp.sum(lanes.T, axis=0, keepdims=True)
