"""The fused TPU kernels, emulated with memory that holds NaN until it is written, beside `dense`.

What the kernels do on a TPU nobody here can see; that the TPU compiler takes them is tested in `test_fused_programs`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from foveal import Documents, EntryRange, Fused, Visibility, core_attention, explain
from foveal.aot import TARGETS, device_mesh
from foveal.backends.tpu.plan import CHIPS, chip
from foveal.program import device_kind
from tests.support.core_attention import assert_same, both_ways, operands

FUSED = Fused(interpret=True)
H, D = 8, 128  # tiles of 16 tokens: 128 rows


@functools.partial(jax.jit, static_argnames=("implementation", "scale"))
def attend(args, visibility, indices, cotangents, implementation=FUSED, scale=None):
    return both_ways(args, visibility, indices, cotangents, implementation, scale)


def densely(args, visibility, cotangents, scale=None):
    with jax.default_matmul_precision("highest"):
        return attend(args, visibility, None, cotangents, "dense", scale)


def rows(*lengths: int, length: int, batch: int = 1) -> Documents:
    """Documents side by side, each where the one before ends; padding after them."""
    return Documents.from_lengths(np.array([lengths] * batch, np.int32), length)


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows, window and ratio; `block_slots` makes loops of several blocks where there are few slots."""

    documents: Documents
    window: int
    ratio: int
    heads: int = H
    block_slots: int | None = None
    scale: float | None = None


CASES = {
    "one document, fewer slots than the first": Case(Documents.unpacked(1, 150), 128, 4),
    "documents anywhere, padding at the end": Case(rows(50, 3, 61, 1, 17, length=160), 40, 2),
    "padding between documents": Case(
        Documents.from_segment_ids(np.repeat([[0, 1, 0, 2, 3, 0]], [21, 40, 9, 33, 2, 7], axis=1)), 20, 4
    ),
    "several blocks of slots": Case(Documents.unpacked(1, 200), 30, 1, block_slots=16),
    "several blocks of slots, packed": Case(rows(70, 111, length=190), 30, 1, block_slots=32),
    "two rows of a batch": Case(rows(30, 40, length=80, batch=2), 25, 4),
    "a window of one": Case(rows(20, 30, length=64), 1, 2),
    "a window longer than a vector": Case(rows(230, 15, length=250), 200, 128),
    "a row shorter than a tile": Case(Documents.unpacked(1, 5), 3, 2),
    "one row": Case(Documents.unpacked(1, 1), 3, 0),
    "sliding alone": Case(rows(33, 60, length=100), 33, 0),
    "one head": Case(rows(100, 60, length=200), 24, 8, heads=1),
    "heads that are no power of two": Case(rows(50, 20, length=90), 24, 8, heads=6),
    "another scale": Case(rows(50, 20, length=80), 24, 8, scale=0.5),
}


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_dense(name, rng):
    case = CASES[name]
    batch, length = case.documents.shape
    visibility = Visibility(case.documents, case.window, case.ratio)
    args, cotangents = operands(rng, batch, length, case.heads, D, visibility.slots, np.float32)
    fused = dataclasses.replace(FUSED, block_slots=case.block_slots)
    got = attend(args, visibility, None, cotangents, fused, case.scale)
    assert_same(got, densely(args, visibility, cotangents, case.scale))
    padding = np.asarray(case.documents.is_padding)
    (out, lse), gradients = got
    np.testing.assert_array_equal(np.asarray(out)[padding], 0.0)
    np.testing.assert_array_equal(np.asarray(lse)[padding], -np.inf)
    np.testing.assert_array_equal(np.asarray(gradients["q"])[padding], 0.0)


def test_flash_heads_in_bfloat16(rng):
    """64 heads of 512 dims: tiles of several chunks of rows, whose matmuls take turns."""
    visibility = Visibility(rows(30, 25, length=64), 20, 4)
    args, cotangents = operands(rng, 1, 64, 64, 512, visibility.slots, jnp.bfloat16)
    (out, lse), gradients = got = attend(args, visibility, None, cotangents)
    expected = densely(args, visibility, cotangents)
    assert_same(got, expected, jnp.bfloat16)
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, np.float32)
    # Not computed from the rounded output, the sinks' gradient has float32's digits.
    wide = jax.tree.map(lambda a: a.astype(np.float32), (args, cotangents))
    want = np.asarray(densely(wide[0], visibility, wide[1])[1]["sinks"])
    assert gradients["sinks"].dtype == np.float32
    np.testing.assert_allclose(gradients["sinks"], want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("sink", [None, -np.inf, np.inf, 80.0])
def test_sinks_of_any_size(sink, rng):
    visibility = Visibility(rows(30, 25, length=64), 20, 4)
    args, cotangents = operands(rng, 1, 64, H, D, visibility.slots, np.float32)
    sinks = None if sink is None else np.where(np.arange(H) % 2, args[3], np.float32(sink))
    args = (*args[:3], sinks)
    got, expected = attend(args, visibility, None, cotangents), densely(args, visibility, cotangents)
    for gradients in (got[1], expected[1]):
        if sink is None:
            assert gradients.pop("sinks") is None
    assert_same(got, expected)


# --- What queries see or hold that is not finite ----------------------------------------------------------------------

LENGTH = 80
PACKED = Visibility(rows(30, 3, 40, length=LENGTH), 20, 4)


def poisoned(array, at, value=np.nan):
    array = np.array(array)
    array[at] = value
    return array


def test_padding_may_hold_anything(rng):
    args, cotangents = operands(rng, 1, LENGTH, H, D, PACKED.slots, np.float32)
    padding = np.asarray(PACKED.documents.is_padding)
    clean = attend(args, PACKED, None, cotangents)
    dirty = [poisoned(a, padding) for a in args[:2]]
    dirty_cotangents = [poisoned(c, padding) for c in cotangents]
    for got, expected in zip(
        jax.tree.leaves(attend((*dirty, *args[2:]), PACKED, None, dirty_cotangents)),
        jax.tree.leaves(clean),
        strict=True,
    ):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("operand", ["query", "raw key", "entry"])
def test_what_is_not_finite_reaches_those_who_see_it_alone(operand, value, rng):
    args, cotangents = operands(rng, 1, LENGTH, H, D, PACKED.slots, np.float32)
    q, kv, entries, sinks = args
    window, slots = np.asarray(PACKED.window_mask())[0], np.asarray(PACKED.entry_mask())[0]
    reached = np.zeros((LENGTH, H), bool)
    if operand == "query":
        q = poisoned(q, (0, 45, 3, 7), value)
        reached[45, 3] = True
    elif operand == "raw key":
        kv = poisoned(kv, (0, 40, 9), value)
        reached[window[:, 40]] = True
    else:
        entries = poisoned(entries, (0, 10, 9), value)
        reached[slots[:, 10]] = True
    assert 0 < reached.sum() < reached.size
    (out, lse), gradients = attend((q, kv, entries, sinks), PACKED, None, cotangents)
    (clean, clean_lse), _ = attend(args, PACKED, None, cotangents)
    np.testing.assert_array_equal(np.isnan(out)[0].all(-1), reached)
    np.testing.assert_array_equal(np.isnan(lse)[0], reached)
    np.testing.assert_array_equal(np.asarray(out)[0][~reached], np.asarray(clean)[0][~reached])
    np.testing.assert_array_equal(np.asarray(lse)[0][~reached], np.asarray(clean_lse)[0][~reached])
    # As if the queries that are lost had no cotangents.
    quiet = [np.where(reached[None, :, :, None], 0.0, cotangents[0]), np.where(reached[None], 0.0, cotangents[1])]
    sound = *(jnp.where(jnp.isfinite(jnp.asarray(a)), jnp.asarray(a), 0.0) for a in (q, kv, entries)), sinks
    expected = densely(sound, PACKED, [c.astype(np.float32) for c in quiet])[1]
    for name, gradient in gradients.items():
        assert np.isfinite(gradient).all(), name
        want = np.asarray(expected[name])
        np.testing.assert_allclose(gradient, want, rtol=1e-5, atol=1e-5 * np.abs(want).max(), err_msg=name)


def test_huge_keys_that_no_query_sees_change_no_bit(rng):
    """Their products with cotangents overflow; the weights are 0."""
    args, cotangents = operands(rng, 1, LENGTH, H, D, PACKED.slots, np.float32)
    unseen = ~np.asarray(PACKED.entry_mask())[0].any(axis=0)
    assert unseen.any()
    huge = poisoned(args[2], (0, unseen), float(np.finfo(np.float32).max))
    cotangents = 1e6 * cotangents[0], cotangents[1]
    for got, expected in zip(
        jax.tree.leaves(attend((*args[:2], huge, args[3]), PACKED, None, cotangents)),
        jax.tree.leaves(attend(args, PACKED, None, cotangents)),
        strict=True,
    ):
        np.testing.assert_array_equal(got, expected)


# --- Rows that continue others ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("history", [19, 45])
def test_rows_that_continue_a_longer_row(history, rng):
    """The last rows of a row: what stood before them is history, and entries that are already made."""
    window, ratio, before, size = 20, 4, 50, 37
    lengths, counts = np.array([before, 7], np.int32), np.array([size, 21], np.int32)
    visibility = Visibility(
        Documents.continuing(lengths, counts, size), window, entries=EntryRange.of_rows(ratio, 24), history=history
    )
    args, cotangents = operands(rng, 2, size, H, D, 24, np.float32)
    kv = rng.normal(size=(2, history + size, D)).astype(np.float32)
    args = args[0], kv, *args[2:]
    assert_same(attend(args, visibility, None, cotangents), densely(args, visibility, cotangents))


# --- Transformations --------------------------------------------------------------------------------------------------


def test_vmap(rng):
    args = jax.tree.map(jnp.asarray, operands(rng, 1, LENGTH, H, D, PACKED.slots, np.float32)[0])
    q = jnp.stack([args[0], 2 * args[0]])

    def loss(q, kv, implementation):
        out = core_attention(q, kv, args[2], visibility=PACKED, sinks=args[3], implementation=implementation)
        return (out**2).sum()

    def both(implementation):
        return jax.jit(
            jax.vmap(jax.grad(functools.partial(loss, implementation=implementation), argnums=(0, 1)), (0, None))
        )(q, args[1])

    for got, expected in zip(both(FUSED), both("dense"), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_batch_and_heads_over_a_mesh(rng):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    visibility = Visibility(rows(30, 3, length=40, batch=2), 20, 4)
    args, cotangents = operands(rng, 2, 40, 16, D, visibility.slots, np.float32)
    fused = dataclasses.replace(FUSED, sharding=P("data", None, "tensor"))
    with jax.sharding.set_mesh(mesh):
        got = attend(args, visibility, None, cotangents, fused)
    assert_same(got, densely(args, visibility, cotangents))


def test_heads_that_devices_cannot_share():
    mesh = jax.make_mesh((3,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    q, kv, entries = jnp.zeros((1, LENGTH, H, D)), jnp.zeros((1, LENGTH, D)), jnp.zeros((1, PACKED.slots, D))
    fused = dataclasses.replace(FUSED, sharding=P(None, None, "tensor"))
    with jax.sharding.set_mesh(mesh), pytest.raises(NotImplementedError, match="8 heads cannot be divided among 3"):
        core_attention(q, kv, entries, visibility=PACKED, implementation=fused)


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_has_its_chip(target):
    """By the name that JAX has for its devices, which is not the compiler's; an unknown one gets the least VMEM."""
    pytest.importorskip("libtpu")
    with jax.sharding.use_abstract_mesh(device_mesh(target).abstract_mesh):
        assert device_kind() in CHIPS
        assert chip().vmem_bytes == {"v5e": 90, "v5p": 48, "v6e": 90, "tpu7x": 40}[target] << 20
    assert chip().vmem_bytes == 40 << 20


# --- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        pytest.param({"dtype": np.float16}, "take float32 and bfloat16, not float16", id="dtype"),
        pytest.param({"indices": True}, "all visible entries, not to selected ones", id="indices"),
        pytest.param({"precision": "high"}, "precisions 'default' and 'highest'", id="precision"),
        pytest.param({"scale": -1.0}, "need a scale above 0, not -1.0", id="scale"),
        pytest.param({"dim": 96}, "multiples of 128, not 96", id="dim"),
        pytest.param({"slots": 200_000}, "MiB of VMEM for 8 heads and 200000 entries", id="vmem"),
        pytest.param(
            {"implementation": dataclasses.replace(FUSED, sharding=P(None, "x"))}, "over the sequence", id="S"
        ),
        pytest.param(
            {"implementation": dataclasses.replace(FUSED, sharding=P(None, None, None, "x"))},
            "over the head dim",
            id="D",
        ),
        pytest.param({"implementation": "fused"}, "run on TPUs, not on cpu", id="platform"),
        pytest.param(
            {"implementation": dataclasses.replace(FUSED, sharding=P("data", None, "tensor"))},
            "the mesh in context has no axis 'data', 'tensor'",
            id="no mesh",
        ),
    ],
)
def test_calls_that_are_refused(changed, reason):
    changed = dict(changed)
    of, dim = jax.ShapeDtypeStruct, changed.pop("dim", D)
    slots, dtype = changed.pop("slots", 4), changed.pop("dtype", np.float32)
    indices = of((1, 16, 2), np.int32) if changed.pop("indices", False) else None
    implementation = changed.pop("implementation", FUSED)
    visibility = Visibility(Documents.unpacked(1, 16), 8, entries=EntryRange.of_rows(4, slots))

    def explained(q, kv, entries, indices):
        return explain(
            q, kv, entries, visibility=visibility, indices=indices, implementation=implementation, **changed
        ).verdicts[-1].reason  # fmt: skip

    found = []
    jax.eval_shape(
        lambda *a: found.append(explained(*a)),
        of((1, 16, 8, dim), dtype), of((1, 16, dim), dtype), of((1, slots, dim), dtype), indices,
    )  # fmt: skip
    assert found[0].startswith("cannot: ")
    assert reason in found[0]


def test_block_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"^block_slots: expected a multiple of 16, got 40$"):
        Fused(block_slots=40)
    with pytest.raises(ValueError, match=r"expected 1 number, SLOTS, got 2"):
        FUSED.configure(heads=8, blocks=(16, 16))
    assert FUSED.configure(heads=8, blocks=(32,), sharding=P("x")) == dataclasses.replace(
        FUSED, block_slots=32, sharding=P("x")
    )
