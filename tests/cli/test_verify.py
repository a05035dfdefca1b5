"""`foveal verify`: what agrees passes, what does not is named, and nothing wrong passes."""

import dataclasses
import json
import sys

import numpy as np
import pytest

from foveal import AttentionConfig, RopeConfig, YarnConfig
from foveal.checkpoint.load import load_layer
from foveal.checkpoint.names import ROWS
from foveal.cli import verify
from foveal.cli.main import main
from foveal.cli.verify_files import config_complaints
from foveal.testing.checkpoints import write_random_checkpoint
from foveal.testing.parameters import get_params, set_params
from tests.checkpoint.rewriting import rewrite, tensors_of

TINY = AttentionConfig.tiny()
YARN = RopeConfig(10_000.0, YarnConfig(4.0, 64, 32.0, 1.0))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("verify") / "fp8"
    write_random_checkpoint(path)
    return path


@pytest.fixture
def verified(rows):
    """Verifies a checkpoint and returns the lines of JSON: of layers by index and the last one, of the checkpoint."""

    def verified(*arguments: object, code: int = 0) -> tuple[dict[int, dict], dict]:
        *layers, last = rows("verify", *arguments, code=code)
        return {line["layer"]: line for line in layers}, last

    return verified


@pytest.mark.slow
def test_random_weights_agree(run):
    printed = run("verify --random --preset tiny")
    assert "random weights, tiny: deepseek names" in printed
    assert "layers: 1 sliding, 1 CSA, 1 HCA" in printed
    # 13 + 24 + 17 tensors, as in a released model.
    assert "attention of 3 layers: 54 tensors" in printed
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]
    weights, compared = rows[:3], rows[3:]
    assert [row[:5] for row in weights] == [
        ["0", "sliding", "13", "released", "yes"],
        ["1", "CSA", "24", "released", "yes"],
        ["2", "HCA", "17", "released", "yes"],
    ]
    assert [(row[0], row[1], row[5]) for row in compared] == [
        (str(layer), dtype, "yes") for layer in range(3) for dtype in ("float32", "bfloat16")
    ]
    assert printed.splitlines()[-1] == "agreement"


def test_an_fp8_checkpoint_agrees_with_transformers(checkpoint, verified):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    layers, last = verified(checkpoint, "--layer", 1)
    assert last["compared_with"] == f"transformers {transformers.__version__}"
    assert last["complaints"] == []
    assert last["checkpoint"]["tensors"] == 54
    ((index, line),) = layers.items()
    assert (index, line["layer_type"]) == (1, "compressed_sparse_attention")
    assert line["statistics"]["tensors"] == 24
    assert line["statistics"]["as_released"] is True
    low, high = line["statistics"]["sinks"]
    assert low < 0 < high
    wide, narrow = line["comparisons"]["float32"], line["comparisons"]["bfloat16"]
    assert wide["worst"] < 2e-5 < narrow["worst"]
    # Of 20 entries 4 are selected, so there was something to choose.
    assert 0.9 < narrow["same_entries"] <= 1
    assert 0.9 < wide["same_entries"] <= 1


def test_without_transformers_the_reference_is_compared_with(checkpoint, verified, monkeypatch):
    monkeypatch.setitem(sys.modules, "foveal.testing.peer", None)
    layers, last = verified(checkpoint, "--layer", 1)
    assert last["compared_with"].startswith("foveal.testing.reference (without transformers: ")
    assert last["complaints"] == []
    assert layers[1]["comparisons"]["float32"]["worst"] < 2e-5
    assert layers[1]["comparisons"]["bfloat16"]["same_entries"] is None  # nobody else has said what it selects


@pytest.mark.parametrize(
    ("layer", "one", "other", "complaint"),
    [
        (2, "compressor.kv_proj.kernel", "compressor.gate_proj.kernel", "layer 2: float32: output: "),
        (1, "compressor.indexer.kv_proj.kernel", "compressor.indexer.gate_proj.kernel", "selects other entries for"),
    ],
    ids=["compressor", "indexer"],
)
def test_weights_in_the_wrong_places_do_not_agree(layer, one, other, complaint, checkpoint, verified, monkeypatch):
    pytest.importorskip("torch")
    rows = {row.path: row for row in ROWS}
    swapped = {rows[one]: other, rows[other]: one}
    wrong = [dataclasses.replace(row, path=swapped.get(row, row.path)) for row in ROWS]
    monkeypatch.setattr("foveal.checkpoint.find.rows_of", lambda kind: tuple(row for row in wrong if row.is_in(kind)))
    _, last = verified(checkpoint, "--layer", layer, code=1)
    assert any(complaint in line for line in last["complaints"])


def test_an_indexer_that_is_wrong_in_bfloat16_alone_does_not_agree(checkpoint, verified, monkeypatch):
    def load(found, layer, **options):
        module = load_layer(found, layer, **options)
        if options["dtype"] == "bfloat16":
            name = "compressor.indexer.q_b_proj.kernel"
            set_params(module, get_params(module) | {name: -get_params(module)[name]})
        return module

    monkeypatch.setattr("foveal.checkpoint.load.load_layer", load)
    _, last = verified(checkpoint, "--layer", 1, code=1)
    assert any("layer 1: bfloat16: selected entries" in line for line in last["complaints"])
    assert not any("float32" in line for line in last["complaints"])


def test_numbers_that_are_not_finite_are_named(checkpoint, verified, tmp_path):
    arrays = tensors_of(checkpoint)
    arrays["layers.0.attn.attn_sink"] = np.array([1, np.nan, 0, np.inf], np.float32)
    rewrite(checkpoint, tmp_path / "broken", arrays)
    layers, last = verified(tmp_path / "broken", "--layer", 0, code=1)
    assert last["complaints"] == [
        "layer 0: sinks is not finite",
        "layer 0: float32: outputs are not finite",
        "layer 0: bfloat16: outputs are not finite",
    ]
    assert layers[0]["statistics"]["not_finite"] == ["sinks"]
    assert layers[0]["statistics"]["sinks"] == ["nan", "nan"]


def test_a_file_of_zeros_does_not_agree(checkpoint, verified, tmp_path):
    """As one has that was allocated, and whose download failed."""
    rewrite(checkpoint, tmp_path / "zero", {name: np.zeros_like(a) for name, a in tensors_of(checkpoint).items()})
    layers, last = verified(tmp_path / "zero", "--layer", 1, code=1)
    assert {"layer 1: q_a_proj.kernel is zero", "layer 1: compressor.kv_norm.scale is zero"} <= set(last["complaints"])
    assert any(
        "only rounding decides what the indexer selects, for every query that" in line for line in last["complaints"]
    )
    assert "sinks" not in layers[1]["statistics"]["zero"]  # that they may be


def test_what_transformers_does_not_take_is_said(checkpoint, verified, monkeypatch):
    peer = pytest.importorskip("foveal.testing.peer")

    def refuse(*args, **others):
        raise RuntimeError("of another\nkind")

    monkeypatch.setattr(peer, "peer_of_checkpoint", refuse)
    _, last = verified(checkpoint, "--layer", 0, code=1)
    assert last["complaints"] == ["layer 0: transformers failed: RuntimeError: of another kind"]


@pytest.mark.parametrize(
    ("layer", "change"),
    [
        pytest.param(0, {"rope": YARN}, id="YaRN in the main table", marks=pytest.mark.slow),
        # With one index head, half of the queries have nothing but zeros to choose from, and torch chooses as it likes.
        pytest.param(1, {"index_n_heads": 1}, id="equal scores"),
    ],
)
def test_what_is_seldom_is_no_disagreement(layer, change, verified, tmp_path):
    write_random_checkpoint(tmp_path / "seldom", dataclasses.replace(TINY, **change), layers=[layer])
    _, last = verified(tmp_path / "seldom", "--layer", layer)
    assert last["complaints"] == []


def test_a_config_in_the_spelling_of_deepseeks_inference_code(verified, tmp_path):
    """transformers does not read it, and would take its own defaults instead."""
    write_random_checkpoint(tmp_path / "made", TINY, layers=[0])
    same = ["head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "index_n_heads", "index_head_dim", "index_topk"]
    names = {"hidden_size": "dim", "num_attention_heads": "n_heads", "qk_rope_head_dim": "rope_head_dim"}
    names |= {"sliding_window": "window_size", "rms_norm_eps": "norm_eps"}
    names |= {"num_layers": "n_layers", "csa_ratio": "compress_rate_csa", "hca_ratio": "compress_rate_hca"}
    config = {name: getattr(TINY, field) for field, name in (names | dict(zip(same, same, strict=True))).items()}
    config |= {"compress_ratios": [0, 4, 8], "rope_theta": 10_000.0, "compress_rope_theta": 160_000.0}
    config |= {"rope_factor": 16, "original_seq_len": 64, "beta_fast": 32, "beta_slow": 1}
    (tmp_path / "made" / "config.json").write_text(json.dumps(config))
    _, last = verified(tmp_path / "made", "--layer", 0)
    assert last["complaints"] == []


def test_a_layer_that_cannot_be_loaded_is_a_complaint_and_the_others_are_looked_at(checkpoint, verified, run, tmp_path):
    arrays = tensors_of(checkpoint)
    scale = arrays["layers.0.attn.wq_a.scale"].copy()
    scale.view(np.uint8)[:] = 254  # 2^127
    rewrite(checkpoint, tmp_path / "large", arrays | {"layers.0.attn.wq_a.scale": scale})
    layers, last = verified(tmp_path / "large", "--layer", 0, 2, code=1)
    (complaint,) = last["complaints"]
    assert complaint.startswith("layer 0: ")
    assert "layers.0.attn.wq_a.weight: has numbers too large for float32" in complaint
    assert layers[0]["statistics"] is None
    assert layers[2]["comparisons"]["float32"]["worst"] < 2e-5
    run("verify", tmp_path / "large", "--layer", 0, code=1)  # the tables are printed too


@pytest.fixture
def sliding(tmp_path):
    """A checkpoint of one layer that is quickly run."""
    write_random_checkpoint(tmp_path / "sliding", dataclasses.replace(TINY, layer_types=TINY.layer_types[:1]))
    return tmp_path / "sliding"


def test_numbers_of_fp8_that_are_none_or_that_a_dtype_does_not_hold_are_named(sliding, verified, tmp_path):
    arrays, name = tensors_of(sliding), "layers.0.attn.wkv"
    for array, byte in ((arrays[name + ".weight"], 0x01), (arrays[name + ".scale"], 2)):
        array.view(np.uint8)[:] = byte
    rewrite(sliding, tmp_path / "small", arrays)
    layers, last = verified(tmp_path / "small", code=1)
    small = f"{name}.weight: has numbers too small for bfloat16: 4.59177e-41 at [0, 0]"
    assert f"layer 0: {tmp_path}/small: {small}" in last["complaints"]
    assert layers[0]["statistics"]["zero"] == []  # in float32, which XLA computes with as if they were
    arrays[name + ".scale"].view(np.uint8)[:] = 255
    rewrite(sliding, tmp_path / "none", arrays)
    _, last = verified(tmp_path / "none", code=1)
    assert last["complaints"] == [f"layer 0: {tmp_path}/none: {name}.scale: expected numbers, got nan at [0, 0]"]


def test_a_file_that_the_index_names_is_missed(sliding, verified):
    index = sliding / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"]["embed.weight"] = "gone.safetensors"
    index.write_text(json.dumps(listed))
    layers, last = verified(sliding, code=1)
    assert last["complaints"] == [f"{sliding}/gone.safetensors: there is no such file"]
    assert layers[0]["comparisons"]["float32"]["worst"] < 2e-5
    # Whoever asks for layers need not have the rest, nor have it whole.
    assert verified(sliding, "--layer", 0)[1]["complaints"] == []
    (sliding / "gone.safetensors").write_bytes(b"xx")
    assert verified(sliding, "--layer", 0)[1]["complaints"] == []
    _, last = verified(sliding, code=1)
    assert "gone.safetensors: expected a safetensors file" in last["complaints"][0]


def test_a_config_that_is_not_the_releases_does_not_agree(sliding, run, monkeypatch):
    monkeypatch.setattr("foveal.cli.verify_files.config_complaints", lambda config: ("config: another\x1b[2Kone\n",))
    # And nothing that a file says can steer the terminal or look like the last line.
    assert run("verify", sliding, code=1).splitlines()[-1] == "config: another\\x1b[2Kone\\n"


@pytest.mark.parametrize("model", ["deepseek_v4_flash", "deepseek_v4_pro"])
def test_a_config_that_is_nearly_a_released_models(model):
    config = getattr(AttentionConfig, model)()
    assert config_complaints(config) == ()
    assert config_complaints(dataclasses.replace(config, initializer_range=0.1)) == ()
    near = dataclasses.replace(config, index_topk=100, rope=RopeConfig(500.0))
    name, top_k = ("Flash", 512) if "flash" in model else ("Pro", 1024)
    assert config_complaints(near) == (
        f"config: index_topk is 100, which in DeepSeek-V4-{name} is {top_k}",
        f"config: rope is {RopeConfig(500.0)}, which in DeepSeek-V4-{name} is {RopeConfig(10_000.0)}",
    )
    assert config_complaints(TINY) == ()


def test_each_layer_is_a_line_as_soon_as_it_was_looked_at(checkpoint, capsys, monkeypatch):
    """Without a terminal, where there is no bar: of a large model it takes minutes until the tables come."""
    seen = []

    def look_at(found, layer, *_):
        seen.append(capsys.readouterr().out)
        failures = ("broken",) if layer == 1 else ()
        return verify.VerifiedLayer(layer, found.config.layer_type(layer), failures)

    monkeypatch.setattr(verify, "_look_at", look_at)
    assert main(["verify", str(checkpoint)]) == 1
    assert [text.splitlines()[-1] for text in seen[1:]] == ["layer 0, sliding: agrees", "layer 1, CSA: disagrees"]
    assert capsys.readouterr().out.startswith("layer 2, HCA: agrees\n")
    seen.clear()
    assert main(["verify", str(checkpoint), "--json"]) == 1
    assert [json.loads(text)["layer"] for text in seen[1:]] == [0, 1]


def test_no_checkpoint_at_all(run, tmp_path):
    (tmp_path / "config.json").mkdir()
    assert "or .safetensors files, got none" in run("verify", tmp_path, code=1)
    assert "expected a file, got something" in run("verify /dev/null", code=1)


def test_every_wrong_tensor_is_named(checkpoint, verified, run, tmp_path):
    arrays = tensors_of(checkpoint)
    del arrays["layers.1.attn.wkv.weight"]
    arrays["layers.2.attn.q_norm.weight"] = arrays["layers.2.attn.q_norm.weight"][1:]
    rewrite(checkpoint, tmp_path / "broken", arrays)
    printed = run("verify", tmp_path / "broken", code=1)
    assert f"{tmp_path}/broken: layers.1.attn.wkv.weight: missing\n" in printed
    assert f"{tmp_path}/broken: layers.2.attn.q_norm.weight: expected shape [32], got [31]\n" in printed
    _, last = verified(tmp_path / "broken", code=1)
    assert len(last["complaints"]) == 2


def test_windows_too_long_to_be_run(capsys, tmp_path):
    write_random_checkpoint(tmp_path / "long", dataclasses.replace(TINY, hca_ratio=10_000), layers=[0])
    assert main(["verify", str(tmp_path / "long")]) == 2
    assert "the config's layers have no entries before 20000 tokens" in capsys.readouterr().err
