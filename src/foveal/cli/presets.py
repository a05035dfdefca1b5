"""Models as arguments: published models by name, and any model by its config."""

from __future__ import annotations

import argparse

from foveal.cli.errors import CliError
from foveal.config import AttentionConfig

PRESETS = {
    "flash": AttentionConfig.deepseek_v4_flash,
    "pro": AttentionConfig.deepseek_v4_pro,
    "tiny": AttentionConfig.tiny,
}
"""Functions that return a model's config, by the name that `--preset` takes."""

_DEFAULT = "flash"


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add `--preset` and `--config`, of which at most one may be given; `preset_of` and `read_model` interpret them."""
    # --preset has no default here: argparse could not tell it from the same name given beside --config.
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--preset", choices=tuple(PRESETS), help=f"the model whose sizes are used (default: {_DEFAULT})")
    model.add_argument(
        "--config", metavar="PATH", help="instead, the sizes of a published config.json or of a directory with one"
    )


def preset_of(args: argparse.Namespace) -> str | None:
    """Return the preset, given or by default; None if there is a `--config`."""
    return None if args.config is not None else args.preset or _DEFAULT


def read_model(preset: str | None, path: str | None) -> AttentionConfig:
    """Return the config of the preset or, without a preset, the config at the path.

    Raises:
        CliError: the config cannot be read or is not that of a DeepSeek-V4 model.
    """
    if preset is not None:
        return PRESETS[preset]()
    assert path is not None
    try:
        return AttentionConfig.from_hf_config(path)
    except OSError as error:
        reason = f"cannot read {error.filename!r}: {error.strerror}" if error.strerror else error
        raise CliError(f"--config: {reason}") from error
    except ValueError as error:
        raise CliError(f"--config: {error}") from error
