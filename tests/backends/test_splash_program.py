"""What the programs of Splash Attention look like: over a mesh, and what arrays they have."""

import functools
import math

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from foveal import Splash, SplashBlocks, SplashDynamic
from foveal.backends.splash import heads as splash_heads
from tests.backends.splash_problem import (
    M,
    W,
    attend,
    densely,
    kernels,
    output_only,
    packed,
    problem,
    unpacked,
)
from tests.support.core_attention import assert_same, both_ways, program_for_a_tpu, shapes
from tests.support.programs import equations, largest_in

# ------------------------------------------------------------------------------------------------------------ sharding


@pytest.mark.parametrize(("blocks", "documents"), [(SplashBlocks(256, 128, 256, 256), "unpacked"), (None, "packed")])
def test_rows_and_heads_over_a_mesh_match_dense(blocks, documents):
    """Two devices share the rows and two the heads: gradients of what heads share are summed over devices."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    args, cotangents = problem(300, M, 7, heads=4)
    visibility = packed(300, 7) if documents == "packed" else unpacked(300, M)
    sharded = Splash(blocks, interpret=True, sharding=PartitionSpec("data", None, "tensor"))
    with jax.set_mesh(mesh):
        program = jax.make_jaxpr(both_ways, static_argnums=4)(args, visibility, None, cotangents, sharded)
        assert "shard_map" in {e.primitive.name for e in equations(program.jaxpr)}
        got = jax.tree.map(np.asarray, attend(args, visibility, None, cotangents, sharded))
    assert_same(got, densely(args, visibility, None, cotangents))


# -------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("with_documents", [False, True])
def test_no_array_has_queries_times_keys(with_documents, monkeypatch):
    """With S = 4096, S x C is 4 million elements; the largest there is are the log-sum-exps, 128 times over."""
    length, heads, ratio = 4096, 2, 4
    args, visibility, indices, cotangents = shapes(
        length, heads, ratio, window=W, with_documents=with_documents, alignment=ratio
    )
    both = functools.partial(both_ways, implementation="splash")
    both = program_for_a_tpu(both, args, visibility, indices, cotangents)
    assert kernels(both) == 2
    own, log_sum_exps = length * heads * 16, length * heads * 128
    assert log_sum_exps <= largest_in(both) < 1.5 * log_sum_exps < length * (length // ratio) / 2

    forward = functools.partial(output_only, implementation="splash")
    program = program_for_a_tpu(forward, args, visibility, indices)
    assert kernels(program) == 1
    assert largest_in(program) < 1.5 * log_sum_exps
    monkeypatch.setattr(splash_heads, "_AT_A_TIME", 0)
    # In long rows those of one head are made at a time.
    one = functools.partial(output_only, implementation=Splash(SplashBlocks(128, 128, 256, 256)))
    program = program_for_a_tpu(one, args, visibility, indices)
    assert kernels(program) == 1
    assert own < log_sum_exps / 2 <= largest_in(program) < log_sum_exps


def test_constants_of_the_program_do_not_grow_with_the_rows():
    """The mask's distinct tiles, all of which there are from some length on: only the list of tiles is longer."""

    def constants(length: int) -> int:
        args, visibility, *_ = shapes(length, 2, 128, window=W, with_documents=False)
        program = program_for_a_tpu(functools.partial(output_only, implementation="splash"), args, visibility, None)
        return sum(math.prod(np.shape(a)) for a in program.consts)

    assert 0 < constants(131072) < 1.1 * constants(32768)


def test_a_mask_that_is_data_is_quadratic():
    """As it says of itself."""
    assert SplashDynamic.quadratic
    assert not Splash.quadratic
    length, ratio = 1024, 4
    args = shapes(length, 2, ratio, window=W, with_documents=True, selected=8, alignment=ratio)
    program = program_for_a_tpu(functools.partial(both_ways, implementation="splash_dynamic"), *args)
    assert largest_in(program) >= length * (length + length // ratio)
