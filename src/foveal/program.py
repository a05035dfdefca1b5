"""What is known of the program that is being traced, and the mark of one whose plans were made for one platform.

A trace does not know what it will be lowered for. Where a platform has decided something, an operand passes through
`planned`, which is nothing at run time: its lowering compares the two, and `jax.export` lowers it for no other.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.export import is_symbolic_dim
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from foveal.typing import Array, Size


def platform() -> str:
    """Where the program will run, "cpu", "gpu" or "tpu": the mesh in context says it, else JAX's default device.

    A mesh of devices that are not here is how programs are compiled ahead of time. Who decides something by this sends
    an operand through `planned`.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]  (made at run time)
        device = chosen or jax.default_backend()
    return family(device if isinstance(device, str) else device.platform)


def family(name: str) -> str:
    """A platform as JAX names it, GPUs "cuda" or "rocm" to lowering, as "cpu", "gpu" or "tpu"."""
    return {"cuda": "gpu", "rocm": "gpu"}.get(name, name)


_NOMINAL_BATCH = 8
"""Rows for which a program is planned whose batch is a symbolic dimension."""


def per_row(total: int, batch: Size, least: int) -> int:
    """`total` shared among the rows of a batch, at least `least` each."""
    return max(least, total // (_NOMINAL_BATCH if is_symbolic_dim(batch) else batch))


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


def planned(array: Array) -> Array:
    """The array, in a program that `platform()` has decided something of.

    Lowering the program for another platform is a NotImplementedError in `jax.export`, which says what to do. Under
    `jax.jit`, where arrays lie on devices that are not the default ones, it is a warning: the program is right, but cut
    for the wrong device.
    """
    return _planned.bind(array, platform=platform())


def _lowered(context: Any, operand: Any, *, platform: str) -> list[Any]:
    module = context.module_context
    others = [name for name in module.platforms if family(name) != platform]
    if others:
        what = f"planned for {platform}, is lowered for {', '.join(others)}"
        if module.lowering_parameters.for_export:
            raise NotImplementedError(
                f"a program of foveal, {what}: export once for each platform, within "
                f'`with foveal.aot.tracing_for("{family(others[0])}"):`'
            )
        warnings.warn(
            f"a program of foveal, {what}, where it may be slow: trace it within `with jax.default_device(...):` of "
            "that platform, or with a mesh of its devices set",
            stacklevel=2,
        )
    return [operand]


_planned = Primitive("foveal_planned")
_planned.def_impl(lambda array, *, platform: array)
_planned.def_abstract_eval(lambda array, *, platform: array)
ad.deflinear2(_planned, lambda cotangent, _, *, platform: [cotangent])
batching.defvectorized(_planned)
mlir.register_lowering(_planned, _lowered)
