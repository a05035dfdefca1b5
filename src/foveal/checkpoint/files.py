"""Reading safetensors files and their index without trusting them.

`safetensors` checks a file's header: its length, the shapes, and that tensors neither overlap, leave gaps nor reach
beyond the file. It cannot return FP8 and BF16 tensors as NumPy arrays, so this module reads the bytes itself. It also
refuses duplicate tensor names, which `safetensors` accepts. Nothing is unpickled, and no file outside the directory is
opened.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from foveal.extras import missing
from foveal.local_files import ANY_MODEL, DOWNLOAD, not_here, parse_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I8": np.dtype(np.int8),
    "I64": np.dtype(np.int64),
}
"""The safetensors dtypes that released models are stored in; attention uses the floating-point ones."""

_SHOWN = 40
_LFS_POINTER = b"version https://git-lfs"
_PICKLES, _PICKLED = (".bin", ".pt", ".pth", ".pkl"), (b"PK\x03\x04", b"\x80\x02\x8a")  # PyTorch's new and old formats
_MOST_AXES, _MOST_ELEMENTS = 32, 1 << 48


class CheckpointError(ValueError):
    """A checkpoint that is damaged or is not what was expected.

    Args:
        path: path of the checkpoint.
        problems: every problem found, each naming its tensor or file.

    Attributes:
        path: as given.
        problems: as given, each on one line: names come from untrusted files, so control characters are escaped.
    """

    def __init__(self, path: os.PathLike[str] | str, problems: Iterable[str]) -> None:
        self.path, self.problems = path, tuple(map(printable, problems))
        lines = [f"{printable(str(path))}: {problem}" for problem in self.problems[:_SHOWN]]
        if len(self.problems) > _SHOWN:
            lines.append(f"and {len(self.problems) - _SHOWN} more")
        super().__init__("\n".join(lines))


class StoredTensor(NamedTuple):
    """The location of a tensor in a file.

    Attributes:
        name: its name.
        dtype: as safetensors spells it.
        shape: its shape.
        file: the file that holds it.
        start: offset of its first byte in the file.
        size: in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    size: int

    def read(self) -> np.ndarray:
        """Read the tensor into a new array.

        Raises:
            CheckpointError: the file is gone or shorter than its header says, or the dtype is not in `DTYPES`.
        """
        if self.dtype not in DTYPES:
            raise CheckpointError(self.file, [f"{self.name}: expected {', '.join(DTYPES)}, got {self.dtype}"])
        try:
            with open(self.file, "rb") as file:
                values = np.fromfile(file, np.uint8, self.size, offset=self.start)
        except OSError as error:
            raise CheckpointError(self.file, [f"{self.name}: cannot be read: {error}"]) from error
        if values.size != self.size:
            raise CheckpointError(self.file, [f"{self.name}: expected {self.size} bytes, got {values.size}"])
        return values.view(DTYPES[self.dtype]).reshape(self.shape)


class CheckpointFiles:
    """The tensors of a checkpoint: a directory, with or without an index, or a single file.

    With an index, a file's header is read when one of its tensors is first requested. Without one, all headers are read
    at once, because only they list the names.

    Args:
        path: a directory with `model.safetensors.index.json`, `model.safetensors` or other `.safetensors` files; or an
            index; or a `.safetensors` file.

    Raises:
        CheckpointError: there is no checkpoint at the path, or it is damaged.
        ImportError: safetensors is missing.
    """

    def __init__(self, path: os.PathLike[str] | str) -> None:
        path = Path(path)
        self.path, self.directory = path, path if path.is_dir() else path.parent
        self._headers: dict[Path, dict[str, StoredTensor]] = {}
        index = path / INDEX if path.is_dir() else path if path.suffix == ".json" else None
        self._listed: dict[str, Path] | None = None
        if index is not None and os.path.lexists(index):
            self._listed = _read_index(index)
            self.where = self._listed
            return
        self.where = {}
        for file in _without_index(path):
            for name in self._header(file):
                if name in self.where:
                    raise CheckpointError(path, [f"{name}: both in {self.where[name].name} and in {file.name}"])
                self.where[name] = file

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that hold tensors, including files of the index that do not exist."""
        return tuple(sorted(set(self.where.values())))

    def tensor(self, name: str) -> StoredTensor:
        """Return the location of a tensor named in `where`.

        Raises:
            CheckpointError: its file is missing or damaged, or does not hold the tensors that the index lists.
        """
        return self._header(self.where[name])[name]

    def _header(self, file: Path) -> dict[str, StoredTensor]:
        if file not in self._headers:
            header = read_header(file)
            if self._listed is not None:
                listed = {name for name, where in self._listed.items() if where == file}
                _check_listed(file, set(header), listed)
            self._headers[file] = header
        return self._headers[file]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read the header of a safetensors file: its tensors by name.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
        ImportError: safetensors is missing.
    """
    safetensors = require_safetensors()
    _check_is_file(file)
    try:
        with safetensors.safe_open(os.fspath(file), framework="np") as opened:
            names = set(opened.keys())
        with open(file, "rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            header = parse_json(raw.read(length))
    except (safetensors.SafetensorError, OSError, ValueError, OverflowError, RecursionError) as error:
        raise CheckpointError(file, [f"expected a safetensors file, {_why(file, error)}"]) from error
    header.pop("__metadata__", None)
    if set(header) != names:  # refuse JSON that safetensors and `parse_json` read differently
        raise CheckpointError(file, ["expected a safetensors header, got one that can be read in two ways"])
    problems = [f"{name}: {problem}" for name, entry in header.items() if (problem := _malformed(entry))]
    if problems:
        raise CheckpointError(file, problems)
    return {name: _stored(name, entry, file, 8 + length) for name, entry in header.items()}


def _malformed(entry: Any) -> str | None:
    """Describe an error in a header entry that safetensors accepts, such as a list in place of an object; else None."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return "expected an object with dtype, shape and data_offsets"
    shape, offsets = entry.get("shape", ()), entry.get("data_offsets")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or any(type(number) is not int or number < 0 for number in numbers):
            return "expected lists of whole numbers as shape and data_offsets"
    # A tensor without elements may have other axes of any length, which NumPy cannot represent.
    if len(shape) > _MOST_AXES or math.prod(max(size, 1) for size in shape) > _MOST_ELEMENTS:
        return f"expected a shape of at most {_MOST_AXES} axes and {_MOST_ELEMENTS:,} elements, got {str(shape)[:200]}"
    return None


def require_safetensors() -> Any:
    """Import and return the module `safetensors`.

    Raises:
        ImportError: it is missing; the message says what to install.
    """
    try:
        import safetensors
    except ImportError as error:
        raise ImportError(missing("safetensors", "checkpoint")) from error
    return safetensors


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object in which no key occurs twice.

    Raises:
        CheckpointError: the file is missing or holds something else.
    """
    _check_is_file(path)
    try:
        value = parse_json(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(path, [f"expected a JSON file, got {_one_line(error)}"]) from error
    return value


def _check_is_file(path: Path) -> None:
    """Check that the path is a regular file: reading a pipe or a device might never end."""
    if not os.path.isfile(path):
        what = "expected a file, got something else" if os.path.exists(path) else "there is no such file"
        raise CheckpointError(path, [what])


def _why(file: Path, error: Exception) -> str:
    """Describe why a file is not a safetensors file and, where known, what to do about it."""
    try:
        with open(file, "rb") as opened:
            beginning, size = opened.read(len(_LFS_POINTER)), os.fstat(opened.fileno()).st_size
    except OSError:
        return f"got {_one_line(error)}"
    if beginning.startswith(_PICKLED):
        fetch = f"{DOWNLOAD.format(ANY_MODEL)} fetches safetensors files"
        return f"got a PyTorch pickle, which is not opened; {fetch}"
    if beginning == _LFS_POINTER:
        return "got a Git LFS pointer: git lfs pull fetches the file"
    return f"got {_one_line(error)}; it has {size:,} bytes, is it cut off?"


def _read_index(path: Path) -> dict[str, Path]:
    listed = read_json(path).get("weight_map")
    if not isinstance(listed, dict):
        got = "none: is this an index?" if listed is None else type(listed).__name__
        raise CheckpointError(path, [f"weight_map: expected an object, got {got}"])
    problems = [f"weight_map: {name!r}: {problem}" for name, file in listed.items() if (problem := _refused(file))]
    if problems:
        raise CheckpointError(path, problems)
    return {name: path.parent / file for name, file in listed.items()}


def _refused(file: object) -> str | None:
    """Describe why a file name in an index is refused; None if it is accepted."""
    if not isinstance(file, str):
        return f"expected the name of a file, got {type(file).__name__}"
    posix, windows = PurePosixPath(file), PureWindowsPath(file)
    plain = file.isprintable() and not posix.is_absolute() and not windows.anchor and ".." not in windows.parts
    if not plain or windows.parts != posix.parts:
        return f"expected a file inside the checkpoint's directory, got {file!r}"
    if posix.suffix != ".safetensors":
        return f"expected a .safetensors file, got {file!r}"
    return None


def _without_index(path: Path) -> list[Path]:
    if not os.path.lexists(path):
        raise CheckpointError(path, [not_here(path)])
    if not path.is_dir():
        return [path]
    if (path / SINGLE).exists():
        return [path / SINGLE]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        pickles = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLES)
        got = f"got none; pickles are not opened: {', '.join(pickles)}" if pickles else "got none"
        fetch = f"{DOWNLOAD.format(ANY_MODEL)} fetches them"
        raise CheckpointError(path, [f"expected {INDEX} or .safetensors files, {got}; {fetch}"])
    return found


def _check_listed(file: Path, held: set[str], listed: set[str]) -> None:
    problems = [f"{name}: the index says it is here, but it is not" for name in sorted(listed - held)]
    problems += [f"{name}: is here, but the index does not say so" for name in sorted(held - listed)]
    if problems:
        raise CheckpointError(file, problems)


def _stored(name: str, entry: dict[str, Any], file: Path, data: int) -> StoredTensor:
    start, stop = entry["data_offsets"]
    tensor = StoredTensor(name, entry["dtype"], tuple(entry["shape"]), file, data + start, stop - start)
    dtype = DTYPES.get(tensor.dtype)
    assert dtype is None or math.prod(tensor.shape) * dtype.itemsize == tensor.size  # safetensors has checked it
    return tensor


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def printable(text: str) -> str:
    """Escape the characters of a text that would start a new line or control a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
