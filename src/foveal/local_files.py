"""Local files of published models: the message for one that is missing, and unambiguous JSON."""

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

DOWNLOAD = "`hf download {}`"
"""The command that downloads a model from the Hugging Face hub and prints its location."""

ANY_MODEL = "ORG/NAME"
"""Placeholder where the name of the model is unknown."""

_MODEL = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_FILE_ENDINGS = (".json", ".safetensors", ".bin")


def not_here(path: str | os.PathLike[str]) -> str:
    """Return the message for a path that does not exist, which may be the name of a model on the hub."""
    name = os.fspath(path)
    is_model = _MODEL.fullmatch(name) and not name.endswith(_FILE_ENDINGS) and not Path(name).parent.exists()
    command = DOWNLOAD.format(name if is_model else ANY_MODEL)
    return f"there is no such file or directory; models are not downloaded: {command} does that and says where"


def parse_json(text: bytes) -> dict[str, Any]:
    """Parse a JSON object in which no key occurs twice.

    Raises:
        ValueError: not a JSON object, or a key occurs twice. Nesting too deep is a RecursionError.
    """
    value = json.loads(text, object_pairs_hook=_unique)
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__} at the top level")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise ValueError(f"the key {key!r} twice")
    return dict(pairs)
