"""Programs of the chunked backend: constants, `jax.shard_map`, layouts, and what memory they need."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from foveal.geometry import Documents, Visibility
from foveal.ops import core_attention
from foveal.testing.numerics import assert_close, assert_gradients_close
from tests.backends.chunked_problem import (
    CASES,
    W,
    attend_densely,
    every_way,
    problem,
    unpacked,
)
from tests.support.core_attention import (
    NAMES,
    UNOPTIMIZED,
    assert_same,
    both_ways,
    program_for_a_tpu,
    shapes,
)
from tests.support.programs import equations, largest_array


@every_way
@pytest.mark.parametrize("constant", [("kv", "entries"), ("q",)], ids=["keys", "queries"])
def test_bfloat16_arrays_may_be_constants_of_a_program(name, constant):
    """As a function that closes over them makes them: the compiler then works out ahead of time what it can."""
    case = CASES[name]
    args, indices, cotangents = jax.tree.map(jnp.asarray, problem(case, 8, jnp.bfloat16))
    every: dict[str, Any] = dict(zip(NAMES, args, strict=True))
    call: dict[str, Any] = {"visibility": unpacked(case), "indices": indices, "return_lse": True}
    free = {name: array for name, array in every.items() if name not in constant}

    @functools.partial(jax.jit, compiler_options=UNOPTIMIZED)
    def run(free, cotangents):
        results, pull = jax.vjp(lambda free: core_attention(**every | free, **call, implementation="chunked"), free)
        return results, *pull(cotangents)

    (out, lse), gradients = run(free, cotangents)
    (want, want_lse), expected = attend_densely(args, unpacked(case), indices, cotangents)
    assert_close(out, want, jnp.bfloat16)
    assert_close(lse, want_lse, np.float32)
    assert_gradients_close(gradients, {name: expected[name] for name in free}, jnp.bfloat16)


@every_way
def test_within_shard_map(name):
    """Batch and heads apart: the gradient of the keys, which all heads share, is summed over the devices."""
    case = CASES[name]
    args, indices, cotangents = problem(case, 9)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    heads, rows = P("data", None, "tensor"), P("data")

    def locally(q, kv, entries, sinks, indices):
        visibility = Visibility(Documents.unpacked(*q.shape[:2]), W, case.ratio)
        return core_attention(
            q, kv, entries, visibility=visibility, indices=indices, sinks=sinks, return_lse=True,
            implementation="chunked",
        )  # fmt: skip

    specs: Any = heads, rows, rows, P("tensor"), P() if indices is None else rows
    apart: Any = jax.shard_map(locally, mesh=mesh, in_specs=specs, out_specs=(heads, heads))

    @functools.partial(jax.jit, compiler_options=UNOPTIMIZED)
    def run(args, cotangents):
        results, pull = jax.vjp(lambda *args: apart(*args, indices), *args)
        return results, dict(zip(NAMES, pull(cotangents), strict=True))

    assert_same(run(args, cotangents), attend_densely(args, unpacked(case), indices, cotangents))


def test_queries_have_one_layout_on_tpus():
    """XLA would keep them in two, one for each pass: at 65536 rows of Flash's layer 4 GiB more."""
    args, visibility, _, cotangents = shapes(256, 2, 4, window=W, with_documents=False)
    run, args = functools.partial(both_ways, implementation="chunked"), (args, visibility, None, cotangents)
    on_a_tpu, here = program_for_a_tpu(run, *args), jax.make_jaxpr(run)(*args)
    assert "layout_constraint" in {e.primitive.name for e in equations(on_a_tpu.jaxpr)}
    assert "layout_constraint" not in {e.primitive.name for e in equations(here.jaxpr)}


# -------------------------------------------------------------------------------------------------------------- memory


LAYERS = {"HCA": {"ratio": 16, "selected": None}, "CSA": {"ratio": 4, "selected": 64}}


@functools.cache
def compiled(layer: str, length: int, dtype: Any) -> tuple[int, str]:
    """Bytes that XLA allocates for forward and backward, and the program."""
    args, visibility, indices, (d_out, d_lse) = shapes(length, 4, **LAYERS[layer], window=W, with_documents=True)
    *arrays, d_out = (jax.ShapeDtypeStruct(a.shape, dtype) for a in (*args[:3], d_out))
    run = jax.jit(lambda a, v, i, c: both_ways(a, v, i, c, None))
    program = run.lower((*arrays, args[3]), visibility, indices, (d_out, d_lse)).compile()
    analysis, text = program.memory_analysis(), program.as_text()
    assert analysis is not None
    assert text is not None
    return analysis.temp_size_in_bytes, text


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_memory_grows_linearly(layer):
    """Exactly. Quadratic would be 16 times, and 268 MB of weights."""
    (short, _), (long, _) = (compiled(layer, length, jnp.float32) for length in (2048, 8192))
    assert 0 < short < long <= 4.2 * short


@pytest.mark.parametrize("layer", LAYERS)
def test_bfloat16_is_never_widened_as_a_whole(layer):
    """A compiler that has no bfloat16 slices makes a float32 array of all queries for each tile that it reads."""
    whole = "f32[1,2048,4,16]"
    assert whole in compiled(layer, 2048, jnp.float32)[1]
    assert whole not in compiled(layer, 2048, jnp.bfloat16)[1]


@pytest.mark.parametrize(("ratio", "selected", "with_documents"), [(4, 16, True), (16, None, True), (4, None, False)])
def test_no_array_has_queries_times_keys(ratio, selected, with_documents):
    """With S = 4096, S x C is 1 to 4 million elements, and the largest thing that is needed q's 131072."""
    length, heads = 4096, 2
    slots, own = length // ratio, length * heads * 16
    args = shapes(length, heads, ratio, window=W, selected=selected, with_documents=with_documents)
    assert own <= largest_array(functools.partial(both_ways, implementation=None), *args) < length * slots / 2
    forward = largest_array(lambda a, v, i, _: core_attention(*a[:3], visibility=v, indices=i, sinks=a[3]), *args)
    assert own <= forward < length * slots / 2
    assert largest_array(functools.partial(both_ways, implementation="dense"), *args) >= length * (length + slots)


@pytest.mark.parametrize(
    ("ratio", "selected", "columns"),
    [
        pytest.param(64, None, 2 * 64, id="logits of few entries"),
        pytest.param(4, None, 2 * 128, id="logits of the window"),
        pytest.param(4, 64, 2 * 64, id="logits of the selected entries, or the entries themselves"),
        pytest.param(4, 512, 1024, id="which entries are selected"),
    ],
)
def test_no_array_has_what_all_queries_look_at(ratio, selected, columns):
    """A tile's at a time, though all of it grows linearly with S too: it is what runs out of memory first.

    columns: of the smallest array that there must not be, with S = 4096 rows.
    """
    length, heads, dim = 4096, 2, 16
    args, visibility, indices, cotangents = shapes(
        length, heads, ratio, window=128, selected=selected, with_documents=True
    )
    needed = length * max(heads * dim, selected or 0)  # q, or the indices
    both = functools.partial(both_ways, implementation=None)
    assert needed <= largest_array(both, args, visibility, indices, cotangents) < 1.5 * needed < length * columns
