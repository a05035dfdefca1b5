"""Forward kernel: a tile's slab and first slots in one softmax, its other slots in a loop."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from foveal.backends.operands import Operands
from foveal.backends.tpu.kernel import (
    LEAST_PEAK,
    LOG2_E,
    MASKED,
    OVER_DIM,
    OVER_KEYS,
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
    tainted,
)
from foveal.backends.tpu.plan import LANES, SUBLANES, FusedPlan
from foveal.backends.tpu.tiles import (
    BLOCKS,
    FIRST_SLOT,
    from_rows,
    padded_entries,
    padded_keys,
    tile_arrays,
)
from foveal.typing import Array


def forward(plan: FusedPlan, operands: Operands, q: Array) -> tuple[Array, Array]:
    """Output [B, H, S, D] in q's dtype and log-sum-exp float32 [B, S, H], 0 for padding, for q [B, H, S, D]."""
    tiles, batch = tile_arrays(plan, operands.visibility, tainted=operands.tainted), q.shape[0]
    heads = pl.BlockSpec((1, plan.heads, plan.tokens, plan.dim), lambda b, i: (b, 0, i, 0))
    inputs = {
        "spans": (tiles.spans, pl.BlockSpec((1, 1, 1, 4), lambda b, i: (b, i, 0, 0), memory_space=pltpu.SMEM)),
        "bounds": (tiles.bounds, pl.BlockSpec((1, 1, 8, LANES), lambda b, i: (b, i, 0, 0))),
        "q": (q, heads),
        "keys": (padded_keys(plan, operands.kv), slab_spec(plan, lambda b, i: (b, i))),
        "sinks": (sink_rows(plan, operands.sinks), once(plan, (1, plan.rows), lambda b, i: (0, 0))),
    }
    if plan.slots:
        entries = padded_entries(plan, operands.entries)
        inputs["entries"] = entries, once(plan, (1, *entries.shape[1:]), lambda b, i: (b, 0, 0))
    results = {
        "out": (jax.ShapeDtypeStruct(q.shape, q.dtype), heads),
        "lse": (
            jax.ShapeDtypeStruct((batch, plan.tiles, 1, plan.rows), jnp.float32),
            pl.BlockSpec((1, 1, 1, plan.rows), lambda b, i: (b, i, 0, 0)),
        ),
    }
    scratch = {"values": (plan.rows, plan.dim), "peak": (1, plan.rows), "total": (1, plan.rows)} if plan.loops else {}
    made = run_kernel(
        plan,
        "foveal_forward",
        lambda refs: _Tile(plan, **refs).run(),
        (batch, plan.tiles),
        inputs,
        results,
        scratch,
        in_order=False,
    )
    return made["out"], from_rows(plan, made["lse"])


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A step of the kernel's grid.

    Attributes:
        plan: the call's.
        spans: int32 [1, 1, 1, 4], in scalar memory: see `TileArrays`.
        bounds: int32 [1, 1, 8, 128], likewise.
        q: [1, H, T, D].
        keys: [1, slab, D].
        sinks: float32 [1, rows].
        out: [1, H, T, D], written.
        lse: float32 [1, 1, 1, rows], written.
        entries: [1, padded slots, D]; None without entries.
        values: float32 [rows, D], weighted sums so far; None where no tile loops over further slots, as the next two.
        peak: float32 [1, rows], largest scores so far.
        total: float32 [1, rows], sums of weights so far.
    """

    plan: FusedPlan
    spans: Any
    bounds: Any
    q: Any
    keys: Any
    sinks: Any
    out: Any
    lse: Any
    entries: Any = None
    values: Any = None
    peak: Any = None
    total: Any = None

    def run(self) -> None:
        """Write the tile's output and log-sum-exp."""
        bounds = Bounds.read(self.plan, self.bounds)
        first_slot, blocks = self.spans[0, 0, 0, FIRST_SLOT], self.spans[0, 0, 0, BLOCKS]
        if not self.plan.loops:
            self.slab(bounds, first_slot, alone=True)
            return

        @pl.when(blocks == 0)
        def _() -> None:
            self.slab(bounds, first_slot, alone=True)

        @pl.when(blocks > 0)
        def _() -> None:
            self.slab(bounds, first_slot, alone=False)
            lax.fori_loop(0, blocks, functools.partial(self.block, bounds, first_slot + self.plan.first_slots), None)
            for chunk in range(self.plan.chunks):
                rows = chunk_slice(self.plan, chunk)
                factor = self.finished(bounds, chunk, self.peak[:, rows], self.total[:, rows])
                put_chunk(self.plan, self.out, chunk, self.values[rows, :] * as_column(factor))

    def slab(self, bounds: Bounds, first_slot: Array, *, alone: bool) -> None:
        """Attend to the slab and the first slots; finish if these are all that the tile sees (`alone`)."""
        plan = self.plan
        keys = first_keys(plan, self.keys, self.entries, first_slot)
        for chunk, scores in one_ahead(plan.chunks, functools.partial(self.scores, keys)):
            masked = masked_first(plan, bounds, first_slot, scores, MASKED)
            peak = jnp.maximum(jnp.max(masked, axis=0, keepdims=True), LEAST_PEAK)
            weights = jnp.exp2((masked - peak) * self.to_base_2)
            total = jnp.sum(weights, axis=0, keepdims=True)
            if alone:
                factor = self.finished(bounds, chunk, peak, total)
                put_chunk(plan, self.out, chunk, self.weighted(weights * factor, keys))
            else:
                rows = chunk_slice(plan, chunk)
                self.values[rows, :] = self.weighted(weights, keys)
                self.peak[:, rows], self.total[:, rows] = peak, total

    def block(self, bounds: Bounds, start: Array, number: Array, _: Any) -> None:
        """Attend to one block of the slots from `start` on."""
        plan = self.plan
        start = pl.multiple_of(start + number * plan.block_slots, SUBLANES)
        keys = self.entries[0, pl.ds(start, plan.block_slots), :]
        for chunk, scores in one_ahead(plan.chunks, functools.partial(self.scores, keys)):
            rows = chunk_slice(plan, chunk)
            masked, before = masked_slots(bounds, start, scores, MASKED), self.peak[:, rows]
            peak = jnp.maximum(before, jnp.max(masked, axis=0, keepdims=True))
            shrink, weights = jnp.exp2((before - peak) * self.to_base_2), jnp.exp2((masked - peak) * self.to_base_2)
            self.total[:, rows] = shrink * self.total[:, rows] + jnp.sum(weights, axis=0, keepdims=True)
            self.peak[:, rows] = peak
            self.values[rows, :] = self.values[rows, :] * as_column(shrink) + self.weighted(weights, keys)

    def finished(self, bounds: Bounds, chunk: int, peak: Array, total: Array) -> Array:
        """Write the log-sum-exp of a chunk; return the factor of its weighted sums, [1, chunk]."""
        scale, rows, nothing = self.plan.scale, chunk_slice(self.plan, chunk), total == 0.0
        # A query that sees a key but has no weight holds an infinity.
        lost = tainted(self.plan, self.bounds) | (nothing & (bounds.window_end > bounds.window_first))
        sink = jnp.exp2((self.sinks[:, rows] * (1.0 / scale) - peak) * self.to_base_2)
        factor = jnp.where(nothing, 0.0, 1.0 / (total + sink))
        lse = jnp.where(nothing, 0.0, peak * scale + jnp.log2(total) * (1.0 / LOG2_E))
        self.lse[0, 0, :, rows] = jnp.where(lost, jnp.nan, lse)
        return jnp.where(lost, jnp.nan, factor)

    def scores(self, keys: Array, chunk: int) -> Array:
        """Dot products [keys, chunk]: the scale is applied to their differences alone."""
        return dot(self.plan, keys, chunk_of(self.plan, self.q, chunk), OVER_DIM)

    def weighted(self, weights: Array, keys: Array) -> Array:
        """Sums of keys, [chunk, D]."""
        return dot(self.plan, weights.astype(keys.dtype), keys, OVER_KEYS)

    @property
    def to_base_2(self) -> float:
        """Factor from dot products to exponents of 2."""
        return self.plan.scale * LOG2_E
