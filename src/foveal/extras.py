"""The message about a missing optional package, from an extra of `pyproject.toml`."""

from __future__ import annotations


def missing(package: str, extra: str) -> str:
    """Return the message for a package that is not installed.

    No package named Foveal is published, so the message installs the extra from a checkout.

    Args:
        package: the package that could not be imported.
        extra: the extra that installs it.
    """
    return f"{package} is missing: pip install '.[{extra}]' in a checkout of Foveal"
