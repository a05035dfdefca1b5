"""Indexes as an enemy would write them, and directories without one: an error by name, or the directory's tensors."""

import contextlib
import json
import pathlib
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foveal import CheckpointError
from foveal.checkpoint.files import INDEX, CheckpointFiles
from tests.checkpoint.hostile import CONTENT, JSON, Entries, contents, edited, packed, recorded_opens

# --- Indexes ---------------------------------------------------------------------------------------------------------

SHARDS: dict[str, Entries] = {
    "a.safetensors": {"x": ("F32", [1], b"1234"), "y": ("BF16", [2], b"5678")},
    "sub/b.safetensors": {"z": ("F8_E4M3", [3], b"abc")},
}
WEIGHT_MAP = {name: file for file, entries in SHARDS.items() for name in entries}
RIGHT = {name: data for entries in SHARDS.values() for name, (_, _, data) in entries.items()}


class Place(NamedTuple):
    """A checkpoint, and next to it a file that must never be opened though it holds what the index lists."""

    directory: pathlib.Path
    canary: pathlib.Path

    def write_index(self, index: object) -> None:
        (self.directory / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))


def placed(root: pathlib.Path) -> Place:
    place = Place(root / "checkpoint", root / "canary.safetensors")
    for file, entries in SHARDS.items():
        (place.directory / file).parent.mkdir(parents=True, exist_ok=True)
        (place.directory / file).write_bytes(packed(entries))
    place.canary.write_bytes(packed({name: ("F32", [1], b"evil") for name in WEIGHT_MAP}))
    place.write_index({"weight_map": WEIGHT_MAP})
    return place


@pytest.fixture
def place(tmp_path: pathlib.Path) -> Place:
    return placed(tmp_path)


def test_an_index_is_followed_into_its_directory_and_below(place: Place) -> None:
    for path in (place.directory, place.directory / INDEX):
        files = CheckpointFiles(path)
        assert contents(files) == RIGHT
        assert files.files == tuple(sorted(place.directory / file for file in SHARDS))


def test_links_are_followed_as_the_hugging_face_cache_is_made_of_them(place: Place) -> None:
    blob = place.canary.with_name("blob")
    (place.directory / "a.safetensors").rename(blob)
    (place.directory / "a.safetensors").symlink_to(blob)
    assert contents(CheckpointFiles(place.directory))["x"] == b"1234"


def test_nothing_is_opened_before_it_is_asked_for(place: Place) -> None:
    with recorded_opens() as opened:
        files = CheckpointFiles(place.directory)
        assert opened == [place.directory / INDEX]
        files.tensor("z")
        assert set(opened[1:]) == {place.directory / "sub/b.safetensors"}


# {} is the root of all, in absolute names.
REFUSED_FILES: dict[str, object] = {
    "parent": "../canary.safetensors",
    "parent, by way of a folder": "sub/../../canary.safetensors",
    "parent, by way of the directory itself": "./../canary.safetensors",
    "parent and back": "../checkpoint/a.safetensors",
    "parent of a folder": "sub/../a.safetensors",
    "absolute": "{}/canary.safetensors",
    "absolute, inside": "{}/checkpoint/a.safetensors",
    "two slashes": "/{}/canary.safetensors",
    "backslashes": "..\\canary.safetensors",
    "backslashes inside": "sub\\b.safetensors",
    "drive": "C:\\canary.safetensors",
    "drive, relative": "C:canary.safetensors",
    "drive, with slashes": "C:/canary.safetensors",
    "share": "\\\\host\\share\\canary.safetensors",
    "home": "~/../canary.safetensors",
    "no name": "",
    "the directory": ".",
    "its parent": "..",
    "blank": " ",
    "only the ending": ".safetensors",
    "a NUL": "a.safetensors\0.safetensors",
    "a NUL at the end": "a.safetensors\0",
    "a line break": "a\n.safetensors",
    "half a surrogate pair": "\ud800.safetensors",
    "turned writing": "a\u202e.safetensors",
    "null": None,
    "a number": 3,
    "a bool": True,
    "a list": ["a.safetensors"],
    "an object": {"file": "a.safetensors"},
    "a PyTorch pickle": "pytorch_model.bin",
    "another": "model.pt",
    "and another": "model.pth",
    "plain pickle": "model.pkl",
    "no ending": "a",
    "capitals": "a.SAFETENSORS",
    "a pickle under a folder of that ending": "a.safetensors/x.bin",
    "a pickle after it": "a.safetensors.bin",
    "the index": INDEX,
}


@pytest.mark.parametrize("file", REFUSED_FILES.values(), ids=REFUSED_FILES)
def test_an_index_that_names_anything_but_a_safetensors_file_inside_is_refused(file: object, place: Place) -> None:
    if isinstance(file, str):
        file = file.replace("{}", str(place.canary.parent))
    place.write_index({"weight_map": {**WEIGHT_MAP, "evil": file}})
    with recorded_opens() as opened, pytest.raises(CheckpointError) as raised:
        CheckpointFiles(place.directory)
    assert opened == [place.directory / INDEX]
    (problem,) = raised.value.problems
    assert problem.startswith("weight_map: 'evil': expected ")
    assert str(place.directory / INDEX) in str(raised.value)


def test_all_refused_entries_of_an_index_are_named_together(place: Place) -> None:
    place.write_index({"weight_map": {"x": "../x.safetensors", "y": "a.safetensors", "z": 3, "w": "w.bin"}})
    with pytest.raises(CheckpointError) as raised:
        CheckpointFiles(place.directory)
    assert [problem.split(": ")[1] for problem in raised.value.problems] == ["'x'", "'z'", "'w'"]


BAD_INDEXES: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "expected a JSON file"),
    "not JSON": ("{weight_map: {}}", "expected a JSON file"),
    "cut off": (json.dumps({"weight_map": WEIGHT_MAP})[:-3], "expected a JSON file"),
    "not UTF-8": (b'{"weight_map": {"\xff": "a.safetensors"}}', "expected a JSON file"),
    "binary": (CONTENT, "expected a JSON file"),
    "a list": ("[]", "a JSON list at the top level"),
    "null": ("null", "a JSON NoneType at the top level"),
    "no weight_map": ('{"metadata": {}}', "weight_map: expected an object, got none: is this an index"),
    "weight_map a list": ('{"weight_map": ["a.safetensors"]}', "weight_map: expected an object, got list"),
    "weight_map a string": ('{"weight_map": "a.safetensors"}', "weight_map: expected an object, got str"),
    "weight_map twice": ('{"weight_map": {}, "weight_map": {"x": "a.safetensors"}}', "the key 'weight_map' twice"),
    "a tensor twice": ('{"weight_map": {"x": "a.safetensors", "x": "sub/b.safetensors"}}', "the key 'x' twice"),
    "a tensor twice, once escaped": ('{"weight_map": {"x": "a.safetensors", "\\u0078": "b"}}', "the key 'x' twice"),
    "deep": ("[" * 100_000, "expected a JSON file"),
    "deep objects": ('{"weight_map":' * 100_000, "expected a JSON file"),
    "a long number": ('{"weight_map": {}, "metadata": ' + "9" * 10_000 + "}", "expected a JSON file"),
}


@pytest.mark.parametrize(("text", "message"), BAD_INDEXES.values(), ids=BAD_INDEXES)
def test_a_damaged_index_is_refused_by_name(text: str | bytes, message: str, place: Place) -> None:
    (place.directory / INDEX).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=message) as raised:
        CheckpointFiles(place.directory)
    assert str(raised.value).startswith(f"{place.directory / INDEX}: ")


def test_an_index_that_is_a_folder_is_refused(place: Place) -> None:
    (place.directory / INDEX).unlink()
    (place.directory / INDEX).mkdir()
    with pytest.raises(CheckpointError, match=INDEX):
        CheckpointFiles(place.directory)


DISAGREEING: dict[str, tuple[dict[str, str], str, str]] = {
    "file missing": (WEIGHT_MAP | {"x": "c.safetensors"}, "x", r"c\.safetensors: there is no such file"),
    "name too long": (WEIGHT_MAP | {"x": "c" * 300 + ".safetensors"}, "x", r"ccc\.safetensors: "),
    "folder missing": (WEIGHT_MAP | {"x": "no/c.safetensors"}, "x", r"c\.safetensors: there is no such file"),
    "tensor missing": (WEIGHT_MAP | {"w": "a.safetensors"}, "x", r"a\.safetensors: w: the index says it is here"),
    "tensor of the other file": (WEIGHT_MAP | {"z": "a.safetensors"}, "z", r"a\.safetensors: z: the index says"),
    "tensor not listed": ({"x": "a.safetensors"}, "x", r"a\.safetensors: y: is here, but the index does not say so"),
    "a file as a folder": (WEIGHT_MAP | {"x": "a.safetensors/c.safetensors"}, "x", r"a\.safetensors/c\.safetensors: "),
}


@pytest.mark.parametrize(("weight_map", "name", "message"), DISAGREEING.values(), ids=DISAGREEING)
def test_an_index_at_odds_with_its_files_is_refused(weight_map: Any, name: str, message: str, place: Place) -> None:
    place.write_index({"weight_map": weight_map})
    files = CheckpointFiles(place.directory)
    for _ in range(2):  # asked again, it has not been forgotten
        with pytest.raises(CheckpointError, match=message):
            files.tensor(name)


def test_all_that_an_index_gets_wrong_of_a_file_is_named(place: Place) -> None:
    more = {f"more{i}": "a.safetensors" for i in range(60)}
    place.write_index({"weight_map": {"x": "a.safetensors"} | more})
    with pytest.raises(CheckpointError) as raised:
        CheckpointFiles(place.directory).tensor("x")
    assert {problem.split(": ")[0] for problem in raised.value.problems} == {"y", *more}
    assert str(raised.value).splitlines()[-1] == "and 21 more"


INDEX_TEXT = json.dumps({"metadata": {"total_size": 11}, "weight_map": WEIGHT_MAP}).encode()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return placed(tmp_path_factory.mktemp("index"))


def assert_index_refused_or_right(place: Place, text: bytes) -> None:
    """Whatever an index says: of the directory's tensors, or an error; and no other file is touched."""
    (place.directory / INDEX).write_bytes(text)
    with recorded_opens() as opened, contextlib.suppress(CheckpointError):
        files = CheckpointFiles(place.directory)
        for name in files.where:
            with contextlib.suppress(CheckpointError):
                assert files.tensor(name).read().tobytes() == RIGHT[name]
    assert opened[0] == place.directory / INDEX
    assert all(path.is_relative_to(place.directory) for path in opened)


@given(text=edited(INDEX_TEXT))
def test_fuzzed_indexes_are_refused_or_lead_to_the_same_tensors(text: bytes, shared: Place) -> None:
    assert_index_refused_or_right(shared, text)


PARTS = ["..", ".", "", "/", "\\", "sub", "a.safetensors", "b.safetensors", "canary.safetensors", "checkpoint", "\0"]
FILE_NAMES = st.lists(st.sampled_from(PARTS), max_size=4).map("/".join) | st.text(max_size=8) | JSON


@given(
    weight_map=st.dictionaries(st.sampled_from("xyzw") | st.text(max_size=3), FILE_NAMES, max_size=3) | JSON,
    kept=st.booleans(),
)
def test_indexes_of_any_json_lead_to_no_other_file(weight_map: Any, kept: bool, shared: Place) -> None:
    if kept and isinstance(weight_map, dict):
        weight_map = WEIGHT_MAP | weight_map
    assert_index_refused_or_right(shared, json.dumps({"weight_map": weight_map}).encode())


# --- Directories without an index ------------------------------------------------------------------------------------


A, B = packed({"x": ("F32", [1], b"1234")}), packed({"y": ("F32", [1], b"5678")})


def written(directory: pathlib.Path, **files: bytes) -> pathlib.Path:
    for name, content in files.items():
        (directory / f"{name}.safetensors").write_bytes(content)
    return directory


def test_without_an_index_all_files_of_the_directory_are_read(tmp_path: pathlib.Path) -> None:
    written(tmp_path, a=A, b=B)
    assert contents(CheckpointFiles(tmp_path)) == {"x": b"1234", "y": b"5678"}
    assert contents(CheckpointFiles(tmp_path / "b.safetensors")) == {"y": b"5678"}


def test_one_tensor_in_two_files_is_refused_by_all_their_names(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match=r"x: both in a\.safetensors and in b\.safetensors"):
        CheckpointFiles(written(tmp_path, a=A, b=A))


def test_a_damaged_file_among_others_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match=r"b\.safetensors: expected a safetensors file"):
        CheckpointFiles(written(tmp_path, a=A, b=B[:-1]))


@pytest.mark.parametrize("name", ["nothing", "nothing.json", "nothing.safetensors", "nothing/model.safetensors"])
def test_a_path_where_nothing_is_is_refused_by_name(name: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match=f"{name}: there is no such file"):
        CheckpointFiles(tmp_path / name)
