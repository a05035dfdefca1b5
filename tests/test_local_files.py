"""What is not on this machine, or says two things, is refused with the same words by all that read configs."""

import json
import pathlib
import re

import pytest

from foveal import AttentionConfig, CheckpointError, load_attention
from foveal.cli.main import main
from foveal.local_files import not_here, parse_json

DOWNLOAD = "there is no such file or directory; models are not downloaded: `hf download {}` does that and says where"


@pytest.mark.parametrize("path", ["deepseek-ai/DeepSeek-V4-Flash", "org/name-1.5", "org/under_score"])
def test_the_name_of_a_model_is_no_path_and_the_command_to_fetch_it_is_said(
    path: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sentence = f"{path}: {DOWNLOAD.format(path)}"
    for given in (path, pathlib.Path(path)):
        with pytest.raises(FileNotFoundError, match=re.escape(sentence)):
            AttentionConfig.from_hf_config(given)
        with pytest.raises(CheckpointError, match=re.escape(sentence)):
            load_attention(given)
    assert main(["verify", path]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    "path",
    ["gone", "/gone", "./gone", "../gone", "a/b/c", "a/config.json", "a/x.safetensors", "a;b/c", "a/b\n", "-a/b"],
)
def test_what_is_no_name_of_a_model_is_not_put_into_a_command(path: str) -> None:
    assert not_here(path) == DOWNLOAD.format("ORG/NAME")


@pytest.mark.parametrize("files", [[], ["pytorch_model.bin"], ["pytorch_model.bin.index.json", "a.pt", "b.pth"]])
def test_a_directory_without_weights_or_config_says_what_fetches_them(
    files: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in files:
        (tmp_path / file).write_bytes(b"PK\3\4")
    with pytest.raises(FileNotFoundError, match=re.escape(f"{tmp_path}/config.json: {DOWNLOAD.format('ORG/NAME')}")):
        AttentionConfig.from_hf_config(tmp_path)
    pickles = [file for file in files if not file.endswith(".json")]
    got = f"got none; pickles are not opened: {', '.join(pickles)}" if pickles else "got none"
    expected = (
        f"expected model.safetensors.index.json or .safetensors files, {got}; `hf download ORG/NAME` fetches them"
    )
    with pytest.raises(CheckpointError) as raised:
        load_attention(tmp_path)
    assert raised.value.problems == (expected,)
    assert main(["verify", str(tmp_path)]) == 1
    assert f"{tmp_path}: {expected}" in capsys.readouterr().out


def test_a_pickle_is_called_one(tmp_path: pathlib.Path) -> None:
    for name, content in (
        ("pytorch_model.bin", b"PK\3\4" + bytes(60)),
        ("old.bin", b"\x80\x02\x8a\nl\xfc" + bytes(60)),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError) as raised:
            load_attention(tmp_path / name, AttentionConfig.tiny())
        assert raised.value.problems == (
            "expected a safetensors file, got a PyTorch pickle, which is not opened; "
            "`hf download ORG/NAME` fetches safetensors files",
        )


REPEATED = {
    "beside": ('"o_groups": 2, "o_groups": 4', "o_groups"),
    "the same value": ('"o_groups": 2, "o_groups": 2', "o_groups"),
    "escaped": (r'"o_groups": 2, "\u006f_groups": 2', "o_groups"),
    "inside": ('"rope_scaling": {"factor": 1, "factor": 16}', "factor"),
    "in a list": ('"x": [{"y": 1, "y": 2}]', "y"),
    "of no use here": ('"vocab_size": 1, "vocab_size": 2', "vocab_size"),
}


@pytest.mark.parametrize(("text", "key"), REPEATED.values(), ids=REPEATED)
def test_a_key_that_a_config_states_twice_is_refused(text: str, key: str, tmp_path: pathlib.Path) -> None:
    config = {name: value for name, value in AttentionConfig.tiny().to_hf_config().items() if f'"{name}"' not in text}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config)[:-1] + ", " + text + "}")
    message = re.escape(f"{file}: expected a JSON file, got the key {key!r} twice")
    for path in (tmp_path, file, str(file)):
        with pytest.raises(ValueError, match=message):
            AttentionConfig.from_hf_config(path)
    for given in (None, AttentionConfig.tiny()):
        (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
        with pytest.raises(CheckpointError, match=message):
            load_attention(tmp_path, given)


def test_json_that_is_no_object_is_said_to_be_none() -> None:
    assert parse_json(b'{"a": [{"b": 1}, {"b": 2}]}') == {"a": [{"b": 1}, {"b": 2}]}
    for text, kind in ((b"[]", "list"), (b"null", "NoneType"), (b"1", "int"), (b'""', "str")):
        with pytest.raises(ValueError, match=f"a JSON {kind} at the top level"):
            parse_json(text)
