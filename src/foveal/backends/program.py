"""What is known of the program that is being traced."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint

from foveal.typing import Array


def platform() -> str:
    """Where the program will run, "cpu", "gpu" or "tpu": the mesh in context says it, else JAX's default.

    A mesh of devices that are not here is how programs are compiled ahead of time.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def automatic_axes(operands: Any) -> tuple[str, ...]:
    """Mesh axes over which XLA may divide the program by itself, as far as tracing shows them; none on one device.

    The mesh in context shows them and, outside of `jax.shard_map`, the meshes that the operands lie on. Shardings
    given to `jax.jit` alone, without a mesh in context, are not to be seen.
    """
    context = jax.sharding.get_abstract_mesh()
    if context.manual_axes:  # what of such a region is not manual XLA takes for divided, however small the axis
        return tuple(name for name in context.axis_names if name not in context.manual_axes)
    meshes = (context, *(jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(operands)))
    return tuple(dict.fromkeys(name for mesh in meshes for name, size in mesh.shape.items() if size > 1))


def row_major(array: Array) -> Array:
    """The array, in memory with its last axis innermost where the program is a TPU's.

    XLA for TPUs lays arrays out for their producers and consumers one by one, and keeps a copy in each layout.
    """
    if platform() != "tpu":
        return array
    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))


def varying(start: Any, operands: Any) -> Any:
    """Arrays to begin a loop with, typed to differ over the mesh axes that the operands differ over.

    Within `jax.shard_map` what a loop carries must keep its type, and what begins as zeros is the same everywhere.
    """
    axes = frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(operands)))

    def cast(array: Array) -> Array:
        missing = tuple(axes - jax.typeof(array).manual_axis_type.varying)
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(cast, start)
