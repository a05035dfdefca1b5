"""The table of names: complete, and the same as the module's, DeepSeek's and transformers'."""

import dataclasses

import jax
import pytest
from flax import nnx

from foveal import AttentionConfig, CompressedAttention, Dialect, LayerType
from foveal.checkpoint.layers import parameter_shapes
from foveal.checkpoint.names import ROWS, attention_names, dialect_of, full_name, maxtext_path, rows_of, scale_names
from foveal.testing.parameters import get_params

MODELS = {"flash": AttentionConfig.deepseek_v4_flash, "pro": AttentionConfig.deepseek_v4_pro}


@pytest.mark.parametrize("layer_type", LayerType)
def test_every_parameter_has_a_row_and_every_row_a_parameter(layer_type):
    config = AttentionConfig.tiny()
    params = jax.eval_shape(lambda: get_params(CompressedAttention(config, layer_type=layer_type, rngs=nnx.Rngs(0))))
    assert sorted(row.path for row in rows_of(config.layer(layer_type))) == sorted(params)


@pytest.mark.parametrize("layer_type", LayerType)
def test_no_two_rows_have_a_name_in_common(layer_type):
    layer = AttentionConfig.tiny().layer(layer_type)
    rows = rows_of(layer)
    for dialect in Dialect:
        names = [full_name(row, dialect, 7) for row in rows]
        names += [scale for name in names for scale in scale_names(name) if name.endswith(".weight")]
        assert len(set(names)) == len(names)
    assert len({maxtext_path(row, layer) for row in rows}) == len(rows)


@pytest.mark.parametrize("dialect", Dialect)
def test_the_dialect_of_its_own_names(dialect):
    names = attention_names(full_name(row, dialect, layer) for layer in (0, 12) for row in ROWS)
    assert len(names) == 2 * len(ROWS)
    assert {name.layer for name in names} == {0, 12}
    assert dialect_of(names) is dialect


def test_what_is_not_attention_of_a_layer():
    others = ["mtp.0.attn.wq_a.weight", "layers.0.attn_norm.weight", "layers.0.hc_attn_fn", "layers.00.attn.wkv.weight"]
    others += ["embed.weight", "layers.0.ffn.gate.weight", "xlayers.0.attn.wkv.weight", "layers.-1.attn.wkv.weight"]
    assert attention_names(others) == []


# ------------------------------------------------------------------------------------------- beside transformers itself


@pytest.fixture(scope="module")
def peers():
    return pytest.importorskip("foveal.testing.peer")


@pytest.fixture(scope="module")
def renamed():
    """What transformers makes of a name when it loads a checkpoint."""
    pytest.importorskip("torch")
    mapping = pytest.importorskip("transformers.conversion_mapping").get_checkpoint_conversion_mapping("deepseek_v4")
    loading = pytest.importorskip("transformers.core_model_loading")
    rules = [rule for rule in mapping if isinstance(rule, loading.WeightRenaming)]
    return lambda name: loading.apply_renamings(name, rules)


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.path)
def test_transformers_makes_the_same_of_a_name(row, dialect, renamed):
    ours = full_name(row, Dialect.TRANSFORMERS, 3)
    assert renamed(full_name(row, dialect, 3)).removeprefix("model.") == ours.removeprefix("model.")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layer_type", LayerType)
def test_names_and_shapes_of_the_released_models_are_those_of_transformers_modules(model, layer_type, peers):
    torch = pytest.importorskip("torch")
    config = dataclasses.replace(MODELS[model](), layer_types=(layer_type,))
    with torch.device("meta"):  # nothing is allocated
        module = peers.modeling.DeepseekV4Attention(peers.their_config(config), 0)
    theirs = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    shapes = parameter_shapes(config, 0)
    assert {row.transformers: row.file_shape(shapes[row.path]) for row in rows_of(config.layer(0))} == theirs
