"""Programs compiled for TPUs that are not here."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from foveal import aot

WIDE = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
MIB = 1 << 20


def double(x):
    return 2.0 * x


def test_the_plan_of_a_function():
    report = aot.compile_report(double, WIDE, target="v5e")
    assert report.verdict == "compiles"
    assert report.message == ""
    assert (report.argument_bytes, report.output_bytes, report.alias_bytes) == (4 * MIB, 4 * MIB, 0)
    assert report.temporary_bytes is not None
    assert report.peak_bytes == 8 * MIB + report.temporary_bytes
    assert report.lower_seconds is not None
    assert report.compile_seconds is not None


def test_a_jitted_function_is_taken_as_it_is():
    """Here with an argument that its result takes the place of."""
    report = aot.compile_report(jax.jit(double, donate_argnums=0), WIDE, target="v5e")
    assert report.alias_bytes == 4 * MIB
    assert report.peak_bytes == 4 * MIB + (report.temporary_bytes or 0)


def test_arguments_keep_their_places_on_a_mesh():
    mesh = aot.device_mesh("v5e", {"data": 2, "tensor": 2})
    assert dict(mesh.shape) == {"data": 2, "tensor": 2}
    apart = jax.ShapeDtypeStruct(WIDE.shape, WIDE.dtype, sharding=NamedSharding(mesh, PartitionSpec("data", "tensor")))
    assert aot.compile_report(double, apart, mesh=mesh).argument_bytes == MIB
    assert aot.compile_report(double, WIDE, mesh=mesh).argument_bytes == 4 * MIB


def test_what_does_not_fit_is_a_verdict():
    huge = jax.ShapeDtypeStruct((1 << 16, 1 << 16), jnp.float32)  # 16 GiB, of the 16 that there are
    report = aot.compile_report(lambda x: jnp.sort(x, axis=0) + jnp.sort(x, axis=1), huge, target="v5e")
    assert report.verdict == "HBM"
    assert "memory" in report.message.lower()
    assert report.peak_bytes is None


def test_what_the_function_itself_refuses_is_raised():
    with pytest.raises(ValueError, match="no"):
        aot.compile_report(lambda x: (_ for _ in ()).throw(ValueError("no")), WIDE, target="v5e")


def test_targets_that_there_are_not():
    with pytest.raises(ValueError, match="target: expected one of v5e, v5p, v6e, tpu7x, got 'v1'"):
        aot.device_mesh("v1")
    with pytest.raises(ValueError, match="axes: expected 1 to 16 devices of v5p"):
        aot.device_mesh("v5p", {"data": 64})


def test_without_the_compiler_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[tpu-aot\]'"):
        aot.device_mesh("v5e")


@pytest.mark.parametrize("target", ["v5p", "v6e", "tpu7x"])
def test_every_other_target_compiles(target):
    assert aot.compile_report(double, WIDE, target=target).verdict == "compiles"
