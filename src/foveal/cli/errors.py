"""What ends a command with one line instead of a traceback."""

from __future__ import annotations

import importlib

from foveal.extras import missing


class CliError(Exception):
    """The user can put this right; the message, one line, says how. Ends in exit code 2."""


def require(modules: tuple[str, ...], extra: str) -> None:
    """Raises CliError naming the extra to install unless all of these can be imported."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:
            raise CliError(missing(name, extra)) from None
