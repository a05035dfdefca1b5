"""The command line: `foveal ...`."""

from foveal.cli.main import main

__all__ = ["main"]
