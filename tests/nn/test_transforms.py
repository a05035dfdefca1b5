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
from foveal.testing.parameters import get_params
from tests.nn.layers import AXES, CONFIG, LAYER_TYPES, arrays, build, by_name, every_layer_type, problem, pure_layer
from tests.support.programs import array_sizes, equations

SAVED = {
    LayerType.SLIDING: {"q_residual", "q", "kv", "attention"},
    LayerType.CSA: set(ACTIVATION_NAMES),
    LayerType.HCA: {"q_residual", "q", "kv", "entries", "attention"},
}


def count(jaxpr, primitive):
    return sum(equation.primitive.name == primitive for equation in equations(jaxpr))


# ---------------------------------------------------------------------------------------------------- jit, grad, remat


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_jit_and_value_and_grad(remat):
    """A module under nnx's transformations against the same layer as a pure function under jax's."""
    params, x, cotangent = problem(LayerType.CSA, 1)
    ids = random_segment_ids(1, *x.shape[:2], max_document=30)
    want, want_gradients = pure_layer(LayerType.CSA).vjp(params, x, ids, cotangent)
    policy = jax.checkpoint_policies.save_only_these_names("q", "entries", "indices")

    def forward(layer, x, ids):
        return layer(x, ids)

    def loss(layer, x, ids, cotangent):
        output = (nnx.remat(forward, policy=policy) if remat else forward)(layer, x, ids)
        return jnp.sum(output * cotangent), output

    step = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (value, got), (gradients, x_gradient) = step(build(LayerType.CSA, params), x, ids, cotangent)
    assert_close(got, want, np.float32)
    np.testing.assert_allclose(value, np.sum(want * cotangent), rtol=1e-5, atol=1e-5)
    assert_gradients_close({**arrays(gradients), "x": x_gradient}, want_gradients, np.float32)


@every_layer_type
def test_remat_policies_can_name_every_activation(layer_type, capsys):
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


def test_saved_indices_spare_the_backward_pass_the_indexer(monkeypatch):
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
def test_stacked_layers_under_scan_are_a_loop():
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

    params, expected, ids = get_params(layers), x, np.ones(x.shape[:2], np.int32)
    assert not np.array_equal(params["kv_proj.kernel"][0], params["kv_proj.kernel"][1])
    for i in range(3):
        of_layer = {name: p[i] for name, p in params.items()}
        expected = expected + pure_layer(LayerType.CSA).vjp(of_layer, expected, ids, cotangent)[0]
    assert_close(scanned(layers, x), expected, np.float32)
    for name, variable in by_name(nnx.get_partition_spec(nnx.state(layers, nnx.Param))).items():
        assert variable.get_value()[0] == "layers", name
        assert len(variable.get_value()) == params[name].ndim, name


def test_documents_are_data():
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


@every_layer_type
def test_every_axis_of_every_parameter_has_a_name(layer_type):
    layer = build(layer_type)
    for name, variable in by_name(nnx.get_partition_spec(nnx.state(layer, nnx.Param))).items():
        names = variable.get_value()
        assert len(names) == get_params(layer)[name].ndim, name
        assert set(names) <= AXES, name
        assert len(set(names)) == len(names), name


def test_rules_shard_the_model():
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
    ids = np.ones(x.shape[:2], np.int32)
    assert_close(got, pure_layer(LayerType.CSA).vjp(params, x, ids, cotangent)[0], np.float32)


def test_can_be_built_on_a_mesh():
    """With rules an abstract layer knows where its parameters go; without, the names of axes are nobody's mesh axes."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        layer = build(LayerType.HCA)
        with logical_axis_rules(tuple((name, "data" if name == "embed" else None) for name in AXES)):
            abstract = nnx.eval_shape(lambda: build(LayerType.HCA))
    assert shapes_of(layer) == shapes_of(abstract)
    kernel = abstract.q_a_proj.kernel.get_value()
    assert kernel.sharding.shard_shape(kernel.shape) == (8, 32)


# ------------------------------------------------------------------------------------------------ names, dtypes, shapes


def shapes_of(layer):
    return {name: variable.shape for name, variable in by_name(nnx.state(layer, nnx.Param)).items()}


@every_layer_type
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

    def loss(layer, x):
        output = layer(x)
        return jnp.sum(output.astype(jnp.float32)), output

    for layer_type in LAYER_TYPES:
        layer = nnx.eval_shape(lambda t=layer_type: build(t, dtype=dtype, param_dtype=param_dtype))
        wanted = {name: variable.dtype for name, variable in by_name(nnx.state(layer, nnx.Param)).items()}
        for x_dtype in (jnp.float32, jnp.bfloat16):
            x = jax.ShapeDtypeStruct((1, 9, CONFIG.hidden_size), x_dtype)
            (gradients, x_gradient), output = nnx.eval_shape(
                nnx.grad(loss, argnums=(0, 1), has_aux=True), layer, x
            )  # fmt: skip
            assert (output.dtype, x_gradient.dtype) == (dtype, x_dtype)
            assert {name: variable.dtype for name, variable in by_name(gradients).items()} == wanted


def published_shapes(layer_type, hidden, rank, heads, groups, index):
    """[out, in] as in the files (wo_a: groups joined); `index` heads of 128, all others of 512."""
    shapes = {
        "q_a_proj.kernel": (rank, hidden),
        "q_a_norm.scale": (rank,),
        "q_b_proj.kernel": (512 * heads, rank),
        "kv_proj.kernel": (512, hidden),
        "kv_norm.scale": (512,),
        "o_a_proj.kernel": (1024 * groups, 4096),
        "o_b_proj.kernel": (hidden, 1024 * groups),
        "sinks": (heads,),
    }
    if layer_type is LayerType.CSA:
        shapes["compressor.indexer.q_b_proj.kernel"] = (128 * index, rank)
        shapes["compressor.indexer.scorer.weights_proj.kernel"] = (index, hidden)
    compressors = {LayerType.SLIDING: [], LayerType.CSA: [("", 4, 2, 512), ("indexer.", 4, 2, 128)]}
    for part, ratio, overlap, dim in compressors.get(layer_type, [("", 128, 1, 512)]):
        shapes[f"compressor.{part}position_bias"] = (ratio, overlap * dim)
        shapes[f"compressor.{part}kv_proj.kernel"] = (overlap * dim, hidden)
        shapes[f"compressor.{part}gate_proj.kernel"] = (overlap * dim, hidden)
        shapes[f"compressor.{part}kv_norm.scale"] = (dim,)
    return shapes


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (AttentionConfig.deepseek_v4_flash(), (4096, 1024, 64, 8, 64)),
        (AttentionConfig.deepseek_v4_pro(), (7168, 1536, 128, 16, 64)),
    ],
    ids=["flash", "pro"],
)
def test_published_models_have_the_published_shapes(config, sizes):
    """Built without allocating anything: a layer of these holds up to 1.1 GB."""
    for index in (0, 2, 3):
        layer = nnx.eval_shape(lambda i=index: CompressedAttention(config, i, rngs=nnx.Rngs(0)))
        shapes = {}
        for name, shape in shapes_of(layer).items():
            shapes[name] = shape[::-1] if name.endswith("kernel") else shape
            if name == "o_a_proj.kernel":  # [G, in, out]
                shapes[name] = (shape[0] * shape[2], shape[1])
        assert shapes == published_shapes(config.layer_type(index), *sizes)


# ------------------------------------------------------------------------------------------------------------- memory


def sizes_in_a_layer(config, layer_type, length, *, packed, with_gradients=True):
    """Elements of every array of a layer's program for [1, length, E]."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: build(layer_type, config=config)))
    x = jax.ShapeDtypeStruct((1, length, config.hidden_size), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32) if packed else None

    def forward(state, x, ids):
        return jnp.sum(nnx.merge(graphdef, state)(x, ids))

    program = jax.make_jaxpr(jax.grad(forward, argnums=(0, 1)) if with_gradients else forward)(state, x, ids)
    return array_sizes(program.jaxpr)


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_index_scores_of_all_heads_never_exist_at_once(packed, with_gradients):
    """Per-head scores of S queries and C entries, 8.4 million here, would be by far the program's largest array."""
    config = dataclasses.replace(CONFIG, index_n_heads=512, index_head_dim=16)
    length, heads = 256, config.index_n_heads
    sizes = sizes_in_a_layer(config, LayerType.CSA, length, packed=packed, with_gradients=with_gradients)
    assert max(sizes) < length * (length // config.csa_ratio) * heads
    assert max(sizes) >= length * heads * config.index_head_dim  # the queries, so the program was looked into


@pytest.mark.parametrize("packed", [False, True])
@every_layer_type
def test_no_array_of_a_layer_has_rows_times_rows_or_entries(layer_type, packed):
    """Forward and backward, with 16384 rows, which is 33 million and more; the indexer's block has 4 million."""
    length = 16384
    largest, keys = max(sizes_in_a_layer(CONFIG, layer_type, length, packed=packed)), length * CONFIG.head_dim
    assert CONFIG.num_attention_heads * keys <= largest < length * length // CONFIG.hca_ratio // 4


@pytest.mark.slow
def test_dense_layers_have_derivatives_of_any_kind():
    graph, params = nnx.split(build(LayerType.CSA, random_params(CONFIG, LayerType.CSA, 0)))
    x, along = (random_hidden(seed, 1, 20, CONFIG.hidden_size) for seed in (0, 1))

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
