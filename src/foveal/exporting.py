"""Registration of foveal's pytrees with `jax.export`, under permanent names, so that saved programs can be loaded.

Importing foveal registers them: a program that takes or returns a cache can be serialised, and loaded in a process
that has imported foveal.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

from jax.export import register_namedtuple_serialization, register_pytree_node_serialization

from foveal.cache import AttentionCache, CompressorState
from foveal.cache_stack import CacheStack
from foveal.geometry import Documents, PaddedRows, Visibility, WindowLayout
from foveal.ops import IndexerLoss, IndexerRecall, RopeTable

PYTREES: tuple[type, ...] = (
    AttentionCache,
    CacheStack,
    CompressorState,
    Documents,
    IndexerLoss,
    IndexerRecall,
    PaddedRows,
    RopeTable,
    Visibility,
    WindowLayout,
)
"""Pytrees that functions of foveal take and return."""


def name_of(cls: type) -> str:
    """Return the permanent name of a class in saved programs."""
    return f"foveal.{cls.__name__}"


def written(cls: type, facts: tuple[Any, ...]) -> bytes:
    """Serialise the static fields' values, by name."""
    return json.dumps({field.name: fact for field, fact in zip(_static(cls), facts, strict=True)}).encode()


def read(cls: type, text: bytes | bytearray) -> tuple[Any, ...]:
    """Read the static fields' values; a field that the writer did not know yet gets its default.

    Raises:
        ValueError: a field is unknown, or one without a default is missing.
    """
    facts = json.loads(bytes(text))
    known = {field.name: facts.get(field.name, field.default) for field in _static(cls)}
    if unknown := facts.keys() - known.keys():
        raise ValueError(f"{name_of(cls)}: expected {', '.join(known)}, got {', '.join(sorted(unknown))} too")
    for name, fact in known.items():
        if fact is dataclasses.MISSING:
            raise ValueError(f"{name_of(cls)}: expected a {name}, got {sorted(facts)}")
    # JSON has no named tuples: the metadata of such fields says how to read them.
    return tuple(field.metadata.get("read", lambda fact: fact)(known[field.name]) for field in _static(cls))


def _static(cls: Any) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(cls) if field.metadata.get("static")]


def _register(cls: Any) -> None:
    if issubclass(cls, tuple):
        register_namedtuple_serialization(cls, serialized_name=name_of(cls))
        return
    register_pytree_node_serialization(
        cls,
        serialized_name=name_of(cls),
        serialize_auxdata=functools.partial(written, cls),
        deserialize_auxdata=functools.partial(read, cls),
    )


for _cls in PYTREES:
    _register(_cls)
