"""One case of `foveal compile`: a program that a process of its own compiles."""

from __future__ import annotations

import dataclasses
import json

from foveal.backends import registry
from foveal.backends.operands import Backend
from foveal.cli.presets import read_model
from foveal.layers import LayerType


@dataclasses.dataclass(frozen=True)
class CompileCase:
    """One program to compile.

    Attributes, besides what the arguments of the command say:
        preset: whose sizes; None for those of the file `config`.
        implementation: a name.
        chosen: whether `implementation=None`, which is then compiled, is known to choose that one.
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
        """The implementation, as it comes."""
        return registry.named(self.implementation)

    @property
    def has_cycles(self) -> bool:
        """Whether cycles can be told. The schedules that they take are long to write."""
        return self.backend.has_cycles and not read_model(self.preset, self.config).layer(self.layer_type).has_indexer

    @classmethod
    def from_json(cls, text: str) -> CompileCase:
        """The case whose fields `json.dumps` wrote."""
        fields = json.loads(text)
        for pairs in ("mesh", "compiler_options"):
            fields[pairs] = tuple((name, value) for name, value in fields[pairs])
        fields["blocks"] = None if fields["blocks"] is None else tuple(fields["blocks"])
        return cls(**fields)
