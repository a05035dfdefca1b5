"""`foveal verify` of a whole checkpoint: tensors that are missing, unexpected or of another shape are named."""

import json

import numpy as np
import pytest

from foveal import AttentionConfig
from foveal.checkpoint.find import find_attention
from foveal.checkpoint.release import released_tensors
from foveal.cli.verify_files import whole_checkpoint
from foveal.testing.checkpoints import write_random_checkpoint
from tests.checkpoint.rewriting import rewrite, tensors_of

MODEL = {
    "vocab_size": 40,
    "moe_intermediate_size": 64,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "num_hash_layers": 1,
    "num_nextn_predict_layers": 1,
    "hc_mult": 2,
    "expert_dtype": "fp4",
}
DTYPES = {"F32": np.float32, "BF16": "bfloat16", "I8": np.int8, "I64": np.int64}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("verify") / "fp8"
    write_random_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def whole(checkpoint, tmp_path_factory):
    """A whole small model: what is not attention is zero."""
    specs = released_tensors(MODEL, AttentionConfig.tiny())
    assert specs is not None
    arrays, kinds = tensors_of(checkpoint), {}
    for name, array in arrays.items():
        kinds[specs[name].dtype] = array.dtype
    for name, spec in specs.items():
        if name not in arrays:
            arrays[name] = np.zeros(spec.shape, kinds.get(spec.dtype, DTYPES.get(spec.dtype)))
    path = tmp_path_factory.mktemp("whole") / "model"
    rewrite(checkpoint, path, arrays, shard_bytes=50_000, **MODEL)
    return path


@pytest.mark.parametrize("names", ["released", "with model.", "other scales"])
def test_a_whole_model_has_all_its_tensors(names, whole, tmp_path):
    path = whole
    if names != "released":
        path, arrays = tmp_path / "model", tensors_of(whole)
        change = (lambda name: "model." + name) if names == "with model." else with_other_scale
        rewrite(whole, path, {change(name): array for name, array in arrays.items()}, shard_bytes=50_000)
    found = whole_checkpoint(find_attention(path), partial=False)
    assert found.complaints == ()
    assert found.tensors == found.expected_tensors
    assert found.bytes == found.expected_bytes
    assert found.files == found.files_here > 1


def with_other_scale(name):
    return name.removesuffix(".scale") + ".weight_scale_inv" if name.endswith(".scale") else name


def test_what_differs_in_a_whole_model_is_named(whole, tmp_path):
    arrays = tensors_of(whole)
    del arrays["layers.0.ffn.experts.1.w2.scale"]
    arrays["layers.0.ffn.extra"] = np.zeros(3, np.float32)
    arrays["embed.weight"] = np.zeros((40, 64), np.float32)
    rewrite(whole, tmp_path / "model", arrays)
    assert whole_checkpoint(find_attention(tmp_path / "model"), partial=False).complaints == (
        "1 tensors missing: layers.0.ffn.experts.1.w2.scale",
        "1 tensors unexpected: layers.0.ffn.extra",
        "embed.weight: expected BF16 [40, 64], got F32 [40, 64]",
    )


def test_files_that_are_not_here_are_not_missed_where_they_are_not_needed(whole, tmp_path):
    arrays = tensors_of(whole)
    path = tmp_path / "model"
    rewrite(whole, path, arrays, shard_bytes=50_000)
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {file for name, file in index.items() if name.startswith("layers.1.attn.")}
    spoilt, *others = sorted(set(index.values()) - needed)
    (path / spoilt).write_bytes(b"xx")
    for file in others:
        (path / file).unlink()
    found = whole_checkpoint(find_attention(path, layers=[1]), partial=True)
    assert found.complaints == ()
    assert found.files_here == len(needed) + 1 < found.files
    assert found.bytes == found.expected_bytes
