"""Dataclasses that check their fields when a user builds them, but not when JAX rebuilds them as pytrees."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax

T = TypeVar("T")


def checked_pytree(cls: type[T]) -> type[T]:
    """Register a dataclass as a pytree: fields are data, or static where their metadata says so.

    Like `jax.tree_util.register_dataclass`, but JAX rebuilds it without its `__init__`. Tree transformations may
    replace data by anything (tracers, placeholders, arrays with other axes), which the checks for users would refuse.
    """
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]  (a dataclass: its decorator stands below)
    static = tuple(field.name for field in fields if field.metadata.get("static"))
    data = tuple(field.name for field in fields if field.name not in static)

    def flatten(made: T) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(made, name) for name in data), tuple(getattr(made, name) for name in static)

    def flatten_with_keys(made: T) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        children, facts = flatten(made)
        return tuple(zip(map(jax.tree_util.GetAttrKey, data), children, strict=True)), facts

    def unflatten(facts: tuple[Any, ...], children: Any) -> T:
        made = object.__new__(cls)
        made.__dict__.update(zip(data + static, (*children, *facts), strict=True))
        return made

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls
