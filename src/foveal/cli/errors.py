"""Errors that end a command with one line instead of a traceback."""

from __future__ import annotations

import importlib

from foveal.extras import missing


class CliError(Exception):
    """An error that the user can fix. The one-line message says how; the exit code is 2."""


def require(modules: tuple[str, ...], extra: str) -> None:
    """Raise CliError naming the extra to install unless all of these modules can be imported."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:
            raise CliError(missing(name, extra)) from None
