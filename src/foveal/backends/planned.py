"""The mark of a program whose plans were made for one platform: `jax.export` lowers it for no other.

A trace does not know what it will be lowered for. Where a platform has decided something, an operand passes through
`planned`, which is nothing at run time: its lowering compares the two.
"""

from __future__ import annotations

import warnings
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from foveal.backends.program import family, platform
from foveal.typing import Array


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
