"""The checks of `foveal verify` on a whole checkpoint."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping

from foveal.checkpoint.files import CONFIG, CheckpointError, read_json
from foveal.checkpoint.find import AttentionCheckpoint
from foveal.checkpoint.names import SCALE_SUFFIXES, Dialect
from foveal.checkpoint.release import TensorSpec, released_tensors
from foveal.config import AttentionConfig

_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class Whole:
    """A checkpoint compared with what its config says it must hold.

    Attributes:
        files: number of files.
        files_here: number of files that exist on this machine.
        tensors: number of tensors.
        bytes: size of the tensors in the files that were examined.
        expected_tensors: expected number of tensors; None if unknown. It is known for FP8 models in DeepSeek's names.
        expected_bytes: expected size of the tensors in the files that were examined; None likewise.
        complaints: all differences.
    """

    files: int
    files_here: int
    tensors: int
    bytes: int
    expected_tensors: int | None
    expected_bytes: int | None
    complaints: tuple[str, ...]


def config_complaints(config: AttentionConfig) -> tuple[str, ...]:
    """Compare a config with that of the released model of its size; return the differences."""
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
    """Count a checkpoint's tensors and compare them with the expected ones; reads headers only.

    Args:
        found: the checkpoint's attention.
        partial: whether to examine only the files that hold it. The other files need not exist or be intact.
    """
    files, held, problems = found.files, {}, []
    needed = {tensor.file for sources in found.layers.values() for source in sources for tensor in source.tensors}
    by_file = defaultdict(list)
    for name, file in files.where.items():
        by_file[file].append(name)
    for file in sorted(needed if partial else by_file):
        try:
            held |= {name: files.tensor(name) for name in by_file[file]}
        except CheckpointError as error:
            problems += str(error).splitlines()
    expected = _expected(found)
    present = {_released_name(name): TensorSpec(tensor.dtype, tensor.shape) for name, tensor in held.items()}
    bytes_here = None
    if expected is not None:
        bytes_here = sum(spec.size for name, spec in expected.items() if name in present)
        problems += _differences({_released_name(name) for name in files.where}, expected, present)
    return Whole(
        files=len(files.files),
        files_here=sum(file.exists() for file in files.files),
        tensors=len(files.where),
        bytes=sum(tensor.size for tensor in held.values()),
        expected_tensors=None if expected is None else len(expected),
        expected_bytes=bytes_here,
        complaints=tuple(problems),
    )


def _released_name(name: str) -> str:
    """Replace accepted prefixes and scale endings by those of the releases."""
    name = name.removeprefix("model.")
    released, *others = SCALE_SUFFIXES
    return next((name.removesuffix(other) + released for other in others if name.endswith(other)), name)


def _expected(found: AttentionCheckpoint) -> dict[str, TensorSpec] | None:
    if found.dialect is not Dialect.DEEPSEEK or not (found.files.directory / CONFIG).exists():
        return None
    scales = [source.scale.dtype for sources in found.layers.values() for source in sources if source.scale]
    if not scales:
        return None  # the releases are FP8
    return released_tensors(read_json(found.files.directory / CONFIG), found.config, scales[0])


def _differences(names: set[str], expected: Mapping[str, TensorSpec], present: Mapping[str, TensorSpec]) -> list[str]:
    missing, unexpected = sorted(set(expected) - names), sorted(names - set(expected))
    other = [name for name in sorted(set(present) & set(expected)) if present[name] != expected[name]]
    complaints = [_some("missing", missing), _some("unexpected", unexpected)]
    for name in other[:_SHOWN]:
        want, got = expected[name], present[name]
        complaints.append(f"{name}: expected {want.dtype} {list(want.shape)}, got {got.dtype} {list(got.shape)}")
    if len(other) > _SHOWN:
        complaints.append(f"{len(other) - _SHOWN} more tensors of another dtype or shape")
    return [complaint for complaint in complaints if complaint]


def _some(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} tensors {what}: {', '.join(names[:_SHOWN])}{more}"
