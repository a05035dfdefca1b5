"""The choice of entries: exact, ties to the lower slot, nothing unseen, whatever the block."""

import functools

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foveal.geometry import Documents, TileRanges, Visibility
from foveal.ops import indexing, select_entries
from foveal.testing.generators import distinct_values, random_segment_ids
from foveal.testing.reference import reference_top_k, reference_visibility
from tests.support.documents import documents_in, each_alone

B, S, I, J, M = 2, 26, 3, 4, 3  # noqa: E741
C = S // M
PACKED = np.array([[0] * 2 + [1] * 13 + [2] * 2 + [1] * 9, [5] * 25 + [0]], np.int32)
FULL = np.ones((B, S), np.int32)
SEEN, SEEN_UNPACKED = (reference_visibility(ids, 4, M)[1] for ids in (PACKED, FULL))


def select_of(q, weights, keys, segment_ids, *, top_k: int, block_size: int | None = None):
    visibility = Visibility(Documents.from_segment_ids(segment_ids), sliding_window=4, compress_ratio=M)
    return select_entries(q, weights, keys, visibility=visibility, top_k=top_k, block_size=block_size)


def select_of_unpacked(q, weights, keys, **options):
    return select_entries(q, weights, keys, visibility=Visibility(Documents.unpacked(*q.shape[:2]), 4, M), **options)


select, select_unpacked = (
    jax.jit(function, static_argnames=("top_k", "block_size")) for function in (select_of, select_of_unpacked)
)


def scores_by_hand(q, weights, keys) -> np.ndarray:
    q, weights, keys = (np.asarray(a).astype(np.float64) for a in (q, weights, keys))
    with np.errstate(invalid="ignore"):
        return np.einsum("bsi,bsic->bsc", weights, np.maximum(np.einsum("bsij,bcj->bsic", q, keys), 0))


def best_by_hand(scores: np.ndarray, visible: np.ndarray, top_k: int) -> np.ndarray:
    """A stable sort of the visible slots by descending score, NaN left out; what comes first, ascending, then -1."""
    slots = scores.shape[-1]
    able = visible & ~np.isnan(scores)
    best = np.lexsort((-np.where(able, scores, 0), ~able), axis=-1)[..., :top_k]  # stable; 0.0 == -0.0
    chosen = np.sort(np.where(np.take_along_axis(able, best, axis=-1), best, slots), axis=-1)
    return np.where(chosen < slots, chosen, -1).astype(np.int32)


def small_integers(seed: int, largest: int = 2) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Few values and exact arithmetic: ties everywhere, negative weights, rows whose scores are all zero."""
    rng = np.random.default_rng(seed)
    shapes = ((B, S, I, J), (B, S, I), (B, C, J))
    q, weights, keys = (rng.integers(-largest, largest, shape, endpoint=True).astype(np.float32) for shape in shapes)
    return q, weights, keys


def as_scores(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, weights, keys whose scores are exactly `scores` [B, S, C], finite: one-hot keys, one head for each sign."""
    batch, length, slots = scores.shape
    q = np.stack([np.maximum(scores, 0), np.maximum(-scores, 0)], axis=2)
    weights = np.broadcast_to(np.array([1.0, -1.0], np.float32), (batch, length, 2))
    return q, weights, np.broadcast_to(np.eye(slots, dtype=np.float32), (batch, slots, slots))


# ------------------------------------------------------------------------------------------------------------- choice


@pytest.mark.parametrize("top_k", [1, 3, 100])
@given(seed=st.integers(0, 1 << 30), packed=st.booleans())
def test_exact_choice_with_ties_everywhere(top_k, seed, packed):
    ids = random_segment_ids(seed, B, S, max_document=26) if packed else FULL
    problem = small_integers(seed)
    visible = reference_visibility(ids, 4, M)[1]
    actual = np.asarray(select(*problem, ids, top_k=top_k))
    assert actual.dtype == np.int32
    scores = scores_by_hand(*problem)
    np.testing.assert_array_equal(actual, best_by_hand(scores, visible, top_k))
    for b in range(B):
        reference = reference_top_k(scores[b].astype(np.float32), visible[b], top_k)
        np.testing.assert_array_equal(actual[b], reference[:, : min(top_k, C)])


@given(seed=st.integers(0, 1 << 30))
def test_any_scores_with_a_clear_order(seed):
    scores = distinct_values((B, S, C), seed)
    actual = np.asarray(select(*as_scores(scores), PACKED, top_k=3))
    np.testing.assert_array_equal(actual, best_by_hand(scores, SEEN, 3))


def test_rows_of_zeros_take_the_lowest_slots():
    """ReLU leaves whole rows at zero, of either sign: all of them tie."""
    q, weights, keys = small_integers(0)
    visible = SEEN
    expected = best_by_hand(np.zeros((B, S, C)), visible, 3)
    for sign in (1.0, -1.0, 0.0):
        silent = -np.abs(q) - 1, sign * (np.abs(weights) + 1), np.abs(keys)
        np.testing.assert_array_equal(select(*silent, PACKED, top_k=3), expected)
    np.testing.assert_array_equal(select(q, weights, np.copysign(0.0 * keys, keys), PACKED, top_k=3), expected)
    one_head = (-np.ones((B, S, 1, J), np.float32), -np.ones((B, S, 1), np.float32), np.abs(keys))
    np.testing.assert_array_equal(select(*one_head, PACKED, top_k=3), expected)


@given(data=st.data())
def test_special_scores(data):
    """On the scores themselves, since no product makes these on demand: +-0, +-inf, NaN, very large and small ones."""
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 3e38, -3e38, 1e-37, -1e-37]
    drawn = data.draw(st.lists(st.sampled_from(special), min_size=40, max_size=40))
    scores = np.array(drawn, np.float32).reshape(1, 5, 8)
    first = np.array([data.draw(st.lists(st.integers(0, 8), min_size=5, max_size=5))], np.int32)
    end = np.minimum(first + np.array([data.draw(st.lists(st.integers(0, 8), min_size=5, max_size=5))]), 8)
    slot = np.arange(8)
    visible = (slot >= first[..., None]) & (slot < end[..., None])
    for count in (1, 3, 8):
        actual = best_slots(scores, first, end.astype(np.int32), count)
        np.testing.assert_array_equal(actual, best_by_hand(scores, visible, count))


@functools.partial(jax.jit, static_argnums=3)
def both_ways(scores, first, end, count: int) -> tuple[jax.Array, jax.Array]:
    """By sorting, and by bisection."""
    ranks = indexing.rank(scores, TileRanges(first, end, first, end).sees(0, scores.shape[2]))
    return indexing._best_by_sorting(ranks, count), indexing._best_by_bisection(ranks, count)


def best_slots(scores: np.ndarray, first: np.ndarray, end: np.ndarray, count: int) -> np.ndarray:
    """[B, T, count] of scores [B, T, C]; both ways agree."""
    by_sorting, by_bisection = both_ways(scores, first, end, count)
    np.testing.assert_array_equal(by_bisection, by_sorting)
    return np.asarray(by_sorting)


def test_ties_at_sizes_of_use():
    """Hundreds of equal scores on both sides of the border, in rows that see a few slots, half of them and all."""
    slots, count = 4096, 512
    scores = np.random.default_rng(10).integers(-2, 2, (2, 12, slots), endpoint=True).astype(np.float32)
    scores[0, 3], scores[1, 7] = 0.0, np.where(np.arange(slots) % 3, -0.0, 0.0)
    first = np.tile(np.arange(12, dtype=np.int32) * 40, (2, 1))
    end = np.minimum(first + np.array([[300, slots // 2] * 6, [511, 512, 513, slots] * 3], np.int32), slots)
    slot = np.arange(slots)
    visible = (slot >= first[..., None]) & (slot < end[..., None])
    np.testing.assert_array_equal(best_slots(scores, first, end, count), best_by_hand(scores, visible, count))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poisoned_keys(poison):
    """A NaN score is never chosen; an infinite one is by its sign, and -inf still comes before nothing at all."""
    weight = np.where(np.arange(S) % 2, 1.0, -1.0).astype(np.float32)
    q, weights = np.ones((B, S, 1, 1), np.float32), np.broadcast_to(weight[None, :, None], (B, S, 1))
    keys = np.broadcast_to(np.arange(1, C + 1, dtype=np.float32)[None, :, None], (B, C, 1)).copy()
    keys[:, [0, 4]] = poison
    scores = scores_by_hand(q, weights, keys)
    visible = SEEN_UNPACKED
    for top_k in (1, 3, 100):
        actual = np.asarray(select(q, weights, keys, FULL, top_k=top_k))
        np.testing.assert_array_equal(actual, best_by_hand(scores, visible, top_k))
        assert np.isnan(poison) != np.isin(actual, [0, 4]).any()


def test_poisoned_queries_choose_nothing_and_disturb_nobody():
    q, weights, keys = small_integers(3)
    before = np.asarray(select(q, weights, keys, FULL, top_k=3))
    q[0, 20], weights[1, 21] = np.nan, np.nan
    expected = before.copy()
    expected[0, 20] = expected[1, 21] = -1
    np.testing.assert_array_equal(select(q, weights, keys, FULL, top_k=3), expected)


def test_what_is_not_seen_is_never_chosen_and_never_matters():
    """The unseen hold the highest scores, then NaN, and the choice stays what it was."""
    problem = small_integers(4)
    visible = SEEN
    anybody = np.logical_or.reduce(visible, axis=1)
    assert 0 < anybody.sum() < 2 * C
    clean = np.asarray(select(*problem, PACKED, top_k=3))
    for value in (1e9, np.nan, np.inf):
        keys = np.where(anybody[:, :, None], problem[2], np.float32(value))
        np.testing.assert_array_equal(select(*problem[:2], keys, PACKED, top_k=3), clean)
    scores = np.where(visible, distinct_values((B, S, C), 2), 100).astype(np.float32)
    chosen = np.asarray(select(*as_scores(scores), PACKED, top_k=C))
    for b, t in np.ndindex(B, S):
        seen = np.flatnonzero(visible[b, t])
        np.testing.assert_array_equal(chosen[b, t], np.pad(seen, (0, C - len(seen)), constant_values=-1))


def test_packed_documents_choose_as_each_alone():
    q, weights, keys = small_integers(5)
    together = np.asarray(select(q, weights, keys, PACKED, top_k=2))
    for b, start, stop in ((0, 2, 15), (0, 17, 26), (1, 0, 25)):
        first, rows = start // M, (slice(b, b + 1), slice(start, stop))
        slots = slice(first, first + (stop - start) // M)
        alone = select_unpacked(q[rows], weights[rows], keys[b : b + 1, slots], top_k=2)
        np.testing.assert_array_equal(together[b, start:stop], np.where(alone >= 0, alone + first, -1)[0])


@pytest.mark.parametrize("block_size", [1, 5, 8, 13, 25, 26, 27, 1000])
def test_block_size_does_not_matter(block_size):
    problem = small_integers(6)
    expected = best_by_hand(scores_by_hand(*problem), SEEN, 3)
    np.testing.assert_array_equal(select(*problem, PACKED, top_k=3, block_size=block_size), expected)


@pytest.fixture(scope="module")
def many_blocks():
    """Documents, operands of a choice of 100 with ratio 2, and what is to be chosen."""
    rng, shapes = np.random.default_rng(11), ((2, 2600, 3, 2), (2, 2600, 3), (2, 1300, 2))
    ids = np.repeat([[1, 2, 0, 3], [4, 0, 5, 6]], [150, 1751, 99, 600], axis=1)
    operands = [rng.integers(-2, 3, shape).astype(np.float32) for shape in shapes]
    visible = each_alone(ids, 4, 2)[1]
    assert (visible.sum(axis=-1) > 500).any()
    return documents_in(ids), operands, best_by_hand(scores_by_hand(*operands), visible, 100)


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_many_blocks_of_entries(many_blocks, device, monkeypatch):
    """Some queries see less than what is chosen and others more; documents begin and end within blocks of both."""
    monkeypatch.setattr(indexing, "platform", lambda: device)
    documents, operands, expected = many_blocks
    run = functools.partial(select_entries, visibility=Visibility(documents, 4, 2), top_k=100)
    np.testing.assert_array_equal(jax.jit(run)(*operands), expected)


@pytest.mark.parametrize("poison", [np.nan, 3e38])
def test_a_score_that_is_not_a_number_is_not_chosen_where_there_is_no_choice(poison):
    """A query that sees fewer entries than it may have gets them all, but for this: its sum overflows both ways."""
    q, keys = np.ones((1, 8, 2, 2), np.float32), np.ones((1, 2, 2), np.float32)
    weights = np.tile(np.array([1.0, -1.0], np.float32), (1, 8, 1))
    keys[0, 1] = poison
    chosen = select_unpacked(q, weights, keys, top_k=2)
    np.testing.assert_array_equal(chosen[0], [[-1, -1]] * 2 + [[0, -1]] * 6)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poison_among_many_heads(poison):
    """Sizes at which XLA makes one loop of the sum over heads: in it a NaN must stay one. All scores are negative."""
    rng = np.random.default_rng(12)
    length, heads, dim, top_k = 128, 16, 32, 3
    q, weights, keys = (
        rng.normal(size=s) for s in ((2, length, heads, dim), (2, length, heads), (2, length // M, dim))
    )
    q, weights, keys = (a.astype(np.float32) for a in (q, -np.abs(weights), keys))
    keys[0, 9, 5], q[1, 100, 2, 3], weights[0, 90, 1] = poison, poison, np.nan
    keys[1, 1, 7] = poison  # seen where there is no choice as well
    visible = reference_visibility(np.ones((2, length), np.int32), 4, M)[1]
    expected = best_by_hand(scores_by_hand(q, weights, keys), visible, top_k)
    for block_size in (None, 1, 7):
        chosen = select_unpacked(q, weights, keys, top_k=top_k, block_size=block_size)
        np.testing.assert_array_equal(chosen, expected, err_msg=str(block_size))


def test_deterministic_and_equivariant_to_the_order_of_the_batch():
    q, weights, keys = (distinct_values(shape, 7) for shape in ((B, S, I, J), (B, S, I), (B, C, J)))
    once = np.asarray(select(q, weights, keys, PACKED, top_k=3))
    for _ in range(3):
        np.testing.assert_array_equal(select(q, weights, keys, PACKED, top_k=3), once)
    flipped = select(q[::-1], weights[::-1], keys[::-1], PACKED[::-1], top_k=3)
    np.testing.assert_array_equal(flipped, once[::-1])


def test_documents_are_data():
    """Other documents of the same shape trace nothing anew, prepared outside the jitted function or inside."""
    traces = []

    def run(problem, visibility):
        traces.append(1)
        return select_entries(*problem, visibility=visibility, top_k=3)

    run, problem = jax.jit(run), small_integers(8)
    for ids in (PACKED, FULL, np.zeros_like(FULL)):
        actual = run(problem, Visibility(documents_in(ids), 4, M))
        np.testing.assert_array_equal(actual, select(*problem, ids, top_k=3))
    assert len(traces) == 1
    np.testing.assert_array_equal(select_unpacked(*problem, top_k=3), select(*problem, FULL, top_k=3))


@pytest.mark.parametrize("where", ["in the product", "over the heads"])
def test_bfloat16_scores_are_float32(where):
    """256 and 257 are one number in bfloat16, so a sum that is rounded to it would tie."""
    scores = np.tile(np.array([256.0, 257.0, 0.0, 258.0, 259.0, 0.0, 260.0, 0.0]), (B, S, 1))
    halves, axis = (np.floor(scores / 2), np.ceil(scores / 2)), {"in the product": -1, "over the heads": 2}[where]
    q = np.concatenate([half[:, :, None] for half in halves], axis=axis)  # exact in bfloat16, unlike their sums
    keys = np.tile(np.eye(C), (B, 1, q.shape[-1] // C))
    args = (jnp.asarray(a).astype(jnp.bfloat16) for a in (q, np.ones(q.shape[:3]), keys))
    actual = select(*args, segment_ids=FULL, top_k=3)
    np.testing.assert_array_equal(actual, best_by_hand(scores, SEEN_UNPACKED, 3))


@pytest.mark.parametrize("length", [0, 1, 2])
def test_no_entries_no_choice(length):
    args = (jnp.zeros((B, length, I, J)), jnp.zeros((B, length, I)), jnp.zeros((B, 0, J)))
    chosen = select_unpacked(*args, top_k=3)
    assert chosen.shape == (B, length, 0)
    assert chosen.dtype == jnp.int32


def test_no_gradient_passes():
    @jax.jit
    @jax.grad
    def gradients_of(problem):
        chosen = select(*problem, PACKED, top_k=3)
        return jnp.sum(jnp.take(problem[2].sum(-1)[0], jnp.maximum(chosen, 0))) + jnp.sum(chosen.astype(jnp.float32))

    gradients = gradients_of(small_integers(9))
    np.testing.assert_array_equal(gradients[0], 0.0)
    np.testing.assert_array_equal(gradients[1], 0.0)
    assert (np.asarray(gradients[2]) != 0).any()  # by way of the values taken, and no other
    np.testing.assert_array_equal(gradients[2][1], 0.0)


# ------------------------------------------------------------------------------------------------------------- errors

GOOD = {"q": (B, S, I, J), "weights": (B, S, I), "keys": (B, C, J)}


def call(shapes: dict[str, tuple[int, ...]], *, jitted: bool = False, ratio: int = M, **options):
    visibility = Visibility(Documents.unpacked(B, S), 4, ratio)
    run = functools.partial(select_entries, visibility=visibility, **{"top_k": 3, **options})
    return (jax.jit(run) if jitted else run)(*(jnp.zeros(shape) for shape in (GOOD | shapes).values()))


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        pytest.param("q", {"q": (B, S, J)}, id="q: rank"),
        pytest.param("q", {"q": (B, S + 1, I, J), "weights": (B, S + 1, I)}, id="q: rows"),
        pytest.param("q", {"q": (1, S, I, J), "weights": (1, S, I), "keys": (1, C, J)}, id="q: batch"),
        pytest.param("weights", {"weights": (B, S, I + 1)}, id="weights: heads"),
        pytest.param("weights", {"weights": (B, S)}, id="weights: rank"),
        pytest.param("keys", {"keys": (B, C + 1, J)}, id="keys: slots"),
        pytest.param("keys", {"keys": (B, C, J + 1)}, id="keys: dim"),
        pytest.param("keys", {"keys": (1, C, J)}, id="keys: batch"),
        pytest.param("keys", {"keys": (B, C, I, J)}, id="keys: rank"),
    ],
)
@pytest.mark.parametrize("jitted", [False, True])
def test_shapes_that_do_not_fit_are_refused_by_name(unchecked_annotations, name, shapes, jitted):
    with pytest.raises(ValueError, match=f"^{name}: expected .*, got float32 of shape"):
        call(shapes, jitted=jitted)


@pytest.mark.parametrize("name", ["top_k", "block_size"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3"])
def test_counts_below_one_are_refused_by_name(unchecked_annotations, name, value):
    with pytest.raises(ValueError, match=f"^{name}: expected an int >= 1, got "):
        call({}, **{"block_size": 4, name: value})


@pytest.mark.parametrize("ratio", [0, 2])
def test_entries_are_asked_of_the_visibility(unchecked_annotations, ratio):
    """Keys that fit another ratio, or a layer without entries, are a mistake."""
    with pytest.raises(ValueError, match=r"^keys: expected"):
        call({}, ratio=ratio)
