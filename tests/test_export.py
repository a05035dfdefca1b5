"""Programs of foveal through `jax.export`: written and read again, with a symbolic batch, and for one platform."""

import functools
import os
import pickle
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import foveal
from foveal import CacheStack, Documents, EntryRange, LayerType, Visibility, WindowLayout, exporting
from foveal.aot import tracing_for
from foveal.program import per_row, planned, platform
from foveal.testing.numerics import assert_close
from tests.nn.serving import CAPACITY, CONFIG, LENGTH, served, text
from tests.support.trees import assert_equal_leaves

every_layer_type = pytest.mark.parametrize("layer_type", tuple(LayerType))


@pytest.fixture
def b():
    """A symbolic batch."""
    return export.symbolic_shape("b")[0]


@pytest.fixture
def s():
    """A symbolic length."""
    return export.symbolic_shape("s", constraints=["s >= 512"])[0]


def of(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def placeholders(tree):
    return jax.tree.map(lambda leaf: of(*leaf.shape, dtype=leaf.dtype), tree)


def trees():
    """One of every pytree, with values."""
    documents = Documents.from_segment_ids(np.array([[1, 1, 1, 1, 2, 2, 0, 0]]), alignment=4)
    return {
        "cache": foveal.AttentionCache.init(CONFIG, "csa", batch=2, capacity=9, max_rollback=3),
        "stack": CacheStack.init(CONFIG, batch=2, capacity=9),
        "documents": documents,
        "visibility": Visibility(documents, 3, 4),
        "continuing": Visibility(documents, 3, entries=EntryRange.of_rows(4, 7), history=2),
        "layout": WindowLayout.of(documents, 4),
        "rows": foveal.left_aligned(np.ones((2, 4, 3), np.float32), np.array([1, 4])),
        "table": foveal.rope_table(documents.positions, CONFIG.rope, 8),
        "loss": foveal.IndexerLoss(jnp.float32(3), jnp.float32(2)),
        "recall": foveal.IndexerRecall(jnp.float32(4), jnp.float32(5)),
    }


def test_every_pytree_comes_back():
    made = jax.jit(trees)()  # one program, where each tree by itself would be many
    read = export.deserialize(export.export(jax.jit(lambda trees: trees))(placeholders(made)).serialize())
    assert_equal_leaves(read.call(made), made)


def test_names_and_static_fields_are_kept_as_they_were_first_written():
    """Files hold them: none may change, and a field that comes later has its default."""
    assert exporting.read(Documents, b'{"alignment": 4, "padded": false}') == (4, False)
    assert exporting.read(Documents, b"{}") == (1, True)
    assert exporting.read(Visibility, b'{"sliding_window": 8, "history": 7}') == (8, None, 7)
    entries = exporting.read(Visibility, b'{"sliding_window": 8, "entries": [4, null]}')[1]
    assert entries == EntryRange.of_rows(4)
    assert isinstance(entries, EntryRange)
    with pytest.raises(ValueError, match=r"^foveal.Visibility: expected a sliding_window, got \['history'\]"):
        exporting.read(Visibility, b'{"history": 7}')
    names = "AttentionCache CacheStack CompressorState Documents IndexerLoss IndexerRecall PaddedRows"
    names = {f"foveal.{name}" for name in f"{names} RopeTable Visibility WindowLayout".split()}
    assert {exporting.name_of(cls) for cls in exporting.PYTREES} == names


LOAD = """
import pickle, sys
import jax, numpy as np
from jax import export
import foveal

programs, args = pickle.load(open(sys.argv[1], "rb"))
jax.config.update("jax_numpy_dtype_promotion", "strict")
for name, written in programs.items():
    out, cache = export.deserialize(bytearray(written)).call(*args[name])
    assert isinstance(cache, foveal.AttentionCache), cache
    args[name] = jax.tree.map(np.asarray, (out, cache))
pickle.dump(args, open(sys.argv[2], "wb"))
"""


def test_decoding_comes_back_in_another_process(tmp_path):
    """To the bit what the program gives here, in one that has only imported foveal; and what the direct call gives.

    That one may differ by rounding: to JAX 0.12 a layer's parameters are arguments of it, and constants of an export.
    """
    programs, args, want = {}, {}, {}
    for kind in LayerType:
        layer, x = served(kind), text(3)
        _, cache = layer.append(layer.layer.init_cache(3, CAPACITY, max_rollback=2), [x[0, :9], x[1, :30], x[2, :0]])
        args[kind.value] = jax.tree.map(np.asarray, (cache, x[:, 30:31]))
        decode = jax.jit(layer.layer.decode)
        programs[kind.value] = export.export(decode)(*placeholders(args[kind.value])).serialize()
        want[kind.value] = export.deserialize(bytearray(programs[kind.value])).call(*args[kind.value])
        (out, cache), (direct, direct_cache) = want[kind.value], decode(*args[kind.value])
        assert_close(out, direct, np.float32)
        jax.tree.map(lambda one, other: assert_close(one, other, np.float32), cache, direct_cache)
    source, target = tmp_path / "programs", tmp_path / "results"
    source.write_bytes(pickle.dumps((programs, args)))
    subprocess.run([sys.executable, "-c", LOAD, source, target], check=True, env=os.environ)
    assert_equal_leaves(pickle.loads(target.read_bytes()), jax.tree.map(np.asarray, want))


@every_layer_type
def test_one_program_serves_every_batch(layer_type, b):
    """Forward and decode of a symbolic batch, with a cache made for it, and the forward's gradients."""
    layer, x = served(layer_type), text(5)
    empty = jax.eval_shape(lambda: layer.layer.init_cache(b, CAPACITY, max_rollback=2))
    forward = export.export(jax.jit(layer.layer))(of(b, LENGTH, 64), of(b, LENGTH, dtype=jnp.int32))
    decode = export.export(jax.jit(layer.layer.decode))(empty, of(b, 4, 64))
    forward, decode = export.deserialize(forward.serialize(vjp_order=1)), export.deserialize(decode.serialize())
    want = layer.full(x)
    assert_close(forward.call(x[:1], np.ones((1, LENGTH), np.int32)), want[:1], np.float32)
    _, cache = layer.append(layer.layer.init_cache(3, CAPACITY, max_rollback=2), list(x[:, :40]))
    out, cache = decode.call(cache, x[:, 40:44])
    assert_close(out, want[:, 40:44], np.float32)
    out, _ = decode.call(cache.truncate([42, 44, 44]).reorder([0]), x[:1, 42:46])
    assert_close(out, want[:1, 42:46], np.float32)


def test_the_loss_of_a_symbolic_batch_lowers(b):
    layer = served(LayerType.CSA).layer

    def losses(x):
        return layer(x, return_indexer_loss=True)[1], layer.indexer_recall(x)

    loss, recall = jax.tree.unflatten(export.export(jax.jit(losses))(of(b, LENGTH, 64)).out_tree, [1.0, 2.0, 3.0, 4.0])
    assert (loss.total, recall.count) == (1.0, 4.0)


def test_rows_of_a_batch_share_what_fits(b):
    assert [per_row(64, 2, 8), per_row(64, 16, 8), per_row(64, 64, 1), per_row(64, 128, 1)] == [32, 8, 1, 1]
    assert (per_row(640, b, 8), per_row(16, b, 8)) == (80, 8)


@every_layer_type
def test_a_symbolic_length_of_a_layer_is_refused(layer_type, s):
    layer = served(layer_type).layer
    cache = placeholders(layer.init_cache(2, CAPACITY))
    for call, args in (
        (layer, (of(2, s, 64),)),
        (layer.decode, (cache, of(2, s, 64))),
        (lambda x: layer.indexer_recall(x).found, (of(2, s, 64),)),
    ):
        with pytest.raises(NotImplementedError, match=r"^x: expected a static S, got \(2, s, 64\); export one program"):
            export.export(jax.jit(call))(*args)


def test_a_symbolic_length_of_an_op_is_refused(s):
    def attention(q, kv):
        return foveal.core_attention(q, kv, visibility=Visibility(Documents.unpacked(*q.shape[:2]), 8))

    def layout(ids):
        return WindowLayout.of(Documents.from_segment_ids(ids), 4).valid

    for call, args in ((attention, (of(1, s, 2, 8), of(1, s, 8))), (layout, (of(1, s, dtype=jnp.int32),))):
        with pytest.raises(NotImplementedError, match=r"^documents: expected a static S, got \(1, s\); export one"):
            export.export(jax.jit(call))(*args)


VISIBILITY = Visibility(Documents.unpacked(1, 64), 8, 4)
OPERANDS = of(1, 64, 2, 8), of(1, 64, 8), of(1, 16, 8)


def attention(implementation):
    return functools.partial(foveal.core_attention, visibility=VISIBILITY, implementation=implementation)


def call_of(name: str) -> tuple[Any, tuple[Any, ...]]:
    """A function of which the platform decides something, and what it takes."""
    if name == "best":
        return attention(None), OPERANDS
    if name == "chunked":
        return attention("chunked"), OPERANDS
    if name == "select":
        select = functools.partial(foveal.select_entries, visibility=VISIBILITY, top_k=4)
        return select, (OPERANDS[0], of(1, 64, 2), OPERANDS[2])
    layer = served(LayerType.CSA if name == "loss" else LayerType(name)).layer
    if name == "loss":
        return lambda x: layer(x, select="all", return_indexer_loss=True, implementation="dense")[1], (of(1, 48, 64),)
    return layer.decode, (placeholders(layer.init_cache(1, CAPACITY)), of(1, 1, 64))


@pytest.mark.parametrize("name", ["best", "chunked", "select", "loss", *map(str, LayerType)])
def test_plans_of_one_platform_are_not_exported_for_another(name):
    function, args = call_of(name)
    for platforms in (["tpu"], ["cpu", "tpu"], ["cuda"])[: 3 if name == "best" else 1]:
        lower = export.export(jax.jit(function), platforms=platforms)
        other = {"cuda": "gpu"}.get(platforms[-1], platforms[-1])
        message = rf'^a program of foveal, planned for cpu, .* {platforms[-1]}: .*tracing_for\("{other}"\)'
        with pytest.raises(NotImplementedError, match=message):
            lower(*args)


def test_what_is_the_same_everywhere_is_exported_for_all():
    dense = export.export(jax.jit(attention("dense")), platforms=["cpu", "tpu"])(*OPERANDS)
    assert dense.platforms == ("cpu", "tpu")


def test_a_trace_for_a_platform_has_its_plans():
    """CSA decodes by bisection on a CPU, by sorting elsewhere: the program is the one of the platform it is for."""
    function, args = call_of(LayerType.CSA.value)
    here = export.export(jax.jit(function))(*args)
    assert "top_k" not in here.mlir_module()
    layout = [export.DisabledSafetyCheck.custom_call("LayoutConstraint")]  # of TPUs' programs, as `tracing_for` says
    for target, platforms in (("tpu", ["tpu"]), ("gpu", ["cuda", "rocm"])):
        with tracing_for(target):
            assert platform() == target
            there = export.export(jax.jit(function), platforms=platforms, disabled_checks=layout)(*args)
        assert there.platforms == tuple(platforms)
        assert there.nr_devices == 1
        assert "top_k" in there.mlir_module()
    with tracing_for("tpu"), pytest.raises(NotImplementedError, match=r"planned for tpu, is lowered for cpu"):
        export.export(jax.jit(function), platforms=["cpu"])(*args)
    with pytest.raises(ValueError, match=r"^platform: expected one of cpu, gpu, tpu, cuda, rocm, got 'npu'"):
        tracing_for("npu").__enter__()


def test_jit_for_another_platform_warns():
    traced = jax.jit(planned).trace(of(3))
    assert "foveal" not in traced.lower().as_text()
    with pytest.warns(UserWarning, match=r"planned for cpu, is lowered for tpu, where it may be slow"):
        traced.lower(lowering_platforms=("tpu",))


def test_the_default_device_is_where_a_program_runs(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert platform() == "gpu"
    for device in ("cpu", jax.devices("cpu")[1]):
        with jax.default_device(device):
            assert platform() == "cpu"
    monkeypatch.setattr(jax, "default_backend", lambda: "cuda")
    assert platform() == "gpu"


def test_the_mark_is_nothing_at_run_time():
    """Not in the program, nor in the way of any transformation."""

    def marked(x):
        return jnp.sin(planned(x))

    x = jnp.arange(8.0)
    plain, made = (jax.jit(f).lower(x).as_text().replace("marked", "sin") for f in (jnp.sin, marked))
    assert plain.splitlines()[1:] == made.splitlines()[1:]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    over_devices = jax.shard_map(marked, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))
    for transform in (jax.vmap, jax.jit, jax.checkpoint, lambda f: jax.jit(over_devices) if f is marked else f):
        np.testing.assert_array_equal(transform(marked)(x), jnp.sin(x))
    for transform in (jax.grad, jax.hessian, lambda f: jax.grad(jax.checkpoint(f))):
        np.testing.assert_array_equal(jax.vmap(transform(marked))(x), jax.vmap(transform(jnp.sin))(x))
    out, tangent = jax.jvp(marked, (x,), (x,))
    np.testing.assert_array_equal(tangent, jnp.cos(x) * x)
    np.testing.assert_array_equal(out, jnp.sin(x))
