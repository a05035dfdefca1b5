"""Compiling one case of `foveal compile`, in a process of its own."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from foveal.aot import TARGETS, compile_report, device_mesh
from foveal.backends.operands import Backend
from foveal.cli.compile_spec import CompileCase
from foveal.cli.errors import require
from foveal.cli.presets import read_model
from foveal.config import AttentionConfig
from foveal.flops import core_cost, layer_cost
from foveal.geometry import Documents, Visibility
from foveal.nn import CompressedAttention
from foveal.ops.core_attention import core_attention, explain
from foveal.schedule import kernel_schedules

_RULES = {"heads": "tensor", "o_groups": "tensor", "index_heads": "tensor"}
"""The mesh axis of each sharded logical axis of the parameters; the others are replicated."""


def chosen_implementation(case: CompileCase) -> str:
    """Return the name of the implementation that `None` chooses for the case. Needs no TPU compiler."""
    sizes = dict(case.mesh) or {"device": 1}
    device = AbstractDevice(f"TPU {case.target}", 1, "tpu")
    axes = (AxisType.Auto,) * len(sizes)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=axes, abstract_device=device)
    config = read_model(case.preset, case.config)
    visibility, indices, operands = _operands(case, config, mesh)
    chosen: list[str | None] = []

    def ask(indices: Any, q: Any, kv: Any, entries: Any, sinks: Any) -> None:
        chosen.append(explain(q, kv, entries, visibility=visibility, indices=indices, sinks=sinks).chosen)

    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(ask, indices, *operands)
    (name,) = chosen
    assert name is not None  # `dense` accepts any call
    return name


def compile_case(case: CompileCase, dump: str | None) -> dict[str, Any]:
    """Compile a case and return the report's fields, with kernel cycles if the compiler dumps schedules to `dump`."""
    mesh = device_mesh(case.target, dict(case.mesh) or None)
    config = read_model(case.preset, case.config)
    backend = _configured(case, config)
    mask_seconds = _build_masks(backend, case, config)
    implementation = None if case.chosen else backend
    build = _core if case.what == "core" else _layer
    function, args = build(case, config, implementation, mesh)
    report = compile_report(function, *args, mesh=mesh, compiler_options=dict(case.compiler_options))
    cost = (core_cost if case.what == "core" else layer_cost)(
        config,
        case.layer_type,
        Documents.unpacked(case.batch, case.length),
        bytes_per_element=jnp.dtype(case.dtype).itemsize,
        backward=case.backward,
    )
    cycles = None
    if dump and report.verdict == "compiles":
        try:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # of the chip that the kernels are for
                cycles = _kernel_cycles(case, backend, dump, config)
        except ValueError as error:
            report = dataclasses.replace(report, message=f"no cycles: {error}")
    target = TARGETS[case.target]
    least = max(cost.operations / target.operations_per_second, cost.bytes / target.bytes_per_second) / mesh.size
    return dataclasses.asdict(report) | {
        "peak_bytes": report.peak_bytes,
        "mask_seconds": mask_seconds,
        "kernel_cycles": cycles,
        "roofline_seconds": least,
        "jax": jax.__version__,
    }


def _configured(case: CompileCase, config: AttentionConfig) -> Backend:
    backend = case.backend
    if backend.needs is not None:
        module, extra = backend.needs
        require((module,), extra)
    rows, heads = _axes(case)
    # A chosen implementation is called without a sharding of its operands.
    sharding = PartitionSpec(rows, None, heads) if case.mesh and not case.chosen else None
    return backend.configure(heads=_heads(case, config), blocks=case.blocks, sharding=sharding)


def _heads(case: CompileCase, config: AttentionConfig) -> int:
    """Query heads per chip."""
    return config.num_attention_heads // dict(case.mesh).get("tensor", 1)


def _axes(case: CompileCase) -> tuple[str | None, str | None]:
    """The mesh axes that shard rows and heads; None where there is no such axis."""
    names = dict(case.mesh)
    return "data" if "data" in names else None, "tensor" if "tensor" in names else None


def _build_masks(backend: Backend, case: CompileCase, config: AttentionConfig) -> float | None:
    """CPU seconds of building the masks, None without masks. A small mask is built first to exclude import time."""
    seconds = None
    for rows in (1, case.length):
        start = time.process_time()
        if backend.build_masks(_heads(case, config), _visibility(case, config, 1, rows)):
            seconds = time.process_time() - start
    return seconds


def _kernel_cycles(case: CompileCase, backend: Backend, dump: str, config: AttentionConfig) -> int | None:
    """Cycles of the attention kernels; None where they cannot be counted."""
    if not case.has_cycles:
        return None
    batch = case.batch // dict(case.mesh).get("data", 1)
    shape = (batch, case.length, _heads(case, config), config.head_dim)
    q = jax.ShapeDtypeStruct(shape, jnp.dtype(case.dtype))
    cycles = backend.cycles(kernel_schedules(dump), q, _visibility(case, config, batch, case.length))
    if cycles is None:
        raise ValueError(f"the compiler wrote down no schedule of {backend.name}'s kernels")
    return cycles


def _visibility(case: CompileCase, config: AttentionConfig, batch: int, length: int) -> Visibility:
    ratio = config.compress_ratio(case.layer_type)
    return Visibility(Documents.unpacked(batch, length), config.sliding_window, ratio)


def _operands(
    case: CompileCase, config: AttentionConfig, mesh: Mesh | AbstractMesh
) -> tuple[Visibility, Any, list[Any]]:
    """Core attention's arguments: the visibility, and shapes of the selected slots (or None) and the operands."""
    rows, heads = _axes(case)
    dim, dtype = config.head_dim, jnp.dtype(case.dtype)
    visibility = _visibility(case, config, case.batch, case.length)

    def struct(*shape: int, dtype: Any = dtype, spec: tuple = (rows,)) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    q = struct(case.batch, case.length, config.num_attention_heads, dim, spec=(rows, None, heads))
    args: list[Any] = [q, struct(case.batch, case.length, dim), struct(case.batch, visibility.slots, dim)]
    args.append(struct(config.num_attention_heads, dtype=jnp.float32, spec=(heads,)))
    indices = None
    if config.layer(case.layer_type).has_indexer:
        chosen = min(config.index_topk, visibility.slots)
        indices = struct(case.batch, case.length, chosen, dtype=jnp.int32)
    return visibility, indices, args


def _core(
    case: CompileCase,
    config: AttentionConfig,
    implementation: str | Backend | None,
    mesh: Mesh,
) -> tuple[Callable[..., Any], list[Any]]:
    visibility, indices, args = _operands(case, config, mesh)

    def forward(indices: Any, *operands: Any) -> Any:
        q, kv, entries, sinks = operands
        return core_attention(
            q, kv, entries, visibility=visibility, indices=indices, sinks=sinks, implementation=implementation
        )

    return _with_backward(case, forward, indices, args, args[0])


def _layer(
    case: CompileCase,
    config: AttentionConfig,
    implementation: str | Backend | None,
    mesh: Mesh,
) -> tuple[Callable[..., Any], list[Any]]:
    rows, heads = _axes(case)

    def make() -> CompressedAttention:
        dtype = jnp.dtype(case.dtype)
        return CompressedAttention(config, layer_type=case.layer_type, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))

    graph, state = nnx.split(nnx.eval_shape(make))
    rules = [(axis, mesh_axis if heads else None) for axis, mesh_axis in _RULES.items()]

    def place(variable: Any) -> Any:
        names = variable.get_metadata().get("out_sharding") or ()
        spec = PartitionSpec(*(dict(rules).get(name) for name in names))
        value = variable.get_value()
        return variable.replace(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(mesh, spec)))

    params = jax.tree.map(place, state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    x = jax.ShapeDtypeStruct(
        (case.batch, case.length, config.hidden_size),
        jnp.dtype(case.dtype),
        sharding=NamedSharding(mesh, PartitionSpec(rows)),
    )

    def forward(_: Any, params: Any, x: Any) -> Any:
        layer = nnx.merge(graph, params)
        if not case.indexer_loss:
            return layer(x, implementation=implementation)
        out, loss = layer(x, implementation=implementation, return_indexer_loss=True)
        return out, loss.total

    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    return _with_backward(case, forward, None, [params, x], (x, scalar) if case.indexer_loss else x)


def _with_backward(
    case: CompileCase, forward: Callable[..., Any], data: Any, args: list[Any], cotangent: Any
) -> tuple[Callable[..., Any], list[Any]]:
    """Return `forward` and its arguments; with the gradients of `args` if the case has a backward pass."""

    def both(cotangent: Any, data: Any, *args: Any) -> Any:
        out, pull = jax.vjp(lambda *args: forward(data, *args), *args)
        return out, pull(cotangent)

    return (both, [cotangent, data, *args]) if case.backward else (forward, [data, *args])
