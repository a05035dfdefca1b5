"""When Splash Attention is chosen, and what it refuses."""

import dataclasses
import functools
import importlib.util
import runpy
import subprocess
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from foveal import Splash, SplashBlocks
from foveal.backends.splash import tokamax_splash
from foveal.backends.splash.layout import KeyLayout
from foveal.backends.splash.mask import HCAStaticMask
from foveal.backends.splash.mask_info import static_mask_info
from foveal.extras import missing
from foveal.geometry import Documents, EntryRange, Visibility
from foveal.ops import core_attention, explain
from tests.backends.splash_problem import DYNAMIC, STATIC, kernels
from tests.support.core_attention import TPU, both_ways, program_for_a_tpu, shapes

# ------------------------------------------------------------------------------------------------------ what it refuses


def small(dtype: Any = np.float32, length: int = 32, ratio: int = 4) -> dict[str, Any]:
    slots = length // ratio
    arrays = {"q": (1, length, 2, 4), "kv": (1, length, 4), "entries": (1, slots, 4)}
    visibility = Visibility(Documents.unpacked(1, length), 8, ratio)
    return {name: jnp.zeros(shape, dtype) for name, shape in arrays.items()} | {"visibility": visibility}


def anywhere(alignment: int) -> Visibility:
    return Visibility(Documents.from_segment_ids(np.ones((1, 32), np.int32), alignment=alignment), 8, 4)


INDICES = jnp.zeros((1, 32, 2), jnp.int32)
ON_A_CPU = "its kernels run on TPUs, not on cpu"
REFUSALS = {
    "splash on a CPU": ("splash", small(), ON_A_CPU),
    "splash_dynamic on a CPU": ("splash_dynamic", small(), ON_A_CPU),
    "configured, on a CPU": (Splash(SplashBlocks(128, 128, 128, 128)), small(), ON_A_CPU),
    "float16": (STATIC, small(np.float16), "its kernels take float32 and bfloat16, not float16"),
    "float16, dynamic": (DYNAMIC, small(np.float16), "its kernels take float32 and bfloat16, not float16"),
    "precision": (STATIC, small() | {"precision": "highest"}, "no choice of matmul precision"),
    "precision, dynamic": (DYNAMIC, small() | {"precision": jax.lax.Precision.HIGH}, "no choice of matmul precision"),
    "indices": (STATIC, small() | {"indices": INDICES}, "the selected entries are data"),
    "documents anywhere": (STATIC, small() | {"visibility": anywhere(1)}, "may start anywhere (alignment 1)"),
    "documents elsewhere": (STATIC, small() | {"visibility": anywhere(6)}, "at multiples of compress_ratio 4"),
    "sharded sequence": (
        Splash(interpret=True, sharding=PartitionSpec(None, "context")),
        small(),
        "mesh axis 'context' over the sequence",
    ),
    "a mask too large": (DYNAMIC, small(length=170_000), "a mask of 170000 x 212500 elements; 34359738368 is"),
}  # fmt: skip


def assert_refused(implementation, call: dict[str, Any], reason: str) -> None:
    name = implementation if isinstance(implementation, str) else implementation.name
    for run in (core_attention, jax.jit(core_attention, static_argnames=("implementation", "precision"))):
        with pytest.raises(NotImplementedError, match=rf"^'{name}' cannot do this") as refused:
            run(**call, implementation=implementation)
        (line,) = [line for line in str(refused.value).splitlines() if line.split()[0] == name]
        assert "cannot: " in line
        assert reason in line
    told = explain(**call, implementation=implementation)
    assert told.chosen is None
    (verdict,) = [v for v in told.verdicts if v.name == name]
    assert reason in verdict.reason


@pytest.mark.parametrize("name", REFUSALS)
def test_each_refusal_says_why(name):
    assert_refused(*REFUSALS[name])


def test_float64_is_refused():
    with jax.enable_x64(True):
        for implementation in (STATIC, DYNAMIC):
            assert_refused(implementation, small(np.float64), "its kernels take float32 and bfloat16, not float64")


def test_without_tokamax_both_are_refused(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "tokamax" else find(name, *a))
    for implementation in ("splash", "splash_dynamic", STATIC, DYNAMIC):
        assert_refused(implementation, small(), missing("tokamax", "tpu"))
    with jax.sharding.use_abstract_mesh(TPU):
        assert explain(**small()).chosen == "chunked"


@pytest.mark.parametrize(
    "call",
    [
        small() | {"precision": "default"},
        small() | {"precision": jax.lax.Precision.DEFAULT},
        small(jnp.bfloat16),
        small() | {"visibility": anywhere(0)},
        small() | {"visibility": anywhere(4)},
        small() | {"visibility": anywhere(8)},
        small() | {"visibility": dataclasses.replace(anywhere(1), entries=None), "entries": None},
        # A row too short for an entry: there is nothing that could be selected.
        small() | {"visibility": dataclasses.replace(anywhere(0), entries=EntryRange.of_rows(64)), "entries": None}
        | {"indices": INDICES},
    ],
)  # fmt: skip
def test_what_is_able(call: dict[str, Any]):
    """Aligned documents, no choice of precision, and no entries that could be selected."""
    assert explain(**call, implementation=STATIC).chosen == "splash"
    assert explain(**call, implementation=DYNAMIC).chosen == "splash_dynamic"


def test_a_mask_that_just_fits_is_able():
    assert explain(**small(length=160_000), implementation=DYNAMIC).chosen == "splash_dynamic"


def test_on_a_cpu_nothing_changes():
    calls: list[dict[str, Any]] = [small(), small() | {"indices": INDICES}]
    for call in calls:
        told = explain(**call)
        assert told.chosen == "chunked"
        cannot = {v.name for v in told.verdicts if v.reason == f"cannot: {ON_A_CPU}"}
        assert cannot == {"splash", "splash_dynamic", "fused"}
        assert jax.jit(core_attention)(**call).shape == (1, 32, 2, 4)


def test_on_a_tpu_it_is_the_first_choice_where_nothing_is_selected():
    """The mesh in context says where a program will run."""
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"visibility": anywhere(4)},
        {"visibility": dataclasses.replace(anywhere(1), entries=None), "entries": None},
        {"indices": INDICES},
        {"visibility": anywhere(1)},
    )
    calls = [small() | change for change in changes]
    csa = calls[3]
    with jax.sharding.use_abstract_mesh(TPU):
        chosen = [explain(**call).chosen for call in calls]
        assert chosen == ["splash", "splash", "splash", "chunked", "chunked"]
        reason = {v.name: v.reason for v in explain(**csa).verdicts}["splash"]
        assert reason.startswith("cannot: its mask is fixed at trace time")

    hca, csa = (shapes(512, 2, 4, window=128, with_documents=False, selected=selected) for selected in (None, 8))
    run = functools.partial(both_ways, implementation=None)
    assert kernels(program_for_a_tpu(run, *hca)) == 2
    assert kernels(program_for_a_tpu(run, *csa)) == 0


@pytest.mark.parametrize("implementation", [STATIC, DYNAMIC])
@pytest.mark.parametrize("shape", [(0, 32, 2), (1, 0, 2), (1, 32, 0)])
def test_nothing_to_attend_with_is_no_work(shape, implementation):
    batch, length, heads = shape
    q, kv = jnp.ones((batch, length, heads, 4)), jnp.ones((batch, length, 4))
    visibility = Visibility(Documents.unpacked(batch, length), 8)

    def run(q, kv):
        return core_attention(q, kv, visibility=visibility, return_lse=True, implementation=implementation)

    results, pull = jax.vjp(run, q, kv)
    assert [r.shape for r in results] == [(*shape, 4), shape]
    assert [r.dtype for r in results] == [jnp.float32, jnp.float32]
    assert not any(np.any(g) for g in pull(results))


# --------------------------------------------------------------------------------------------------------------- blocks


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"q": 0}, "q: expected an int >= 128, got 0"),
        ({"kv": -128}, "kv: expected an int >= 128, got -128"),
        ({"q_backward": 192}, "q_backward: expected a multiple of 128, got 192"),
        ({"kv_backward": 64}, "kv_backward: expected an int >= 128, got 64"),
        ({"q": 128.0}, "q: expected an int >= 128, got 128.0"),
        ({"kv": True}, "kv: expected an int >= 128, got True"),
        ({"stacked_heads": 0}, "stacked_heads: expected an int >= 1, got 0"),
        ({"stacked_heads": True}, "stacked_heads: expected an int >= 1, got True"),
        ({"stacked_heads": 2.0}, "stacked_heads: expected an int >= 1, got 2.0"),
    ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_blocks_that_are_none_are_refused(changed, wanted):
    sizes: dict[str, Any] = {"q": 128, "kv": 256, "q_backward": 384, "kv_backward": 512, "stacked_heads": 3} | changed
    with pytest.raises(ValueError) as error:  # noqa: PT011
        SplashBlocks(**sizes)
    assert str(error.value) == wanted


@pytest.mark.parametrize("can_stack", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 6, 7, 12, 17, 64, 128])
@pytest.mark.parametrize(("length", "ratio"), [(1, 0), (4096, 128), (65536, 128), (131072, 128), (1 << 20, 128)])
def test_the_table(length, ratio, heads, can_stack):
    slots = length // ratio if ratio else 0
    blocks = SplashBlocks.for_shapes(length, slots, heads, sliding_window=128, can_stack=can_stack)
    most = min(8, 1024 // blocks.q) if can_stack else 1
    assert blocks.stacked_heads == max(n for n in range(1, most + 1) if heads % n == 0)
    assert min(blocks.q_backward, blocks.kv_backward) >= 256
    assert blocks.q >= (128 if blocks.stacked_heads > 1 else 256)
    assert max(dataclasses.astuple(blocks)) <= 1024


@pytest.mark.parametrize("length", [1, 4096, 131072, 1 << 18, 1 << 20])
@pytest.mark.parametrize("can_stack", [False, True])
def test_the_tables_tiles_fit_the_scalar_memory(length, can_stack):
    """Of 1 MiB; Splash needs 20 bytes for each tile that is not empty."""
    slots = length // 128
    blocks = SplashBlocks.for_shapes(length, slots, 64, sliding_window=128, can_stack=can_stack)
    layout = KeyLayout.for_shapes(length, slots, max(blocks.q, blocks.q_backward), max(blocks.kv, blocks.kv_backward))
    mask = HCAStaticMask(layout, 128, 128 if slots else 0)
    for q, kv in ((blocks.q, blocks.kv), (blocks.q_backward, blocks.kv_backward)):
        assert 20 * np.asarray(static_mask_info(mask, q, kv).block_mask).size < 0.6 * (1 << 20)


@pytest.mark.parametrize(
    "place", ["tokamax._src.ops.splash_attention", "tokamax._src.ops.experimental.tpu.splash_attention"]
)
def test_tokamax_has_its_kernels_at_either_place(place, monkeypatch):
    """From 0.0.18 on and before: found by a module that is run anew, with what stands in for Tokamax's."""
    package: Any = types.ModuleType(place)
    package.base, package.splash_attention_kernel = object(), object()
    package.splash_attention_mask = types.SimpleNamespace(Mask=object())
    package.splash_attention_mask_info = types.SimpleNamespace(MaskInfo=object())
    monkeypatch.setitem(sys.modules, place, package)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: package if name == place else None)
    found = runpy.run_path(tokamax_splash.__file__)
    assert found["base"] is package.base
    assert found["splash_attention_kernel"] is package.splash_attention_kernel
    assert found["Mask"] is package.splash_attention_mask.Mask
    assert found["MaskInfo"] is package.splash_attention_mask_info.MaskInfo


def test_importing_the_package_does_not_import_tokamax():
    """Which takes more than a second, and need not be there; nor does a call that runs elsewhere."""
    code = """
import sys, foveal, jax.numpy as jnp
foveal.Splash(), foveal.SplashDynamic()
visibility = foveal.Visibility(foveal.Documents.unpacked(1, 4), 2)
foveal.core_attention(jnp.ones((1, 4, 1, 2)), jnp.ones((1, 4, 2)), visibility=visibility)
print(sorted(name for name in sys.modules if name.split(".")[0] == "tokamax"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
