"""Parts of both kernels: running them, matmuls, masks, and rows of numbers.

Scores are transposed, [keys, rows]: a row's statistics are then vectors along lanes, and sums over keys need no
exchange between lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from foveal.backends.tpu.plan import LANES, SUBLANES, FusedPlan
from foveal.typing import Array

LOG2_E = 1.4426950408889634
MASKED = -1e30
"""Score of a key that a query does not see."""
LEAST_PEAK = -1e29
"""Least maximum of the scores: far above `MASKED`, so that a masked key's weight is exactly 0."""

Over = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[()], tuple[()]]]
OVER_DIM: Over = (((1,), (1,)), ((), ()))
"""[keys, D] and [rows, D] to [keys, rows]."""
OVER_KEYS: Over = (((0,), (0,)), ((), ()))
"""[keys, rows] and [keys, D] to [rows, D]."""
OVER_ROWS: Over = (((1,), (0,)), ((), ()))
"""[keys, rows] and [rows, D] to [keys, D]."""


def run_kernel(
    plan: FusedPlan,
    name: str,
    body: Callable[[dict[str, Any]], None],
    grid: tuple[int, int],
    inputs: Mapping[str, tuple[Array, pl.BlockSpec]],
    results: Mapping[str, tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    scratch: Mapping[str, tuple[int, ...]],
    *,
    in_order: bool,
) -> dict[str, Array]:
    """Run a kernel, whose `body` gets references to blocks by name, and return its results by name.

    Args:
        plan: of the call.
        name: name of the kernel.
        body: what a step of the grid does.
        grid: batch rows, and steps per batch row.
        in_order: whether the steps of a batch row depend on each other.
        inputs: arrays and their blocks.
        results: shapes and their blocks.
        scratch: shapes of float32 arrays in VMEM.
    """
    names = [*inputs, *results, *scratch]
    semantics = "parallel", "arbitrary" if in_order else "parallel"
    arrays, in_specs = zip(*inputs.values(), strict=True)
    shapes, out_specs = zip(*results.values(), strict=True)
    made = pl.pallas_call(
        lambda *refs: body(dict(zip(names, refs, strict=True))),
        grid=grid,
        in_specs=in_specs,
        out_specs=list(out_specs),
        out_shape=list(shapes),
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch.values()],
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=plan.vmem_bytes),
        # The emulator fills memory that nothing has written with NaN.
        interpret=pltpu.InterpretParams(uninitialized_memory="nan") if plan.interpret else False,
        name=name,
    )(*arrays)
    return dict(zip(results, made, strict=True))


def slab_spec(plan: FusedPlan, tile: Any) -> pl.BlockSpec:
    """The slab of a tile: blocks that overlap, addressed by rows. `tile` returns (b, i) for a step of the grid."""

    def index(*step: Any) -> tuple[Any, ...]:
        b, i = tile(*step)
        return b, i * plan.tokens, 0

    return pl.BlockSpec((pl.Element(1), pl.Element(plan.slab), pl.Element(plan.dim)), index)


def once(plan: FusedPlan, shape: tuple[int, ...], index: Any) -> pl.BlockSpec:
    """Block that stays in VMEM for many steps: one buffer, not two."""
    mode: Any = {} if plan.interpret else {"pipeline_mode": pl.Buffered(1)}
    return pl.BlockSpec(shape, index, **mode)


def sink_rows(plan: FusedPlan, sinks: Array | None) -> Array:
    """Sinks as rows of a tile, float32 [1, T x H]; -inf for none."""
    if sinks is None:
        return jnp.full((1, plan.rows), -jnp.inf, jnp.float32)
    return jnp.repeat(sinks.astype(jnp.float32), plan.tokens)[None]


def dot(plan: FusedPlan, left: Array, right: Array, over: Over) -> Array:
    """Matmul with a float32 result."""
    return lax.dot_general(left, right, over, precision=plan.precision, preferred_element_type=jnp.float32)


def chunk_of(plan: FusedPlan, ref: Any, chunk: int) -> Array:
    """Rows of a chunk of heads, [chunk, D], from a block [1, H, T, D]."""
    heads = slice(chunk * plan.chunk_heads, (chunk + 1) * plan.chunk_heads)
    return ref[0, heads].reshape(plan.chunk, plan.dim)


def put_chunk(plan: FusedPlan, ref: Any, chunk: int, rows: Array) -> None:
    """Replace the rows of a chunk of heads of a block [1, H, T, D]."""
    heads = slice(chunk * plan.chunk_heads, (chunk + 1) * plan.chunk_heads)
    ref[0, heads] = rows.astype(ref.dtype).reshape(plan.chunk_heads, plan.tokens, plan.dim)


def chunk_slice(plan: FusedPlan, chunk: int) -> slice:
    """A chunk's part of the tile's rows."""
    return slice(chunk * plan.chunk, (chunk + 1) * plan.chunk)


class Bounds(NamedTuple):
    """Bounds of a tile's rows, int32 [1, chunk] each: the same for every chunk. See `TileArrays`."""

    window_first: Array
    window_end: Array
    slot_first: Array
    slot_end: Array

    @classmethod
    def read(cls, plan: FusedPlan, bounds_ref: Any) -> Bounds:
        """Read the bounds from a block [1, 1, 8, 128]."""
        return cls(*(_row(plan, bounds_ref, which) for which in range(4)))


def tainted(plan: FusedPlan, bounds_ref: Any) -> Array:
    """bool [1, chunk]: rows that see a key which was not finite."""
    return _row(plan, bounds_ref, 4) > 0


def _row(plan: FusedPlan, bounds_ref: Any, which: int) -> Array:
    return jnp.concatenate([bounds_ref[0, 0, which : which + 1, :]] * (plan.chunk // LANES), axis=1)


def as_column(row: Array) -> Array:
    """[1, n] -> [n, 1]: a transpose of 128 equal sublanes, since one of a single sublane does not exist."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


def first_keys(plan: FusedPlan, keys_ref: Any, entries_ref: Any | None, first_slot: Array) -> Array:
    """Keys of the tile's slab, followed by its first slots: [slab + first slots, D]."""
    keys = keys_ref[0]
    if entries_ref is None:
        return keys
    start = pl.multiple_of(first_slot, SUBLANES)
    return jnp.concatenate([keys, entries_ref[0, pl.ds(start, plan.first_slots), :]], axis=0)


def masked_first(plan: FusedPlan, bounds: Bounds, first_slot: Array, values: Array, fill: float) -> Array:
    """Replace values [slab + first slots, chunk] of `first_keys` that a row does not see."""
    key = lax.broadcasted_iota(jnp.int32, (plan.slab, 1), 0)
    seen = (key >= bounds.window_first) & (key < bounds.window_end)
    window = jnp.where(seen, values[: plan.slab], fill)
    if not plan.slots:
        return window
    return jnp.concatenate([window, masked_slots(bounds, first_slot, values[plan.slab :], fill)], axis=0)


def masked_slots(bounds: Bounds, start: Array, values: Array, fill: float) -> Array:
    """Replace values [n, chunk] of slots [start, start + n) that a row does not see.

    The masks are computed again for each chunk: to keep them would take more than to compare two integers.
    """
    slot = lax.broadcasted_iota(jnp.int32, (values.shape[0], 1), 0) + start
    return jnp.where((slot >= bounds.slot_first) & (slot < bounds.slot_end), values, fill)


def one_ahead(count: int, start: Any) -> Iterator[tuple[int, Any]]:
    """Yield each chunk and its `start(chunk)`, with the next one's called first.

    Its matmuls then run while this chunk's softmax is computed. Chunks are unrolled: a loop would separate them.
    """
    made = start(0)
    for chunk in range(count):
        following = start(chunk + 1) if chunk + 1 < count else None
        yield chunk, made
        made = following
