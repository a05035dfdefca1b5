"""Kernels on several devices: each computes its own batch rows and heads, in `jax.shard_map`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec

from foveal.backends.operands import Operands
from foveal.program import automatic_axes
from foveal.typing import Array

Results = tuple[Array, Array]


def sharding_refusal(sharding: PartitionSpec | None, operands: Operands, cure: str) -> str | None:
    """Reason why kernels that XLA cannot partition cannot run a call, or None.

    Args:
        sharding: of q, [B, S, H, D], on the mesh in context; None for kernels that are not sharded.
        operands: the call's.
        cure: what to use instead where XLA would have to partition them.
    """
    if sharding is None:
        axes = automatic_axes(operands)
        what = ", ".join(map(repr, axes))
        return f"XLA cannot divide its kernels over mesh axes {what}: use {cure}" if axes else None
    _, rows, _, dim = (*sharding, None, None, None, None)[:4]
    if rows is not None:
        return f"mesh axis {rows!r} over the sequence: windows and entries would cross devices"
    if dim is not None:
        return f"mesh axis {dim!r} over the head dim: logits would be sums over devices"
    mesh = jax.sharding.get_abstract_mesh()
    absent = [name for axis in (0, 2) for name in _names(sharding, axis) if name not in mesh.axis_names]
    if absent:
        return f"the mesh in context has no axis {', '.join(map(repr, absent))}: set one, as by jax.set_mesh"
    for what, axis in (("batch rows", 0), ("heads", 2)):
        size, devices = operands.q.shape[axis], devices_along(sharding, axis)
        if size % devices:
            return f"{size} {what} cannot be divided among {devices} devices"
    return None


def devices_along(sharding: PartitionSpec | None, axis: int) -> int:
    """Number of devices of the mesh in context that an axis is sharded over."""
    return math.prod(jax.sharding.get_abstract_mesh().shape[name] for name in _names(sharding, axis))


def _names(sharding: PartitionSpec | None, axis: int) -> tuple[str, ...]:
    """Mesh axes that an axis is sharded over."""
    names = sharding[axis] if sharding is not None and len(sharding) > axis else None
    return names if isinstance(names, tuple) else () if names is None else (names,)


def run_sharded(function: Callable[[Operands], Results], operands: Operands, sharding: PartitionSpec | None) -> Results:
    """Run `function` on each device's rows and heads; returns output and log-sum-exp, sharded as q is."""
    if sharding is None:
        return function(operands)
    batch, _, heads = (*sharding, None, None, None)[:3]
    queries, by_row = PartitionSpec(batch, None, heads), PartitionSpec(batch)
    specs = jax.tree.map(lambda _: by_row, operands)
    specs = dataclasses.replace(specs, q=queries, sinks=None if operands.sinks is None else PartitionSpec(heads))
    return jax.shard_map(function, in_specs=(specs,), out_specs=(queries, queries), check_vma=False)(operands)
