"""Meshes with Explicit axes, as `jax.make_mesh` makes them: public functions run there as on Auto axes.

On an Explicit axis an array's sharding is part of its type, and every operation must determine that of its result.
Attention leaves it to the compiler, as on Auto axes; only a function's arguments and results have typed shardings.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

P = ParamSpec("P")
R = TypeVar("R")


def any_mesh(
    like: str | None = None, *, dims: int | None = None, keep: str | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function of arrays, or of pytrees of arrays, to run on meshes with Explicit axes.

    There the function sees Auto axes in their place, and its results are resharded on the Explicit ones. On other
    meshes, and within another decorated function, it is called unchanged.

    Args:
        like: name of the argument whose sharding the results take on their leading dims, where the mesh axes divide
            them: the batch stays sharded. None leaves the results unsharded.
        dims: number of these leading dims; by default all that the argument has.
        keep: name of a pytree argument. The last result, of the same structure, keeps the shardings of its leaves
            instead, because a cache that a loop carries must keep its type.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            leaves, structure = jax.tree.flatten((args, kwargs))
            mesh = _explicit_mesh(leaves)
            if mesh is None:
                return function(*args, **kwargs)
            inner = _abstract(mesh).update_axis_types(dict.fromkeys(_abstract(mesh).explicit_axes, AxisType.Auto))
            given = signature.bind(*args, **kwargs).arguments
            with jax.sharding.use_abstract_mesh(inner):
                args, kwargs = jax.tree.unflatten(structure, map(_without, leaves))
                results = function(*args, **kwargs)
            spec = _spec(given.get(like))[:dims] if like is not None else ()
            kept = None if keep is None else given.get(keep)
            return _with_shardings(results, kept, spec, mesh)

        return wrapper

    return decorate


def _explicit_mesh(leaves: list[Any]) -> Mesh | AbstractMesh | None:
    """The mesh with Explicit axes that the arrays are on, concrete if one of them shows it, or else the context's."""
    placed = [leaf for leaf in leaves if _has_explicit_axes(leaf)]
    for leaf in placed:
        sharding = None if isinstance(leaf, Tracer) else leaf.sharding
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    mesh = jax.typeof(placed[0]).sharding.mesh if placed else jax.sharding.get_abstract_mesh()
    return mesh if mesh.explicit_axes else None


def _has_explicit_axes(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and bool(jax.typeof(leaf).sharding.mesh.explicit_axes)


def _abstract(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    return mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh


def _spec(value: Any) -> tuple[Any, ...]:
    """The Explicit axes along each dim of an array, or of the first array of a pytree; () without one."""
    array = next((leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, jax.Array)), None)
    return () if array is None else tuple(jax.typeof(array).sharding.spec)


def _without(leaf: Any) -> Any:
    """Return an array with its Explicit axes left to the compiler; anything else unchanged."""
    return jax.sharding.reshard(leaf, PartitionSpec()) if _has_explicit_axes(leaf) else leaf


def _with_shardings(results: Any, kept: Any, spec: tuple[Any, ...], mesh: Mesh | AbstractMesh) -> Any:
    """Reshard the results on `mesh`: each to `spec`, but the leaves of the last one to those of `kept`, if given."""

    def place(leaf: Any, spec: tuple[Any, ...]) -> Any:
        # An array that depends on no operand may lie on one device: it combines with arrays on any mesh.
        if not isinstance(leaf, jax.Array) or jax.typeof(leaf).sharding.mesh.empty:
            return leaf
        sizes = _abstract(mesh).shape
        fitting = PartitionSpec(*(_dividing(axes, size, sizes) for axes, size in zip(spec, leaf.shape, strict=False)))
        return jax.sharding.reshard(leaf, NamedSharding(mesh, fitting))

    def place_all(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: place(leaf, spec), tree)

    if kept is None:
        return place_all(results)
    *others, last = results if isinstance(results, tuple) else (results,)
    last = jax.tree.map(lambda leaf, old: place(leaf, _spec(old)), last, kept)
    return (*place_all(others), last) if others else last


def _dividing(axes: Any, size: int, sizes: Mapping[str, int]) -> Any:
    """The mesh axes of a dim, or None if they do not divide `size` evenly."""
    names = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
    return axes if size % math.prod(sizes[name] for name in names) == 0 else None
