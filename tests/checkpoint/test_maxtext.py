"""MaxText's trees: its names, its layouts, its scanned layers, and back."""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, traverse_util
from flax.core import meta

from foveal import AttentionConfig, CheckpointError, LayerType, from_maxtext, to_maxtext
from foveal.checkpoint.maxtext import UNSCANNED
from foveal.testing.parameters import get_params
from tests.checkpoint.rewriting import assert_same, layers_of

FLASH = AttentionConfig.deepseek_v4_flash()
# As many layers as show the pattern: sliding, sliding, CSA, then HCA and CSA in turn.
CONFIG = dataclasses.replace(AttentionConfig.tiny(), num_attention_heads=6, layer_types=FLASH.layer_types[:9])


def first(count: int) -> AttentionConfig:
    return dataclasses.replace(CONFIG, layer_types=CONFIG.layer_types[:count])


@pytest.fixture
def layers():
    return layers_of(CONFIG)


def cast(leaf, dtype) -> jax.Array:
    """By NumPy: JAX would compile a program for each shape."""
    return jnp.asarray(np.asarray(leaf).astype(dtype))


def flat(tree) -> dict[str, Any]:
    return {"-".join(path): value for path, value in traverse_util.flatten_dict(tree).items()}


@pytest.mark.parametrize("scan", [False, True])
def test_there_and_back(scan, layers):
    tree = to_maxtext(layers, scan=scan)
    assert_same(from_maxtext(tree, CONFIG), layers)
    # As it lies in a checkpoint of MaxText, beside what is not attention.
    decoder = tree["params"]["decoder"] | {"decoder_norm": {"scale": jnp.ones(3)}}
    decoder["layers_0"] = decoder["layers_0"] | {"mlp": {"wi": {"kernel": jnp.ones((2, 2))}}}
    outer = {"params": {"params": {"decoder": decoder, "token_embedder": {}}, "Tid2EidVar": {}}, "step": 7}
    assert_same(from_maxtext(outer, CONFIG), layers)


def test_names_and_shapes_of_a_csa_layer(layers):
    prefix, c = "params-decoder-layers_2-self_attention-", "csa_compressor-"
    shapes = {name: value.shape for name, value in flat(to_maxtext({2: layers[2]})).items()}
    assert shapes == {
        prefix + name: shape
        for name, shape in {
            "wq_a-kernel": (64, 32),
            "q_norm-scale": (32,),
            "wq_b-kernel": (32, 6, 32),
            "wkv-kernel": (64, 1, 32),
            "kv_norm-scale": (32,),
            "sinks": (6,),
            "o_a_proj-kernel": (2, 96, 16),
            "o_b_proj-kernel": (32, 64),
            c + "kv_proj-kernel": (64, 64),
            c + "gate_proj-kernel": (64, 64),
            c + "position_bias": (4, 64),
            c + "kv_norm-scale": (32,),
            c + "indexer-q_proj-kernel": (32, 128),
            c + "indexer-weights_proj-kernel": (64, 4),
            c + "indexer-kv_proj-kernel": (64, 64),
            c + "indexer-gate_proj-kernel": (64, 64),
            c + "indexer-position_bias": (4, 64),
            c + "indexer-kv_norm-scale": (32,),
        }.items()
    }


def test_values_of_the_kernels_that_are_reshaped(layers):
    """From DeepSeek's [out, in], as MaxText's own conversion does it: transposed, heads in order."""
    params = get_params(layers[3])
    tree = flat(to_maxtext(layers))
    of = "params-decoder-layers_3-self_attention-"
    for head in range(6):
        want = params["q_b_proj.kernel"][:, head * 32 : (head + 1) * 32]
        np.testing.assert_array_equal(tree[of + "wq_b-kernel"][:, head], want)
    np.testing.assert_array_equal(tree[of + "wkv-kernel"][:, 0], params["kv_proj.kernel"])
    np.testing.assert_array_equal(tree[of + "o_a_proj-kernel"], params["o_a_proj.kernel"])
    np.testing.assert_array_equal(tree[of + "hca_compressor-position_bias"], params["compressor.position_bias"])


def test_scanned_layers_are_stacked_along_axis_1(layers):
    alone, tree = flat(to_maxtext(layers)), flat(to_maxtext(layers, scan=True))
    assert {name.split("-")[2] for name in tree} == {"layers_0", "layers_1", "layers_2", "scanned_blocks"}
    # HCA layers 3, 5, 7 and CSA layers 4, 6, 8.
    for member, indices, name in ((0, (3, 5, 7), "hca_compressor-kv_proj-kernel"), (1, (4, 6, 8), "wq_b-kernel")):
        stacked = tree[f"params-decoder-scanned_blocks-layers_{member}-self_attention-{name}"]
        for place, index in enumerate(indices):
            want = alone[f"params-decoder-layers_{index}-self_attention-{name}"]
            np.testing.assert_array_equal(stacked[:, place], want)


@pytest.mark.parametrize("model", [FLASH, AttentionConfig.deepseek_v4_pro()], ids=["flash", "pro"])
def test_the_released_models_can_be_scanned(model):
    types = model.layer_types[UNSCANNED:]
    assert set(types[::2]) == {LayerType.HCA}
    assert set(types[1::2]) == {LayerType.CSA}
    assert len(types) % 2 == 0


def test_dtypes(layers):
    tree = jax.tree.map(lambda leaf: cast(leaf, jnp.bfloat16), to_maxtext(layers))
    made = from_maxtext(tree, CONFIG, dtype=jnp.bfloat16)
    for name, value in get_params(made[2]).items():
        assert value.dtype == (jnp.bfloat16 if name.endswith("kernel") else jnp.float32)
    assert made[2].dtype == jnp.bfloat16


def test_all_that_is_wrong_is_named(layers):
    tree = flat(to_maxtext(layers))
    prefix = "params-decoder-layers_4-self_attention-"
    del tree[prefix + "sinks"]
    tree[prefix + "wq_a-kernel"] = jnp.ones((32, 64))
    tree[prefix + "csa_compressor-extra"] = jnp.ones(3)
    tree["params-decoder-layers_9-self_attention-sinks"] = jnp.ones(6)
    nested = traverse_util.unflatten_dict({tuple(name.split("-")): value for name, value in tree.items()})
    with pytest.raises(CheckpointError) as caught:
        from_maxtext(nested, CONFIG)
    assert sorted(caught.value.problems) == [
        prefix + "csa_compressor-extra: unexpected",
        prefix + "sinks: missing",
        prefix + "wq_a-kernel: expected shape [64, 32], got [32, 64]",
        "params-decoder-layers_9-self_attention-sinks: unexpected",
    ]


@pytest.mark.parametrize(
    ("make", "got"),
    [
        *((functools.partial(cast, dtype=dtype), dtype) for dtype in ("int8", "complex64", "float8_e4m3fn")),
        (lambda leaf: np.asarray(leaf).tolist(), "list"),
        (lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), "ShapeDtypeStruct"),
        (lambda leaf: ..., "ellipsis"),  # Orbax's placeholder
        (lambda leaf: np.array(None), "object"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_leaves_that_are_no_arrays_of_floats(make, got, layers):
    with pytest.raises(CheckpointError) as caught:
        from_maxtext(jax.tree.map(make, to_maxtext({0: layers[0]})), first(1))
    assert len(caught.value.problems) == 8
    assert all(problem.endswith(f": expected an array of floats, got {got}") for problem in caught.value.problems)


def test_a_leaf_that_is_none_is_missing_and_leaves_nothing_at_its_initial_value(layers):
    for scan in (False, True):
        tree = to_maxtext(layers if scan else {0: layers[0]}, scan=scan)
        with pytest.raises(CheckpointError) as caught:
            from_maxtext(jax.tree.map(lambda leaf: None, tree), CONFIG if scan else first(1))
        assert set(caught.value.problems) == {f"{name}: missing" for name in flat(tree)}


def test_trees_as_flax_holds_them():
    """Boxed with their axes, as Linen makes them; as a state of NNX; in mappings that are no dicts; of NumPy arrays."""
    few = layers_of(first(4))
    tree = to_maxtext(few)
    boxed = jax.tree.map(lambda leaf: meta.Partitioned(leaf, (None,) * leaf.ndim), tree)
    as_state = {"params": nnx.State(jax.tree.map(nnx.Param, tree["params"]))}
    frozen = {"params": types.MappingProxyType({"decoder": types.MappingProxyType(tree["params"]["decoder"])})}
    for held in (boxed, as_state, frozen, jax.tree.map(np.asarray, tree)):
        assert_same(from_maxtext(held, first(4)), few)


def test_a_stack_of_the_wrong_height(layers):
    tree = to_maxtext(layers, scan=True)
    message = r"scanned_blocks-layers_0-.*sinks: expected shape \[6, 2\], got \[6, 3\]"
    with pytest.raises(CheckpointError, match=message):
        from_maxtext(tree, first(7))


def test_bad_arguments(layers, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    with pytest.raises(ValueError, match=r"layers: expected all 9 layers, to be scanned over, got \[0, 1\]"):
        to_maxtext({0: layers[0], 1: layers[1]}, scan=True)
    with pytest.raises(ValueError, match="layers: expected two alternating types from layer 3 on"):
        from_maxtext(to_maxtext(layers, scan=True), first(8))
    none: Any = None
    with pytest.raises(ValueError, match="config: expected an AttentionConfig, got NoneType"):
        from_maxtext(to_maxtext(layers), none)
    with pytest.raises(ValueError, match=r"param_dtype: expected one of bfloat16, .*, got int8"):
        from_maxtext(to_maxtext(layers), CONFIG, param_dtype=jnp.int8)
    wrong: tuple[Any, ...] = ({}, {"params": {"encoder": {}}}, [1])
    for given in wrong:
        with pytest.raises(ValueError, match=r'params: expected a tree with \["params"\]\["decoder"\], got'):
            from_maxtext(given, CONFIG)
