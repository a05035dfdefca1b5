"""Ahead-of-time compilation for TPUs, on a machine that has none.

The compiler is the real one, from the package `libtpu`: its verdicts and memory plans are those of the device. It gives
no run times.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from foveal.extras import missing
from foveal.program import family

_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # do not look for a cloud's metadata server
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # or two processes collide over a lock file
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A TPU generation to compile for.

    Attributes:
        name: the vendor's name.
        topologies: the compiler's name of a topology, by its number of chips, ascending.
        memory_bytes: HBM per chip.
        bytes_per_second: HBM bandwidth per chip.
        operations_per_second: bfloat16 matmul peak per chip.
    """

    name: str
    topologies: Mapping[int, str]
    memory_bytes: int
    bytes_per_second: float
    operations_per_second: float


_SQUARE = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4"}
_CUBE = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4"}

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("v5e", {n: f"v5e:{shape}" for n, shape in _SQUARE.items()}, 16 << 30, 819e9, 197e12),
        Target("v5p", {n: f"v5p:{shape}" for n, shape in _CUBE.items()}, 95 << 30, 2765e9, 459e12),
        Target("v6e", {n: f"v6e:{shape}" for n, shape in _SQUARE.items()}, 32 << 30, 1640e9, 918e12),
        Target("tpu7x", {n: f"tpu7x:{shape}" for n, shape in _CUBE.items()}, 192 << 30, 7380e9, 2307e12),
    )
}
"""The TPUs that can be compiled for, by name."""


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """The result of compiling a program; bytes are per device.

    Attributes:
        verdict: "compiles", the memory that was too small ("HBM", "VMEM" or "SMEM"), or "error".
        message: the beginning of the compiler's message if it failed.
        lower_seconds: CPU seconds of tracing and lowering, on the host.
        compile_seconds: CPU seconds of the compiler.
        argument_bytes: size of the arguments.
        output_bytes: size of the results.
        temporary_bytes: peak size of everything in between.
        alias_bytes: size of the donated arguments, whose memory results reuse.
    """

    verdict: str
    message: str = ""
    lower_seconds: float | None = None
    compile_seconds: float | None = None
    argument_bytes: int | None = None
    output_bytes: int | None = None
    temporary_bytes: int | None = None
    alias_bytes: int | None = None

    @property
    def peak_bytes(self) -> int | None:
        """Bytes of arguments, results and temporaries together, reused ones once; None if it did not compile."""
        parts = (self.argument_bytes, self.output_bytes, self.temporary_bytes)
        if self.alias_bytes is None or any(part is None for part in parts):
            return None
        return sum(part for part in parts if part is not None) - self.alias_bytes


def device_mesh(target: str, axes: Mapping[str, int] | None = None) -> Mesh:
    """Return a mesh of TPUs to compile for, with Auto axes. The devices need not be present.

    Args:
        target: a name in `TARGETS`.
        axes: sizes by axis name; one device by default.

    Raises:
        ValueError: an unknown target, or more devices than its largest topology has.
        ModuleNotFoundError: libtpu is not installed.
    """
    if target not in TARGETS:
        raise ValueError(f"target: expected one of {', '.join(TARGETS)}, got {target!r}")
    if importlib.util.find_spec("libtpu") is None:
        raise ModuleNotFoundError(missing("libtpu, the TPU compiler,", "tpu-aot"), name="libtpu")
    axes = {"device": 1} if axes is None else dict(axes)
    count = math.prod(axes.values())
    fitting = [name for chips, name in TARGETS[target].topologies.items() if chips >= count]
    if count < 1 or not fitting:
        raise ValueError(f"axes: expected 1 to {max(TARGETS[target].topologies)} devices of {target}, got {axes}")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    devices = topologies.get_topology_desc(fitting[0], platform="tpu").devices
    return Mesh(np.array(devices[:count]).reshape(tuple(axes.values())), tuple(axes))


@contextlib.contextmanager
def tracing_for(platform: str) -> Iterator[None]:
    """Return a context in which programs are traced for a platform that need not be present, for `jax.export`.

        with foveal.aot.tracing_for("tpu"):
            exported = jax.export.export(jax.jit(layer), platforms=["tpu"], disabled_checks=[layout])(x)

    Programs for TPUs constrain the layout of some arrays by a custom call, which JAX exports only if told so: `layout`
    is `jax.export.DisabledSafetyCheck.custom_call("LayoutConstraint")`. The context sets a mesh of one device of the
    platform; for several devices set your own mesh, for instance from `device_mesh`.

    Args:
        platform: its name in `jax.export`: "cpu", "tpu", "cuda" or "rocm"; "gpu" for either of the latter.

    Raises:
        ValueError: another platform.
    """
    known = ("cpu", "gpu", "tpu", "cuda", "rocm")
    if platform not in known:
        raise ValueError(f"platform: expected one of {', '.join(known)}, got {platform!r}")
    device = AbstractDevice(device_kind=platform, num_cores=None, platform=family(platform))
    mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def compile_report(
    function: Callable[..., Any],
    *args: Any,
    target: str = "v5p",
    mesh: Mesh | None = None,
    compiler_options: Mapping[str, str] | None = None,
) -> CompileReport:
    """Compile a function for TPUs that need not be present, and report the result.

    Args:
        function: the function to compile. A jitted one is taken as it is; any other is jitted, and the compiler may
            then choose the layouts of its arguments and results, as it does within a larger program.
        args: pytrees of arrays or `jax.ShapeDtypeStruct`s; nothing is computed. Those without a sharding on `mesh` are
            replicated over it.
        target: a name in `TARGETS`; not needed with `mesh`.
        mesh: from `device_mesh`, where arguments are to be sharded.
        compiler_options: options of XLA by name, as `jax.jit` takes them.

    Returns:
        The report. A program that is too large is a verdict, not an exception. Some mistakes in kernels make the
        compiler abort the whole process; callers in doubt should call this in a process of its own.

    Raises:
        ValueError, ModuleNotFoundError: as `device_mesh`; and whatever tracing the function raises.
    """
    mesh = device_mesh(target) if mesh is None else mesh
    jitted, args = _placed(function, args, mesh)
    start = time.process_time()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jitted.lower(*args)
        lowering = time.process_time() - start
        start = time.process_time()
        try:
            compiled = lowered.compile(dict(compiler_options or {}))
        except jax.errors.JaxRuntimeError as error:
            verdict, message = _refusal(str(error))
            return CompileReport(verdict, message, lowering, time.process_time() - start)
        compiling = time.process_time() - start
    memory = compiled.memory_analysis()
    assert memory is not None  # the TPU compiler always has a memory plan
    return CompileReport(
        "compiles",
        "",
        lowering,
        compiling,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
    )


def _placed(function: Any, args: Any, mesh: Mesh) -> tuple[Any, Any]:
    """Return a jitted function, and the shapes of its arguments with shardings on the mesh."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def placed(array: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(array, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh:
            sharding = everywhere
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    args = jax.tree.map(placed, args)
    if hasattr(function, "lower"):
        return function, args
    layouts = jax.tree.map(lambda array: Format(Layout.AUTO, array.sharding), args)
    # The results' shardings stay the compiler's choice where there is more than one device.
    results = Format(Layout.AUTO, everywhere) if mesh.size == 1 else None
    args = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), args)
    return jax.jit(function, in_shardings=layouts, out_shardings=results), args


def _refusal(error: str) -> tuple[str, str]:
    """Return the memory that was too small, else "error", and the beginning of the compiler's message."""
    message = " ".join(error.split())
    found = re.search(r"memory space (hbm|vmem|smem)|(Hbm|Vmem|Smem)Oom|(smem|vmem|hbm)", message, re.I)
    kind = "error"
    if found and re.search(r"RESOURCE_EXHAUSTED|Ran out of memory|Oom|exceed", message, re.I):
        kind = next(group for group in found.groups() if group).upper()
    return kind, message[:300]
