"""What `foveal verify` looks at in a checkpoint as a whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from foveal.checkpoint.files import CheckpointFiles, read_json
from foveal.checkpoint.find import AttentionCheckpoint
from foveal.checkpoint.names import Dialect
from foveal.checkpoint.release import TensorSpec, released_tensors
from foveal.config import AttentionConfig

_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class Whole:
    """A checkpoint beside what its config says it must hold.

    Attributes:
        files: how many there are.
        files_here: how many of them are on this machine.
        tensors: how many there are.
        bytes: of those whose files are here.
        expected_tensors: how many there must be. None where that is not known: it is of models with DeepSeek's names.
        expected_bytes: of those whose files are here; likewise.
        complaints: what differs.
    """

    files: int
    files_here: int
    tensors: int
    bytes: int
    expected_tensors: int | None
    expected_bytes: int | None
    complaints: tuple[str, ...]


def config_complaints(config: AttentionConfig) -> tuple[str, ...]:
    """What differs between a config and that of the released model whose size it has."""
    for name, preset in (("Flash", AttentionConfig.deepseek_v4_flash()), ("Pro", AttentionConfig.deepseek_v4_pro())):
        if (config.hidden_size, config.num_layers) == (preset.hidden_size, preset.num_layers):
            fields = [field.name for field in dataclasses.fields(config) if field.name != "initializer_range"]
            return tuple(
                f"config: {field} is {getattr(config, field)}, which in DeepSeek-V4-{name} is {getattr(preset, field)}"
                for field in fields
                if getattr(config, field) != getattr(preset, field)
            )
    return ()


def whole_checkpoint(found: AttentionCheckpoint, *, partial: bool) -> Whole:
    """Counts and compares; reads headers only.

    Args:
        found: the checkpoint's attention.
        partial: whether files that hold nothing of it need not be here.

    Raises:
        CheckpointError: a file is damaged.
    """
    files = found.files
    here = {file for file in files.files if file.exists()}
    absent = [] if partial else [f"{file}: there is no such file" for file in files.files if file not in here]
    held = {name: files.tensor(name) for name, file in files.where.items() if file in here}
    total = sum(tensor.size for tensor in held.values())
    expected = _expected(found)
    if expected is None:
        return Whole(len(files.files), len(here), len(files.where), total, None, None, tuple(absent))
    present = {name: TensorSpec(tensor.dtype, tensor.shape) for name, tensor in held.items()}
    complaints = (*absent, *_differences(files, expected, present))
    bytes_here = sum(spec.size for name, spec in expected.items() if name in held)
    return Whole(len(files.files), len(here), len(files.where), total, len(expected), bytes_here, complaints)


def _expected(found: AttentionCheckpoint) -> dict[str, TensorSpec] | None:
    if found.dialect is not Dialect.DEEPSEEK or not (found.files.directory / "config.json").exists():
        return None
    scales = [source.scale.dtype for sources in found.layers.values() for source in sources if source.scale]
    if not scales:
        return None  # the releases are FP8
    return released_tensors(read_json(found.files.directory / "config.json"), found.config, scales[0])


def _differences(
    files: CheckpointFiles, expected: Mapping[str, TensorSpec], present: Mapping[str, TensorSpec]
) -> tuple[str, ...]:
    missing = sorted(set(expected) - set(files.where))
    unexpected = sorted(set(files.where) - set(expected))
    other = [name for name in sorted(set(present) & set(expected)) if present[name] != expected[name]]
    complaints = [_some("missing", missing), _some("unexpected", unexpected)]
    for name in other[:_SHOWN]:
        want, got = expected[name], present[name]
        complaints.append(f"{name}: expected {want.dtype} {list(want.shape)}, got {got.dtype} {list(got.shape)}")
    if len(other) > _SHOWN:
        complaints.append(f"{len(other) - _SHOWN} more tensors of another dtype or shape")
    return tuple(complaint for complaint in complaints if complaint)


def _some(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} tensors {what}: {', '.join(names[:_SHOWN])}{more}"
