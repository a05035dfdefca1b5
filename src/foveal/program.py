"""Facts about the program being traced, and the mark of a program that was planned for one platform.

A trace does not know which platform it will be lowered for. Where the platform has decided something, an operand passes
through `planned`, a no-op at run time. Its lowering compares the two platforms, and `jax.export` refuses another one.
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
    """The platform of the program, "cpu", "gpu" or "tpu": that of the mesh in context, else of the default device.

    In ahead-of-time compilation that mesh has devices that are not present. Code that decides something by the platform
    must pass an operand through `planned`.
    """
    device = _device()
    return family(device if isinstance(device, str) else device.platform)


def device_kind() -> str:
    """The vendor's name of the program's devices, such as "TPU v5p"; see `platform`."""
    device = _device()
    if isinstance(device, str):
        device = jax.devices(None if device == jax.default_backend() else device)[0]
    return device.device_kind


def _device() -> Any:
    """A device that the program is traced for, or the name of its platform."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]  (made at run time)
    return chosen or jax.default_backend()


def family(name: str) -> str:
    """Return "cpu", "gpu" or "tpu" for a platform's name in JAX, whose lowering calls GPUs "cuda" or "rocm"."""
    return {"cuda": "gpu", "rocm": "gpu"}.get(name, name)


_NOMINAL_BATCH = 8
"""The batch size for which a program with a symbolic batch is planned."""


def per_row(total: int, batch: Size, least: int) -> int:
    """Share of `total` per row of a batch, at least `least`."""
    return max(least, total // (_NOMINAL_BATCH if is_symbolic_dim(batch) else batch))


def automatic_axes(operands: Any) -> tuple[str, ...]:
    """Mesh axes over which XLA may partition the program automatically, as far as tracing shows; none on one device.

    They are those of the mesh in context and, outside `jax.shard_map`, of the operands' meshes. Shardings given to
    `jax.jit` alone, without a mesh in context, are not visible here.
    """
    context = jax.sharding.get_abstract_mesh()
    if context.manual_axes:  # XLA treats the other axes of such a region as partitioned, whatever their size
        return tuple(name for name in context.axis_names if name not in context.manual_axes)
    meshes = (context, *(jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(operands)))
    return tuple(dict.fromkeys(name for mesh in meshes for name, size in mesh.shape.items() if size > 1))


def row_major(array: Array) -> Array:
    """Return the array, constrained in programs for TPUs to a layout with its last axis innermost.

    XLA for TPUs chooses a layout for each producer and consumer separately, and keeps a copy in each layout.
    """
    if platform() != "tpu":
        return array
    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))


def varying(start: Any, operands: Any) -> Any:
    """Return the initial arrays of a loop, cast to vary over the manual axes that the operands vary over.

    Within `jax.shard_map` a loop's carry must keep its type, but arrays of zeros start without varying over any axis.
    """
    axes = frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(operands)))

    def cast(array: Array) -> Array:
        missing = tuple(axes - jax.typeof(array).manual_axis_type.varying)
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(cast, start)


def planned(array: Array) -> Array:
    """Return the array, and mark the program as one in which `platform()` has decided something.

    Lowering the program for another platform raises NotImplementedError in `jax.export`, with advice. Under `jax.jit`,
    where arrays lie on devices other than the default ones, it is a warning: the program is correct, but planned for
    the wrong device.
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
