"""Messages about packages that the base installation lacks: the extras of `pyproject.toml`."""

from __future__ import annotations


def missing(package: str, extra: str) -> str:
    """The message for a package that is not installed.

    Nothing of Foveal's name is published, so its extras are those of a checkout.

    Args:
        package: what could not be imported.
        extra: the extra that brings it.
    """
    return f"{package} is missing: pip install '.[{extra}]' in a checkout of Foveal"
