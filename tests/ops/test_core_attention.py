"""Core attention against the reference in float64: outputs, log-sum-exps, every gradient, every implementation."""

import functools
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

from foveal.geometry import Documents, Visibility
from foveal.ops import core_attention
from foveal.testing.generators import random_segment_ids
from foveal.testing.numerics import assert_close, assert_gradients_close
from foveal.testing.reference import reference_visibility
from tests.support import core_attention as support
from tests.support.core_attention import IMPLEMENTATIONS, NAMES, assert_same, both_ways
from tests.support.documents import documents_in
from tests.support.programs import equations

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
B, S, H, D, W, M, K = 2, 19, 5, 8, 4, 3, 3
C = S // M
PACKED = np.array([[0] * 2 + [1] * 10 + [2] * 2 + [1] * 5, [5] * 18 + [0]], np.int32)
FULL = np.ones((B, S), np.int32)


def seen_in(segment_ids: np.ndarray) -> Visibility:
    return Visibility(documents_in(segment_ids), W, M)


def problem(seed: int, dtype: Any = np.float32):
    """q, kv, entries and sinks, and the cotangents of output and log-sum-exp."""
    return support.operands(np.random.default_rng(seed), B, S, H, D, C, dtype)


def some_indices(seed: int) -> np.ndarray:
    """In any order, with duplicates, with none, out of range and not visible."""
    return np.random.default_rng([seed, 1]).integers(-2, C + 2, (B, S, K)).astype(np.int32)


attend = jax.jit(both_ways, static_argnames=("scale", "implementation"))


def expectation(args, segment_ids: np.ndarray, indices: np.ndarray | None, cotangents, scale: float = D**-0.5):
    """The same from the reference, in float64."""
    window, entry = reference_visibility(segment_ids, W, M)
    if indices is not None:
        entry &= (np.asarray(indices)[..., None] == np.arange(C)).any(2)
    return support.expectation(args, (window, entry), cotangents, scale)


# ------------------------------------------------------------------------------------------------------------- parity


@every_implementation
@pytest.mark.parametrize("cotangent", ["out", "lse", "both"])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("ids", [PACKED, FULL], ids=["packed", "full"])
def test_outputs_and_gradients_match_the_reference(ids, indexed, with_sinks, cotangent, implementation):
    (args, (of_out, of_lse)), indices = problem(1), some_indices(1) if indexed else None
    args = args if with_sinks else (*args[:3], None)
    cotangents = (of_out * (cotangent != "lse"), of_lse * (cotangent != "out"))
    actual = attend(args, seen_in(ids), indices, cotangents, implementation=implementation)
    expected = expectation(args, ids, indices, cotangents)
    assert_same(actual, expected)
    reached = {name for name, gradient in expected[1].items() if gradient is not None and (gradient != 0).any()}
    assert reached == set(NAMES) - ({"sinks"} if cotangent == "lse" or not with_sinks else set())


@every_implementation
@given(seed=st.integers(0, 1 << 30), longest=st.sampled_from([1, 2, 3, 7, 19]), indexed=st.booleans())
def test_any_packed_rows_match_the_reference(implementation, seed, longest, indexed):
    ids, indices = random_segment_ids(seed, B, S, max_document=longest), some_indices(seed) if indexed else None
    args, cotangents = problem(seed)
    actual = attend(args, seen_in(ids), indices, cotangents, implementation=implementation)
    assert_same(actual, expectation(args, ids, indices, cotangents))


@every_implementation
@pytest.mark.parametrize(
    "documents",
    [Documents.unpacked(B, S), Documents.from_lengths(np.array([S, 11], np.int32), S)],
    ids=["unpacked", "padded"],
)
def test_static_facts_about_documents_change_nothing(documents, implementation):
    """A backend may go another way where documents are known to be aligned or not to be packed."""
    (args, cotangents), indices = problem(2), some_indices(2)
    ids = np.where(documents.is_padding, 0, 1)
    actual = attend(args, Visibility(documents, W, M), indices, cotangents, implementation=implementation)
    assert_same(actual, expectation(args, ids, indices, cotangents))


@every_implementation
def test_without_entries_there_is_the_window_alone(implementation):
    """A layer without a compressor, and a row shorter than a window of one that has it."""
    (q, kv, _, sinks), cotangents = problem(3)
    nothing = np.zeros((B, 0, D), np.float32)
    none_selected = np.full((B, S, 1), -1, np.int32)
    expected, gradients = expectation((q, kv, np.zeros((B, C, D)), sinks), PACKED, none_selected, cotangents)
    for ratio, entries, indices in ((0, None, None), (S + 1, None, none_selected), (S + 1, nothing, None)):
        visibility = Visibility(seen_in(PACKED).documents, W, ratio)
        args = (q, kv, entries, sinks)
        actual, actual_gradients = attend(args, visibility, indices, cotangents, implementation=implementation)
        absent = actual_gradients.pop("entries")
        assert absent is None if entries is None else absent.shape == nothing.shape
        wanted = {name: g for name, g in gradients.items() if name != "entries"}
        assert_same((actual, actual_gradients), (expected, wanted))


@every_implementation
@pytest.mark.parametrize("scale", [0.0, 0.6])
def test_scale_is_of_the_logits_and_not_of_the_sink(scale, implementation):
    args, cotangents = problem(4)
    actual = attend(args, seen_in(PACKED), None, cotangents, scale=scale, implementation=implementation)
    assert_same(actual, expectation(args, PACKED, None, cotangents, scale=float(scale)))


MISTAKES = {
    "window one wider": lambda a, v, i: (a, Visibility(v.documents, W + 1, M), i),
    "window one narrower": lambda a, v, i: (a, Visibility(v.documents, W - 1, M), i),
    "no packing": lambda a, v, i: (a, Visibility(Documents.unpacked(B, S), W, M), i),
    "no sinks": lambda a, v, i: ((*a[:3], None), v, i),
    "scaled sinks": lambda a, v, i: ((*a[:3], a[3] * np.float32(D**-0.5)), v, i),
    "sinks of other heads": lambda a, v, i: ((*a[:3], a[3][::-1]), v, i),
    "entries one slot on": lambda a, v, i: ((*a[:2], np.roll(a[2], 1, axis=1), a[3]), v, i),
    "all entries": lambda a, v, i: (a, v, None),
    "no entries": lambda a, v, i: (a, v, np.full_like(i, -1)),
    "one set of entries for all queries": lambda a, v, i: (a, v, np.broadcast_to(i[:, -1:], i.shape)),
    "-1 taken for 0": lambda a, v, i: (a, v, np.maximum(i, 0)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_answer_is_told_from_the_right_one(mistake):
    (args, cotangents), indices = problem(5), some_indices(5)
    expected = expectation(args, PACKED, indices, cotangents)
    wrong = attend(*MISTAKES[mistake](args, seen_in(PACKED), indices), cotangents, implementation="dense")
    with pytest.raises(AssertionError, match="elements differ"):
        assert_close(wrong[0][0], expected[0][0], np.float32)
    with pytest.raises(AssertionError, match="gradient"):
        assert_gradients_close(wrong[1]["kv"], expected[1]["kv"], np.float32)


# ------------------------------------------------------------------------------------------------------------- dtypes


@every_implementation
def test_bfloat16_inputs_are_computed_in_float32(implementation):
    (args, cotangents), indices = problem(6, jnp.bfloat16), some_indices(6)
    (out, lse), gradients = attend(args, seen_in(PACKED), indices, cotangents, implementation=implementation)
    assert out.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    assert [gradients[name].dtype for name in NAMES] == [jnp.bfloat16] * 3 + [jnp.float32]
    (expected_out, expected_lse), expected_gradients = expectation(args, PACKED, indices, cotangents)
    # Products of bfloat16 are exact in float32, so the log-sum-exp has no excuse, nor has the float32 sinks' gradient.
    assert_close(lse, expected_lse, np.float32)
    assert_close(out, expected_out, jnp.bfloat16)
    assert_gradients_close(gradients, expected_gradients, jnp.bfloat16)


@every_implementation
def test_float64_inputs_are_computed_in_float64(implementation):
    with jax.enable_x64(True):
        indices, wide = some_indices(7), jax.tree.map(lambda a: a.astype(np.float64), problem(7, np.float64))
        args, cotangents = wide
        actual = attend(args, seen_in(PACKED), indices, cotangents, implementation=implementation)
        assert {a.dtype for a in jax.tree.leaves(actual)} == {np.dtype(np.float64)}
        assert_same(actual, expectation(args, PACKED, indices, cotangents), np.float64, np.float64)


@every_implementation
def test_gradients_are_those_of_finite_differences(implementation):
    ids = np.array([[0, 1, 1, 1, 2, 2, 2]], np.int32)
    indices = jnp.asarray([[[-1, 9]] * 3 + [[0, 0]] * 2 + [[2, -1]] * 2], jnp.int32)
    rng = np.random.default_rng(8)
    with jax.enable_x64(True):
        args = [jnp.asarray(rng.normal(size=shape)) for shape in ((1, 7, 2, 3), (1, 7, 3), (1, 3, 3), (2,))]
        visibility = Visibility(Documents.from_segment_ids(ids), 2, 2)

        def run(q, kv, entries, sinks):
            out, lse = core_attention(
                q, kv, entries, visibility=visibility, indices=indices, sinks=sinks, return_lse=True,
                implementation=implementation,
            )  # fmt: skip
            return out, lse[:, 1:]  # the padding row's is -inf, which has no differences

        check_grads(jax.jit(run), args, order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


# ------------------------------------------------------------------------------------------------------------ algebra


@every_implementation
def test_results_over_disjoint_keys_merge_by_their_log_sum_exps(implementation):
    """Window and entries apart, then together: the joint result, and the joint gradients.

    What the entries alone give: one more dim puts a logit of -1e4 on every raw key, whose weight is then zero.
    """
    ((q, kv, entries, _), cotangents), visibility = problem(9), seen_in(PACKED)

    def with_dim(x, value):
        return jnp.concatenate([x, jnp.full((*x.shape[:-1], 1), value, x.dtype)], axis=-1)

    def merged(q, kv, entries):
        attend_to = functools.partial(core_attention, scale=D**-0.5, return_lse=True, implementation=implementation)
        window = Visibility(visibility.documents, W, 0)
        out_w, lse_w = attend_to(q, kv, visibility=window)
        hidden, entries = with_dim(kv, -1e4 * D**0.5), with_dim(entries, 0.0)
        out_e, lse_e = attend_to(with_dim(q, 1.0), hidden, entries, visibility=visibility)
        any_key = lse_w > -jnp.inf
        lse = jnp.logaddexp(jnp.where(any_key, lse_w, 0.0), jnp.where(any_key, lse_e, 0.0))
        share_w = jnp.where(any_key, jnp.exp(lse_w - lse), 0.0)[..., None]
        out = out_w * share_w + out_e[..., :D] * (1 - share_w)
        return out, jnp.where(any_key, lse, -jnp.inf)

    results, pull = jax.vjp(jax.jit(merged), *map(jnp.asarray, (q, kv, entries)))
    gradients = pull(tuple(jnp.asarray(c, jnp.float32) for c in cotangents))
    expected, expected_gradients = expectation((q, kv, entries, None), PACKED, None, cotangents)
    actual = (results, dict(zip(NAMES[:3], gradients, strict=True)))
    assert_same(actual, (expected, {name: expected_gradients[name] for name in NAMES[:3]}))


@every_implementation
def test_order_of_the_batch_does_not_matter_to_the_bit(implementation):
    # Four heads: with five, XLA computes the last elements of a loop by scalar code that rounds unlike its vectors.
    ((q, kv, entries, sinks), cotangents), indices = problem(10), some_indices(10)
    args, cotangents = [q[:, :, :4], kv, entries, sinks[:4]], [c[:, :, :4] for c in cotangents]
    results, gradients = attend(args, seen_in(PACKED), indices, cotangents, implementation=implementation)
    flipped = [a[::-1] for a in args[:3]] + [args[3]]
    other, other_gradients = attend(
        flipped, seen_in(PACKED[::-1]), indices[::-1], [c[::-1] for c in cotangents], implementation=implementation
    )
    for a, b in zip(results, other, strict=True):
        np.testing.assert_array_equal(a, b[::-1])
    for name in NAMES[:3]:
        np.testing.assert_array_equal(gradients[name], other_gradients[name][::-1], err_msg=name)


@every_implementation
def test_vmap_over_one_more_axis(implementation):
    many, ids = [problem(seed)[0] for seed in (11, 12, 13)], np.stack([PACKED, FULL, PACKED[::-1]])
    stacked, indices = [np.stack(a) for a in zip(*many, strict=True)], np.stack([some_indices(s) for s in (11, 12, 13)])

    def run(q, kv, entries, sinks, ids, indices):
        visibility = Visibility(Documents.from_segment_ids(ids), W, M)
        return core_attention(
            q, kv, entries, visibility=visibility, indices=indices, sinks=sinks, implementation=implementation
        )

    together = jax.jit(jax.vmap(run))(*stacked, ids, indices)
    for n in range(3):
        alone = jax.jit(run)(*many[n], ids[n], indices[n])
        assert_close(together[n], alone, np.float32)


def test_without_the_log_sum_exp_the_output_is_the_same():
    (args, cotangents), indices = problem(14), some_indices(14)
    (expected, _), _ = attend(args, seen_in(PACKED), indices, cotangents, implementation="chunked")
    actual = jax.jit(core_attention)(*args[:3], visibility=seen_in(PACKED), indices=indices, sinks=args[3])
    assert_close(actual, expected, np.float32)


def test_documents_and_indices_are_data():
    """Others of the same shapes trace nothing anew."""
    traces = []

    def run(args, visibility, indices):
        traces.append(1)
        return core_attention(*args[:3], visibility=visibility, indices=indices, sinks=args[3])

    run = jax.jit(run)
    for seed, ids in enumerate((PACKED, FULL, np.zeros_like(FULL))):
        run(problem(seed)[0], seen_in(ids), some_indices(seed))
    assert len(traces) == 1


# ----------------------------------------------------------------------------------------- one head of keys and values


# What passes arrays on to steps of its own, or puts a tile in its place.
_PASSING_ON = {
    "dot_general",
    "jit",
    "pjit",
    "custom_vjp_call",
    "custom_jvp_call",
    "scan",
    "while",
    "dynamic_update_slice",
}


def repeats_keys(function, *args) -> bool:
    """Whether some step turns an array of key vectors [..., D] into one of at least H times as many elements."""
    for equation in equations(jax.make_jaxpr(function)(*args).jaxpr):
        name = equation.primitive.name
        read, made = (
            [v.aval for v in side if isinstance(v.aval, jax.core.ShapedArray)]
            for side in (equation.invars, equation.outvars)
        )
        # Adding rows [K, D] in their places in [B, C, D] repeats none: that has no axis for heads.
        if name in _PASSING_ON or (name in ("scatter-add", "scatter_add") and made[0].ndim == 3):
            continue
        keys = [a for a in read if a.ndim >= 2 and a.shape[-1] == D and jnp.issubdtype(a.dtype, jnp.floating)]
        if any(out.size >= H * a.size for a in keys for out in made):
            return True
    return False


@every_implementation
def test_the_shared_keys_are_never_repeated_for_the_heads(implementation):
    (args, cotangents), indices = problem(15), some_indices(15)
    both_ways = functools.partial(attend, implementation=implementation)
    assert not repeats_keys(both_ways, args, seen_in(PACKED), indices, cotangents)

    def repeating(q, kv, entries, sinks):
        return jnp.einsum("bshd,bnhd->bshn", q, jnp.broadcast_to(kv[:, :, None], (B, S, H, D)))

    assert repeats_keys(jax.jit(repeating), *args)
    assert repeats_keys(lambda q, kv, *_: q * jnp.repeat(kv[:, :, None], H, axis=2), *args)


@pytest.mark.parametrize("selected", [None, 3])
def test_nor_where_there_are_too_many_entries_for_one_softmax(selected):
    """By whichever way the default goes over many entries, all of them or each query's selected ones."""
    length, slots = 550, 550 // M
    shapes = {"q": (B, length, H, D), "kv": (B, length, D), "entries": (B, slots, D), "sinks": (H,)}
    args = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes.values())
    indices = None if selected is None else jax.ShapeDtypeStruct((B, length, selected), jnp.int32)
    cotangents = args[0], jax.ShapeDtypeStruct((B, length, H), jnp.float32)
    visibility = seen_in(random_segment_ids(16, B, length, max_document=90))
    assert not repeats_keys(attend, args, visibility, indices, cotangents)
