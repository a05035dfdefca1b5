"""Splash Attention on several TPUs that are not here: XLA cannot divide its kernels, so that `None` chooses another."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from foveal import AttentionConfig, CompressedAttention, LayerType, Splash
from foveal.aot import device_mesh
from foveal.geometry import Documents, Visibility
from foveal.ops import core_attention, explain
from foveal.program import automatic_axes
from tests.backends.splash_problem import DYNAMIC, STATIC

EVERYWHERE = P()
RATIOS = {"sliding": 0, "hca": 128}
SPECS = {"batch": P("data"), "sequence": P(None, "seq")}
every_layer = pytest.mark.parametrize("ratio", RATIOS.values(), ids=RATIOS)
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
CURE = "XLA cannot divide its kernels over mesh axes 'data', 'seq'"


def mesh_of(kind: AxisType, data: int = 2, seq: int = 2) -> Mesh:
    mesh = device_mesh("v5e", {"data": data, "seq": seq})
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(kind,) * 2)


@pytest.fixture(scope="module")
def auto() -> Mesh:
    return mesh_of(AxisType.Auto)


def attend(q, kv, entries, sinks, implementation=None):
    visibility = Visibility(Documents.unpacked(*q.shape[:2]), 128, 0 if entries is None else 128)
    call: Any = {"visibility": visibility, "sinks": sinks, "implementation": implementation}
    return core_attention(q, kv, entries, **call), explain(q, kv, entries, **call)


class Traced:
    """A call of `attend` for the devices of a mesh, and what was chosen while it was traced."""

    def __init__(self, implementation=None):
        self.told, self.implementation = [], implementation

    def __call__(self, *args):
        out, told = attend(*args, implementation=self.implementation)
        self.told.append(told)
        return out

    def assert_left_to_chunked(self) -> None:
        (told,) = self.told
        assert told.chosen == "chunked"
        reasons = {v.name: v.reason for v in told.verdicts}
        assert reasons["splash"].startswith(f"cannot: {CURE}: ")
        assert "Splash(sharding=" in reasons["splash"]
        assert reasons["splash_dynamic"].startswith(f"cannot: {CURE}: ")
        assert "Splash(sharding=" not in reasons["splash_dynamic"]
        assert all("jax.shard_map" in reasons[name] for name in ("splash", "splash_dynamic"))


def structs(ratio: int, mesh: Mesh | None = None, spec: P = EVERYWHERE, dtype: Any = jnp.bfloat16):
    """Arguments of `attend`, on a mesh: entries, being few, have the batch of `spec` alone."""

    def of(*shape: int, spec: P = spec, dtype: Any = dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=None if mesh is None else NamedSharding(mesh, spec))

    entries = of(2, 512 // ratio, 128, spec=P(*spec[:1])) if ratio else None
    return of(2, 512, 2, 128), of(2, 512, 128), entries, of(2, spec=P(), dtype=jnp.float32)


def kernels(lowered: Any) -> int:
    return lowered.as_text().count("stablehlo.custom_call @tpu_custom_call")


# ---------------------------------------------------------------------------------------------------- what is refused


@every_spec
@every_layer
@pytest.mark.parametrize("shown", ["set", "by the operands", "by explicit axes"])
def test_wherever_the_mesh_shows_another_is_chosen(shown, ratio, spec, monkeypatch, auto):
    mesh = mesh_of(AxisType.Explicit) if shown == "by explicit axes" else auto
    if shown == "by the operands":  # as in a process that has TPUs, which JAX then takes for the platform
        monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    traced = Traced()
    with jax.set_mesh(mesh) if shown == "set" else contextlib.nullcontext():
        assert kernels(jax.jit(traced).lower(*structs(ratio, mesh, spec))) == 0
    traced.assert_left_to_chunked()


@every_spec
@every_layer
def test_what_jax_does_not_show_ends_in_the_error_that_the_docs_explain(ratio, spec, monkeypatch, auto):
    """Auto axes by `in_shardings` alone: while tracing there is no mesh anywhere. Setting it is the cure."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    placed = structs(ratio, auto, spec)
    shardings = jax.tree.map(lambda array: array.sharding, placed)
    traced = Traced()
    with pytest.raises(NotImplementedError, match="Mosaic kernels cannot be automatically partitioned"):
        jax.jit(traced, in_shardings=shardings).lower(*structs(ratio))
    assert [told.chosen for told in traced.told] == ["splash"]
    traced = Traced()
    with jax.set_mesh(auto):
        assert kernels(jax.jit(traced, in_shardings=shardings).lower(*structs(ratio))) == 0
    traced.assert_left_to_chunked()


@pytest.mark.parametrize("layer_type", [LayerType.SLIDING, LayerType.HCA])
def test_a_layer_with_its_rows_over_a_mesh_compiles(layer_type, auto):
    graph, state = nnx.split(
        nnx.eval_shape(lambda: CompressedAttention(AttentionConfig.tiny(), layer_type=layer_type, rngs=nnx.Rngs(0)))
    )
    x = jax.ShapeDtypeStruct((2, 256, AttentionConfig.tiny().hidden_size), jnp.float32)
    x = x.update(sharding=NamedSharding(auto, P(None, "seq")))
    with jax.set_mesh(auto):
        program = jax.jit(lambda state, x: nnx.merge(graph, state)(x)).lower(state, x).compile()
    assert "tpu_custom_call" not in (program.as_text() or "")


# ------------------------------------------------------------------------------------------------ what is not refused


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_one_device_it_is_still_the_first_choice(kind):
    mesh, traced = mesh_of(kind, 1, 1), Traced()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert kernels(jax.jit(traced).lower(*structs(128, mesh, P("data")))) == 1
    assert [told.chosen for told in traced.told] == ["splash"]


def test_one_that_knows_its_sharding_runs_on_several_devices(auto):
    traced = Traced(Splash(sharding=P("data", None, "seq")))
    q, *others = structs(128, auto, P("data"))
    q = q.update(sharding=NamedSharding(auto, P("data", None, "seq")))
    with jax.set_mesh(auto):
        assert kernels(jax.jit(traced).lower(q, *others)) == 1


@pytest.mark.parametrize("names", [("data", "seq"), ("data",)], ids=["all", "some"])
@pytest.mark.parametrize("seq", [1, 2])
def test_a_manual_region_has_it_where_every_axis_is_manual(names, seq):
    """An axis that is left is XLA's, which refuses the kernels even where the axis is one device long."""
    mesh, traced = mesh_of(AxisType.Auto, seq=seq), Traced()
    arguments = structs(128, mesh, P("data"))
    specs = jax.tree.map(lambda array: array.sharding.spec, arguments)
    run = jax.shard_map(traced, mesh=mesh, in_specs=specs, out_specs=P("data"), axis_names=set(names), check_vma=False)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert kernels(jax.jit(run).lower(*arguments)) == (1 if len(names) == 2 else 0)
    (told,) = traced.told
    assert told.chosen == ("splash" if len(names) == 2 else "chunked")
    if len(names) == 1:
        assert "XLA cannot divide its kernels over mesh axes 'seq': " in str(told)


# ------------------------------------------------------------------------------------------------- which mesh it is on


OPERANDS = ("q", "kv", "entries", "sinks", "indices", "visibility")


@pytest.mark.parametrize("sharded", OPERANDS)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "jit"])
def test_any_operand_may_show_the_mesh(sharded, traced):
    """Emulated, since these devices are a CPU's."""
    mesh = jax.make_mesh((2, 4), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
    arrays: dict[str, Any] = {
        "q": jnp.zeros((2, 32, 2, 4), jnp.float32),
        "kv": jnp.zeros((2, 32, 4), jnp.float32),
        "entries": jnp.zeros((2, 8, 4), jnp.float32),
        "sinks": jnp.zeros(2, jnp.float32),
        "indices": jnp.zeros((2, 32, 3), jnp.int32),
        "visibility": Visibility(Documents.from_segment_ids(jnp.ones((2, 32), jnp.int32), alignment=4), 8, 4),
    }
    arrays[sharded] = jax.device_put(arrays[sharded], NamedSharding(mesh, P()))
    told: list[str] = []

    def ask(arrays: dict[str, Any]) -> None:
        for implementation in (STATIC, DYNAMIC):
            call: dict[str, Any] = arrays | {"indices": arrays["indices"] if implementation is DYNAMIC else None}
            verdicts = explain(**call, implementation=implementation).verdicts
            told.extend(v.reason for v in verdicts if v.name == implementation.name)

    (jax.jit(ask) if traced else ask)(arrays)
    assert [CURE in reason for reason in told] == [sharded != "indices", True]


def test_axes_that_are_left_to_xla():
    mesh = jax.make_mesh((2, 4, 1), ("data", "tensor", "expert"), axis_types=(AxisType.Auto,) * 3)
    other = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    plain, placed = np.zeros(8), jax.device_put(np.zeros(8), NamedSharding(other, P("rows")))
    assert automatic_axes([plain, jnp.zeros(8), None, 1]) == ()
    assert automatic_axes([plain, placed]) == ("rows",)
    with jax.set_mesh(mesh):
        assert automatic_axes([plain]) == ("data", "tensor")
        assert automatic_axes([placed]) == ("data", "tensor", "rows")
    seen: list[tuple[str, ...]] = []

    def look(names: set[str], closed_over: Any) -> None:
        def inside(x):
            seen.append(automatic_axes([x, closed_over]))
            return x

        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.set_mesh(mesh))
            jax.jit(jax.shard_map(inside, in_specs=P(), out_specs=P(), axis_names=names, check_vma=False)).lower(plain)

    look({"data", "tensor", "expert"}, placed)
    look({"data", "tensor"}, plain)
    look({"data"}, plain)
    assert seen == [(), ("expert",), ("tensor", "expert")]
