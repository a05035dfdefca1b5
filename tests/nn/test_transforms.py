"""What people do to a layer: jit, grad, remat, stack and scan, shard, rename, load, build without memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core.spmd import logical_axis_rules
from jax.ad_checkpoint import print_saved_residuals

from foveal import AttentionConfig, CompressedAttention, Documents, LayerType
from foveal.nn import ACTIVATION_NAMES
from foveal.ops import indexing
from foveal.testing.generators import random_hidden, random_params, random_segment_ids
from foveal.testing.numerics import assert_close, assert_gradients_close
from foveal.testing.parameters import get_params, set_params
from tests.support.programs import array_sizes, equations

CONFIG = AttentionConfig.tiny()
LAYER_TYPES = tuple(LayerType)
SAVED = {
    LayerType.SLIDING: {"q_residual", "q", "kv", "attention"},
    LayerType.CSA: set(ACTIVATION_NAMES),
    LayerType.HCA: {"q_residual", "q", "kv", "entries", "attention"},
}
AXES = {"embed", "q_lora", "heads", "kv", "window", "norm", "index_heads", "o_groups", "group_heads", "o_lora"}


def build(layer_type, params=None, **options):
    layer = CompressedAttention(CONFIG, layer_type=layer_type, rngs=nnx.Rngs(0), **options)
    if params is not None:
        set_params(layer, params)
    return layer


def flat(state):
    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def arrays(state):
    return {name: variable[...] for name, variable in flat(state).items()}


def count(jaxpr, primitive):
    return sum(equation.primitive.name == primitive for equation in equations(jaxpr))


# ---------------------------------------------------------------------------------------------------- jit, grad, remat


@pytest.mark.slow
def test_jit_and_value_and_grad(pure_layer, problem):
    """A module under nnx's transformations against the same layer as a pure function under jax's."""
    params, x, cotangent = problem(LayerType.CSA, 1)
    ids = random_segment_ids(1, *x.shape[:2], max_document=30)
    want, want_gradients = pure_layer(LayerType.CSA).vjp(params, x, ids, cotangent)

    def loss(layer, x, ids, cotangent):
        output = layer(x, ids)
        return jnp.sum(output * cotangent), output

    step = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (value, got), (gradients, x_gradient) = step(build(LayerType.CSA, params), x, ids, cotangent)
    assert_close(got, want, np.float32)
    np.testing.assert_allclose(value, np.sum(want * cotangent), rtol=1e-5, atol=1e-5)
    assert_gradients_close({**arrays(gradients), "x": x_gradient}, want_gradients, np.float32)


@pytest.mark.slow
def test_without_jit(pure_layer, problem):
    """Every value is concrete and every check of values speaks: the answer is the same."""
    params, x, cotangent = problem(LayerType.HCA, 2)
    ids = random_segment_ids(2, *x.shape[:2], max_document=30)
    eager = build(LayerType.HCA, params)(jnp.asarray(x), jnp.asarray(ids))
    assert_close(eager, pure_layer(LayerType.HCA).vjp(params, x, ids, cotangent)[0], np.float32)


@pytest.mark.parametrize("layer_type", LAYER_TYPES)
def test_remat_policies_can_name_every_activation(layer_type, pure_layer, problem, capsys):
    """Each name marks one activation, is what a policy saves, and changes no gradient."""
    params, x, _cotangent = problem(layer_type, 3, length=19)
    apply = pure_layer(layer_type).apply
    names = [
        equation.params["name"]
        for equation in equations(jax.make_jaxpr(apply)(params, x).jaxpr)
        if equation.primitive.name == "name"
    ]
    assert sorted(names) == sorted(SAVED[layer_type])

    policy = jax.checkpoint_policies.save_only_these_names(*ACTIVATION_NAMES)
    print_saved_residuals(jax.checkpoint(apply, policy=policy), params, x)
    lines = [line for line in capsys.readouterr().out.splitlines() if "named" in line]
    # The last one is an input of a linear map: what comes after needs it, what is before it does not.
    assert {name for name in names if any(f"'{name}'" in line for line in lines)} >= SAVED[layer_type] - {"index_keys"}


def test_saved_indices_spare_the_backward_pass_the_indexer(pure_layer, problem, monkeypatch):
    monkeypatch.setattr(indexing, "platform", lambda: "tpu")  # where the choice is one operation, to be counted
    params, x, cotangent = problem(LayerType.CSA, 3, length=29)  # of its own: nothing traced elsewhere serves

    def program(policy):
        def loss(params, x):
            return jnp.sum(jax.checkpoint(pure_layer(LayerType.CSA).apply, policy=policy)(params, x) * cotangent)

        return jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(params, x).jaxpr

    saved = program(jax.checkpoint_policies.save_only_these_names(*ACTIVATION_NAMES))
    nothing = program(jax.checkpoint_policies.nothing_saveable)
    assert (count(saved, "top_k"), count(nothing, "top_k")) == (1, 2)
    assert count(saved, "dot_general") < count(nothing, "dot_general")


@pytest.mark.slow
def test_nnx_remat_changes_no_gradient(pure_layer, problem):
    params, x, cotangent = problem(LayerType.CSA, 4)
    _want, want_gradients = pure_layer(LayerType.CSA).vjp(params, x, None, cotangent)
    policy = jax.checkpoint_policies.save_only_these_names("q", "entries", "indices")
    forward = nnx.remat(lambda layer, x: layer(x), policy=policy)

    def loss(layer, x):
        return jnp.sum(forward(layer, x) * cotangent)

    gradients, x_gradient = nnx.jit(nnx.grad(loss, argnums=(0, 1)))(build(LayerType.CSA, params), x)
    assert_gradients_close({**arrays(gradients), "x": x_gradient}, want_gradients, np.float32)


@pytest.mark.slow
def test_stacked_layers_under_scan_are_a_loop(pure_layer, problem):
    _, x, cotangent = problem(LayerType.CSA, 5)

    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def stack(key):
        return CompressedAttention(CONFIG, layer_type=LayerType.CSA, rngs=nnx.Rngs(key))

    layers = stack(jax.random.split(jax.random.key(0), 3))

    @nnx.jit
    def scanned(layers, x):
        body = nnx.scan(
            lambda layer, h: h + layer(h),
            in_axes=(0, nnx.Carry),
            out_axes=nnx.Carry,
            transform_metadata={nnx.PARTITION_NAME: "layers"},
        )
        return body(layers, x)

    params, expected = get_params(layers), x
    assert not np.array_equal(params["kv_proj.kernel"][0], params["kv_proj.kernel"][1])
    for i in range(3):
        of_layer = {name: p[i] for name, p in params.items()}
        expected = expected + pure_layer(LayerType.CSA).vjp(of_layer, expected, None, cotangent)[0]
    assert_close(scanned(layers, x), expected, np.float32)
    for name, variable in flat(nnx.get_partition_spec(nnx.state(layers, nnx.Param))).items():
        assert variable.get_value()[0] == "layers", name
        assert len(variable.get_value()) == params[name].ndim, name


def test_documents_are_data(problem):
    """One compilation for all segment ids, and for all `Documents` with the same static facts, of one shape."""
    params, x, _ = problem(LayerType.HCA, 6, length=19)
    traces = []

    @nnx.jit
    def forward(layer, x, ids, documents):
        traces.append(ids)
        return layer(x, ids, documents=documents)

    layer = build(LayerType.HCA, params)
    outputs = []
    for seed in range(3):
        ids = random_segment_ids(seed, 2, 19, max_document=12)
        outputs += [forward(layer, x, ids, None), forward(layer, x, None, Documents.from_segment_ids(ids))]
    assert len(traces) == 2
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert not np.array_equal(outputs[0], outputs[2])


# ----------------------------------------------------------------------------------------------------------- sharding


@pytest.mark.parametrize("layer_type", LAYER_TYPES)
def test_every_axis_of_every_parameter_has_a_name(layer_type):
    layer = build(layer_type)
    for name, variable in flat(nnx.get_partition_spec(nnx.state(layer, nnx.Param))).items():
        names = variable.get_value()
        assert len(names) == get_params(layer)[name].ndim, name
        assert set(names) <= AXES, name
        assert len(set(names)) == len(names), name


def test_rules_shard_the_model(pure_layer, problem):
    params, x, cotangent = problem(LayerType.CSA, 7)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rules = dict.fromkeys(AXES) | {"embed": "data"} | dict.fromkeys(["heads", "index_heads", "o_groups"], "model")
    layer = build(LayerType.CSA, params)
    with logical_axis_rules(tuple(rules.items())):
        state = nnx.state(layer, nnx.Param)
        shardings = nnx.get_named_sharding(state, mesh)
    nnx.update(layer, jax.device_put(state, shardings))
    placed = {name: value.sharding.shard_shape(value.shape) for name, value in get_params(layer).items()}
    assert placed["q_b_proj.kernel"] == (32, 64)
    assert placed["o_a_proj.kernel"] == (1, 64, 16)
    assert placed["o_b_proj.kernel"] == (16, 16)
    assert placed["sinks"] == (2,)
    assert placed["compressor.indexer.scorer.weights_proj.kernel"] == (16, 2)
    with jax.set_mesh(mesh):
        got = nnx.jit(lambda layer, x: layer(x))(layer, jnp.asarray(x))
    assert_close(got, pure_layer(LayerType.CSA).vjp(params, x, None, cotangent)[0], np.float32)


def test_can_be_built_on_a_mesh():
    """With rules an abstract layer knows where its parameters go; without, the names of axes are nobody's mesh axes."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        layer = build(LayerType.HCA)
        with logical_axis_rules(tuple((name, "data" if name == "embed" else None) for name in AXES)):
            abstract = nnx.eval_shape(lambda: build(LayerType.HCA))
    assert get_shapes(layer) == get_shapes(abstract)
    kernel = abstract.q_a_proj.kernel.get_value()
    assert kernel.sharding.shard_shape(kernel.shape) == (8, 32)


# ------------------------------------------------------------------------------------------------ names, dtypes, shapes


def get_shapes(layer):
    return {name: variable.shape for name, variable in flat(nnx.state(layer, nnx.Param)).items()}


@pytest.mark.parametrize("layer_type", LAYER_TYPES)
def test_parameters_are_named_as_in_transformers(layer_type):
    pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = modeling.DeepseekV4Config(
        hidden_size=64,
        num_hidden_layers=1,
        layer_types=[str(layer_type)],
        num_attention_heads=4,
        head_dim=32,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=4,
        index_head_dim=32,
    )
    theirs = modeling.DeepseekV4Attention(config, 0).state_dict()
    ours = {name.replace(".kernel", ".weight").replace(".scale", ".weight") for name in get_shapes(build(layer_type))}
    assert ours == set(theirs)


@pytest.mark.parametrize("layer_type", LAYER_TYPES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_only_kernels_take_the_dtype_of_parameters(layer_type, dtype):
    layer = build(layer_type, dtype=jnp.bfloat16, param_dtype=dtype)
    for name, value in get_params(layer).items():
        assert value.dtype == (dtype if name.endswith("kernel") else jnp.float32), name


@pytest.mark.parametrize(
    ("dtype", "param_dtype"), [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.bfloat16)]
)
def test_output_and_gradient_dtypes(dtype, param_dtype):
    """The output has the layer's dtype whatever x has; a gradient has the dtype of what it is the gradient of."""
    for layer_type in LAYER_TYPES:
        layer = nnx.eval_shape(lambda t=layer_type: build(t, dtype=dtype, param_dtype=param_dtype))
        for x_dtype in (jnp.float32, jnp.bfloat16):
            x = jax.ShapeDtypeStruct((1, 9, CONFIG.hidden_size), x_dtype)
            output = nnx.eval_shape(lambda layer, x: layer(x), layer, x)
            assert output.dtype == dtype
            gradients, x_gradient = nnx.eval_shape(
                nnx.grad(lambda layer, x: jnp.sum(layer(x).astype(jnp.float32)), argnums=(0, 1)), layer, x
            )
            assert x_gradient.dtype == x_dtype
            wanted = {name: variable.dtype for name, variable in flat(nnx.state(layer, nnx.Param)).items()}
            assert {name: variable.dtype for name, variable in flat(gradients).items()} == wanted


# Published shapes, [out, in] as in the files (wo_a: groups joined), for Flash and for Pro.
PUBLISHED = {
    "q_a_proj.kernel": ((1024, 4096), (1536, 7168)),
    "q_a_norm.scale": ((1024,), (1536,)),
    "q_b_proj.kernel": ((32768, 1024), (65536, 1536)),
    "kv_proj.kernel": ((512, 4096), (512, 7168)),
    "kv_norm.scale": ((512,), (512,)),
    "o_a_proj.kernel": ((8192, 4096), (16384, 4096)),
    "o_b_proj.kernel": ((4096, 8192), (7168, 16384)),
    "sinks": ((64,), (128,)),
}
PUBLISHED_HCA = {
    "compressor.position_bias": ((128, 512), (128, 512)),
    "compressor.kv_proj.kernel": ((512, 4096), (512, 7168)),
    "compressor.gate_proj.kernel": ((512, 4096), (512, 7168)),
    "compressor.kv_norm.scale": ((512,), (512,)),
}
PUBLISHED_CSA = {
    "compressor.position_bias": ((4, 1024), (4, 1024)),
    "compressor.kv_proj.kernel": ((1024, 4096), (1024, 7168)),
    "compressor.gate_proj.kernel": ((1024, 4096), (1024, 7168)),
    "compressor.kv_norm.scale": ((512,), (512,)),
    "compressor.indexer.q_b_proj.kernel": ((8192, 1024), (8192, 1536)),
    "compressor.indexer.scorer.weights_proj.kernel": ((64, 4096), (64, 7168)),
    "compressor.indexer.position_bias": ((4, 256), (4, 256)),
    "compressor.indexer.kv_proj.kernel": ((256, 4096), (256, 7168)),
    "compressor.indexer.gate_proj.kernel": ((256, 4096), (256, 7168)),
    "compressor.indexer.kv_norm.scale": ((128,), (128,)),
}


@pytest.mark.parametrize("model", [0, 1])
def test_published_models_have_the_published_shapes(model):
    """Built without allocating anything: a layer of these holds up to 1.1 GB."""
    config = (AttentionConfig.deepseek_v4_flash, AttentionConfig.deepseek_v4_pro)[model]()
    published = {LayerType.SLIDING: {}, LayerType.CSA: PUBLISHED_CSA, LayerType.HCA: PUBLISHED_HCA}
    for index in (0, 2, 3):
        layer = nnx.eval_shape(lambda i=index: CompressedAttention(config, i, rngs=nnx.Rngs(0)))
        shapes = {}
        for name, shape in get_shapes(layer).items():
            shapes[name] = shape[::-1] if name.endswith("kernel") else shape
            if name == "o_a_proj.kernel":  # [G, in, out]
                shapes[name] = (shape[0] * shape[2], shape[1])
        wanted = PUBLISHED | published[config.layer_type(index)]
        assert shapes == {name: both[model] for name, both in wanted.items()}


# ------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_index_scores_of_all_heads_never_exist_at_once(packed, with_gradients):
    """Per-head scores of S queries and C entries, 8.4 million here, would be by far the program's largest array."""
    config = dataclasses.replace(CONFIG, index_n_heads=512, index_head_dim=16)
    length, heads = 256, config.index_n_heads
    layer = nnx.eval_shape(lambda: CompressedAttention(config, layer_type=LayerType.CSA, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(layer)
    x = jax.ShapeDtypeStruct((1, length, config.hidden_size), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32) if packed else None

    def forward(state, x, ids):
        return jnp.sum(nnx.merge(graphdef, state)(x, ids))

    program = jax.make_jaxpr(jax.grad(forward, argnums=(0, 1)) if with_gradients else forward)(state, x, ids)
    sizes = array_sizes(program.jaxpr)
    assert max(sizes) < length * (length // config.csa_ratio) * heads
    assert max(sizes) >= length * heads * config.index_head_dim  # the queries, so the program was looked into


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layer_type", LAYER_TYPES)
def test_no_array_of_a_layer_has_rows_times_rows_or_entries(layer_type, packed):
    """Forward and backward, with 16384 rows, which is 33 million and more; the indexer's block has 4 million."""
    length = 16384
    layer = nnx.eval_shape(lambda: build(layer_type))
    graphdef, state = nnx.split(layer)
    x = jax.ShapeDtypeStruct((1, length, CONFIG.hidden_size), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32) if packed else None

    def forward(state, x, ids):
        return jnp.sum(nnx.merge(graphdef, state)(x, ids))

    program = jax.make_jaxpr(jax.grad(forward, argnums=(0, 1)))(state, x, ids)
    sizes = array_sizes(program.jaxpr)
    assert (
        length * CONFIG.num_attention_heads * CONFIG.head_dim <= max(sizes) < length * length // CONFIG.hca_ratio // 4
    )


@pytest.mark.slow
def test_dense_layers_have_derivatives_of_any_kind():
    layer = CompressedAttention(AttentionConfig.tiny(), layer_type=LayerType.CSA, rngs=nnx.Rngs(0))
    set_params(layer, random_params(layer.config, LayerType.CSA, 0))
    graph, params = nnx.split(layer)
    x, along = (random_hidden(seed, 1, 20, layer.config.hidden_size) for seed in (0, 1))

    def loss(step):
        return (nnx.merge(graph, params)(x + step * along, implementation="dense") ** 2).mean()

    (slope, curvature), twice = jax.jit(
        lambda step: (
            jax.jvp(jax.grad(loss), (step,), (1.0,)),
            jax.grad(lambda s: jax.jvp(loss, (s,), (1.0,))[1])(step),
        )
    )(0.0)
    np.testing.assert_allclose(curvature, twice, rtol=1e-4)
    assert abs(curvature) > 1e-3
    assert np.isfinite(slope)
