"""Models as arguments: published ones by name, and any of which there is a config."""

from __future__ import annotations

import argparse

from foveal.cli.errors import CliError
from foveal.config import AttentionConfig

PRESETS = {
    "flash": AttentionConfig.deepseek_v4_flash,
    "pro": AttentionConfig.deepseek_v4_pro,
    "tiny": AttentionConfig.tiny,
}
"""Models by the name that `--preset` takes."""

_DEFAULT = "flash"


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds `--preset` and `--config`, of which one may be given; `preset_of` and `read_model` take what they say."""
    # argparse could not tell a default from the same name given beside --config.
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--preset", choices=tuple(PRESETS), help=f"whose sizes (default: {_DEFAULT})")
    model.add_argument(
        "--config", metavar="PATH", help="instead, those of a published config.json, or of the one in a directory"
    )


def preset_of(args: argparse.Namespace) -> str | None:
    """The preset that is meant; None where there is a `--config`."""
    return None if args.config is not None else args.preset or _DEFAULT


def read_model(preset: str | None, path: str | None) -> AttentionConfig:
    """The preset's sizes, or without one those of the config at the path.

    Raises:
        CliError: it cannot be read, or is not DeepSeek-V4's.
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
