"""Checkpoints that transformers writes, and ours in transformers."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from foveal import AttentionConfig, CompressedAttention, Dialect, Documents, LayerType, load_attention, save_attention
from foveal.checkpoint.find import find_attention
from foveal.testing.choices import UNDECIDED, selected_entries
from foveal.testing.generators import random_hidden, random_params
from foveal.testing.numerics import assert_close
from foveal.testing.parameters import get_params

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peers = pytest.importorskip("foveal.testing.peer")

FORWARD = nnx.jit(CompressedAttention.__call__)
LENGTH = 67
MODEL = {"vocab_size": 40, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_routed_experts": 4}
# More index heads: with few, many scores are zero, and torch breaks ties as it likes.
CONFIG = AttentionConfig(**{**vars(AttentionConfig.tiny()), "index_n_heads": 16})


@pytest.fixture(scope="module")
def model():
    """A model with all three layer types whose every attention parameter tells."""
    torch.manual_seed(0)
    made = peers.modeling.DeepseekV4ForCausalLM(peers.their_config(CONFIG, **MODEL))
    for index, layer_type in enumerate(CONFIG.layer_types):
        state = peers.peer_state(random_params(CONFIG, layer_type, index))
        made.model.layers[index].self_attn.load_state_dict(state, strict=True)
    return made.eval()


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("transformers")
    model.save_pretrained(path / "one file")
    model.save_pretrained(path / "several", max_shard_size="60KB")
    return path


@pytest.mark.parametrize("files", ["one file", "several"])
def test_what_transformers_saves_loads_and_computes_the_same(files, model, saved):
    found = find_attention(saved / files)
    assert found.config == CONFIG
    assert found.dialect is Dialect.TRANSFORMERS_SAVED
    layers = load_attention(saved / files)
    for index, layer in layers.items():
        peer = peers.Peer(peers.their_config(CONFIG), index, model.model.layers[index].self_attn.state_dict())
        x = clear_hidden(layer)
        with torch.no_grad():
            want = peer(torch.tensor(x)).numpy()
        assert_close(FORWARD(layer, jnp.asarray(x)), want, np.float32)


def clear_hidden(layer):
    """Hidden states whose entries are chosen neither by rounding nor by torch's rule for ties."""
    for seed in range(50):
        x = random_hidden(seed, 1, LENGTH, CONFIG.hidden_size)
        if layer.layer_type is not LayerType.CSA:
            return x
        _, lead = selected_entries(layer, x, Documents.unpacked(1, LENGTH))
        if lead.min() > UNDECIDED:
            return x
    raise AssertionError("no such hidden states")


@pytest.mark.parametrize("dialect", Dialect)
def test_transformers_loads_what_we_save(dialect, model, saved, tmp_path):
    layers = load_attention(saved / "one file")
    save_attention(tmp_path / "ours", layers, dialect=dialect)
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    (tmp_path / "ours" / "config.json").write_text(json.dumps(config | MODEL))
    loaded, info = peers.modeling.DeepseekV4ForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, dtype=torch.float32
    )
    assert info["unexpected_keys"] in ([], set())
    assert not [name for name in info["missing_keys"] if ".self_attn." in name]
    assert peers.their_config(CONFIG).to_dict()["rope_parameters"] == loaded.config.to_dict()["rope_parameters"]
    for index in layers:
        want = model.model.layers[index].self_attn.state_dict()
        got = loaded.model.layers[index].self_attn.state_dict()
        assert got.keys() == want.keys()
        for name in want:
            assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("scales", ["e8m0", "float32"])
def test_fp8_is_what_torch_makes_of_it(scales, written, ragged):
    """Read by safetensors and torch, named by transformers' rules: nothing of ours but the files."""
    path = written(scales=scales, weights="fp8")
    for index, layer in load_attention(path, dtype="float32").items():
        theirs = peers.peer_of_checkpoint(path, ragged, index).module.state_dict()
        ours = peers.peer_state({name: np.asarray(value) for name, value in get_params(layer).items()})
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), name


def test_a_peer_is_the_same_after_it_ran_in_bfloat16(written, ragged):
    peer, x = peers.peer_of_checkpoint(written(), ragged, 2), random_hidden(0, 1, 20, ragged.hidden_size)
    first, _ = peer.with_choice(x, torch.float32)
    rounded, _ = peer.with_choice(x, torch.bfloat16)
    again, _ = peer.with_choice(x, torch.float32)
    np.testing.assert_array_equal(again, first)
    assert 1e-3 < np.abs(rounded - first).max() < 0.2
