"""One case of `foveal compile`: a program compiled in a process of its own."""

from __future__ import annotations

import dataclasses
import json

from foveal.backends import registry
from foveal.backends.operands import Backend
from foveal.cli.presets import read_model
from foveal.layers import LayerType


@dataclasses.dataclass(frozen=True)
class CompileCase:
    """One program to compile. Attributes that are not listed are arguments of the command.

    Attributes:
        preset: the preset whose sizes are used; None for the sizes of the file `config`.
        implementation: the name of the implementation.
        chosen: whether it is the one that `implementation=None` chooses; then the latter is compiled.
    """

    target: str
    what: str
    layer: str
    preset: str | None
    length: int
    implementation: str
    backward: bool
    batch: int
    dtype: str
    mesh: tuple[tuple[str, int], ...]
    blocks: tuple[int, ...] | None = None
    compiler_options: tuple[tuple[str, str], ...] = ()
    indexer_loss: bool = False
    config: str | None = None
    chosen: bool = False

    @property
    def layer_type(self) -> LayerType:
        """The layer type."""
        return LayerType(self.layer)

    @property
    def backend(self) -> Backend:
        """The implementation with its default settings."""
        return registry.named(self.implementation)

    @property
    def has_cycles(self) -> bool:
        """Whether kernel cycles can be counted. That needs schedules, which slow the compiler down."""
        return self.backend.has_cycles and not read_model(self.preset, self.config).layer(self.layer_type).has_indexer

    @classmethod
    def from_json(cls, text: str) -> CompileCase:
        """Return the case whose fields `json.dumps` wrote."""
        fields = json.loads(text)
        for pairs in ("mesh", "compiler_options"):
            fields[pairs] = tuple((name, value) for name, value in fields[pairs])
        fields["blocks"] = None if fields["blocks"] is None else tuple(fields["blocks"])
        return cls(**fields)
