"""Prefill and decode are one full pass, however the rows are cut and whatever was taken back in between.

The full pass itself is checked in test_attention.py.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foveal import AttentionConfig, CacheStack, LayerType, left_aligned, unpack
from foveal.testing.numerics import assert_close
from tests.nn.layers import LAYER_TYPES, build, every_layer_type
from tests.nn.serving import CAPACITY, CONFIG, LENGTH, served, text

ROLLBACK = 5
FLASH = AttentionConfig.deepseek_v4_flash()
REAL = {name: getattr(FLASH, name) for name in ("csa_ratio", "hca_ratio", "sliding_window", "rope", "compress_rope")}
REAL |= {"index_topk": 16}
# Windows of one token, of all that a row has, and as wide as the raw window; all entries selected, and one.
SHAPES = [{}, {"sliding_window": 1, "csa_ratio": 1, "hca_ratio": 3}, {"sliding_window": 5, "hca_ratio": 5}]
SHAPES += [{"csa_ratio": 3, "index_topk": 1, "sliding_window": 64}, {"index_topk": 100, "hca_ratio": 48}]
# A sliding layer has neither of what the last one changes.
CASES = [
    (kind, changes) for changes in SHAPES for kind in LAYER_TYPES if (kind, changes) != (LayerType.SLIDING, SHAPES[-1])
]


@pytest.mark.parametrize(("layer_type", "changes"), CASES, ids=str)
def test_every_split_of_a_row(layer_type, changes):
    """Row b holds b tokens, then all of them get what is left, in one chunk: every phase of every window."""
    layer = served(layer_type, **changes)
    row = text(1, rows=1)[0]
    want = layer.full(row[None])[0]
    cache = layer.layer.init_cache(LENGTH + 1, LENGTH)
    splits = range(LENGTH + 1)
    before, cache = layer.append(cache, [row[:split] for split in splits])
    after, cache = layer.append(cache, [row[split:] for split in splits])
    for split in splits:
        assert_close(np.concatenate([before[split], after[split]]), want, np.float32, what=f"split at {split}")
    np.testing.assert_array_equal(cache.lengths, LENGTH)


@every_layer_type
def test_every_prompt_then_token_by_token(layer_type):
    layer, steps = served(layer_type), 12
    row = text(2, rows=1)[0]
    want = layer.full(row[None])[0]
    # As many rows as a row has splits, which is a program that is there: the shortest prompts twice.
    prompts = [n % (LENGTH - steps + 1) for n in range(LENGTH + 1)]
    out, cache = layer.append(layer.layer.init_cache(len(prompts), LENGTH), [row[:n] for n in prompts])
    parts = [out]
    for step in range(steps):
        out, cache = layer.append(cache, [row[n + step : n + step + 1] for n in prompts])
        parts.append(out)
    for n, *outputs in zip(prompts, *parts, strict=True):
        assert_close(np.concatenate(outputs), want[: n + steps], np.float32, what=f"prompt of {n}")


@pytest.mark.slow
@every_layer_type
def test_prompts_around_the_real_windows(layer_type):
    """Ratios 4 and 128, window 128: prompts of 0, 1, m - 1, m, m + 1, W - 1, W and W + 1 tokens, in one batch."""
    layer = served(layer_type, sizes=(1, 260), **REAL)
    row = text(3, rows=1, length=268)[0]
    want = layer.full(row[None])[0]
    prompts = [0, 1, 3, 4, 5, 127, 128, 129, 255, 256, 257]
    cache, done = layer.layer.init_cache(len(prompts), 300), np.zeros_like(prompts)
    # At last the shortest catches up with the longest, which sits out.
    for ends in (prompts, *(np.add(prompts, more) for more in (1, 4, 5, 6)), np.full_like(prompts, 263)):
        out, cache = layer.append(cache, [row[n:end] for n, end in zip(done, ends, strict=True)])
        for i, (n, end) in enumerate(zip(done, ends, strict=True)):
            assert_close(out[i], want[n:end], np.float32, what=f"prompt of {prompts[i]}, {n} to {end}")
        done = np.array(ends)


# One step of a session: what happens to each row, in that order.
STEP = st.fixed_dictionaries(
    {
        "back": st.lists(st.integers(0, ROLLBACK), min_size=3, max_size=3),
        "reset": st.lists(st.sampled_from([False, False, False, True]), min_size=3, max_size=3),
        "order": st.none() | st.lists(st.integers(0, 2), min_size=3, max_size=3),
        "tokens": st.one_of(
            st.lists(st.integers(0, 1), min_size=3, max_size=3),
            st.lists(st.integers(0, 4), min_size=3, max_size=3),
            st.lists(st.integers(0, LENGTH), min_size=3, max_size=3),
        ),
    }
)


@every_layer_type
@settings(max_examples=20)
@given(steps=st.lists(STEP, min_size=2, max_size=8), seed=st.integers(0, 2**20))
def test_any_session_is_a_full_pass_over_what_is_left(layer_type, steps, seed):
    """Rows of different lengths are appended to, taken back, emptied, moved and repeated, with new tokens each time."""
    layer, rng = served(layer_type), np.random.default_rng(seed)
    rows: list[np.ndarray] = [np.zeros((0, CONFIG.hidden_size), np.float32)] * 3
    cache = layer.layer.init_cache(3, CAPACITY, max_rollback=ROLLBACK)
    undoable = [0, 0, 0]
    for step in steps:
        back = np.minimum(step["back"], undoable)
        cache = cache.rollback(back)
        rows = [row[: len(row) - n] for row, n in zip(rows, back, strict=True)]
        undoable = [u - int(n) for u, n in zip(undoable, back, strict=True)]
        cache = cache.reset(np.array(step["reset"]))
        rows = [row[:0] if gone else row for row, gone in zip(rows, step["reset"], strict=True)]
        undoable = [0 if gone else u for u, gone in zip(undoable, step["reset"], strict=True)]
        if step["order"] is not None:
            cache = cache.reorder(np.array(step["order"]))
            rows, undoable = ([old[i] for i in step["order"]] for old in (rows, undoable))
        counts = [min(n, LENGTH - len(row)) for n, row in zip(step["tokens"], rows, strict=True)]
        chunks = [rng.normal(size=(n, CONFIG.hidden_size)).astype(np.float32) for n in counts]
        out, cache = layer.append(cache, chunks)
        rows = [np.concatenate(pair) for pair in zip(rows, chunks, strict=True)]
        undoable = [min(u + n, ROLLBACK) for u, n in zip(undoable, counts, strict=True)]
        np.testing.assert_array_equal(cache.lengths, [len(row) for row in rows])
        np.testing.assert_array_equal(cache.undoable, undoable)
        padded = np.stack([np.pad(row, ((0, LENGTH - len(row)), (0, 0))) for row in rows])
        want = layer.full(padded)
        for i, (row, n) in enumerate(zip(rows, counts, strict=True)):
            assert_close(out[i], want[i, len(row) - n : len(row)], np.float32, what=f"row {i}")


@every_layer_type
def test_what_lies_beyond_a_row_changes_no_bit(layer_type):
    """NaN in every slot that the row's length does not vouch for, and in what other rows hold."""
    layer = served(layer_type)
    x = text(4)
    cache = layer.layer.init_cache(3, CAPACITY, max_rollback=ROLLBACK)
    _, cache = layer.append(cache, [x[0, :21], x[1, :5], x[2, :0]])
    config = layer.config
    ratio, lengths = config.compress_ratio(layer_type), np.asarray(cache.lengths)

    def ring(array, needed):
        rows = array.shape[1]
        keep = np.zeros(array.shape[:2], bool)
        for b, length in enumerate(lengths):
            keep[b, [p % rows for p in range(max(length - needed, 0), length)]] = True
        return jnp.where(keep[:, :, None], array, jnp.nan)

    def state(old, needed):
        complete = np.arange(old.entries.shape[1])[None] < (lengths // ratio)[:, None]
        entries = jnp.where(complete[:, :, None], old.entries, jnp.nan)
        return type(old)(entries, ring(old.kv, needed), ring(old.gate, needed))

    poisoned = {"window": ring(cache.window, config.sliding_window - 1)}
    if cache.compressor is not None:
        needed = 2 * ratio - 1 if cache.indexer is not None else ratio - 1
        poisoned["compressor"] = state(cache.compressor, needed)
        if cache.indexer is not None:
            poisoned["indexer"] = state(cache.indexer, needed)
    assert any(np.isnan(leaf).any() for leaf in jax.tree.leaves(poisoned))
    chunks = [x[0, 21:25], x[1, 5:8], x[2, :4]]
    want, want_cache = layer.append(cache, chunks)
    dirty = type(cache)(**{**{f: getattr(cache, f) for f in cache.__dataclass_fields__}, **poisoned})
    got, dirty = layer.append(dirty, chunks)
    np.testing.assert_array_equal(np.concatenate(got), np.concatenate(want))
    for step in range(12):  # what is stored from now on is as clean
        more = [x[0, 25 + step : 26 + step], x[1, 8 + step : 9 + step], x[2, 4 + step : 5 + step]]
        got, dirty = layer.append(dirty, more)
        want, want_cache = layer.append(want_cache, more)
        np.testing.assert_array_equal(np.concatenate(got), np.concatenate(want))


@pytest.mark.slow
def test_bfloat16_is_near_float32():
    for layer_type in LayerType:
        # Which entries are selected may differ by rounding: all of them are.
        changes = {"index_topk": 100} if layer_type is LayerType.CSA else {}
        layer, x = served(layer_type, dtype=jnp.bfloat16, **changes), text(6)
        want = served(layer_type, **changes).full(x)
        cache = layer.layer.init_cache(3, CAPACITY)
        assert cache.window.dtype == jnp.bfloat16
        out, cache = layer.append(cache, list(x[:, :30]))
        more, _ = layer.append(cache, list(x[:, 30:]))
        assert_close(np.concatenate([out, more], axis=1), want, jnp.bfloat16)


@every_layer_type
def test_one_program_serves_a_generation_in_place(layer_type):
    """300 tokens: the donated cache's buffers reused, a cache of the same type, and the outputs of a full pass."""
    steps, layer = 300, served(layer_type)
    x = text(7, rows=2, length=steps)
    cache = layer.layer.init_cache(2, steps)
    step = jax.jit(layer.layer.decode, donate_argnums=0).lower(cache, jnp.asarray(x[:, :1])).compile()
    memory, outputs = step.memory_analysis(), []
    assert memory is not None
    assert memory.alias_size_in_bytes >= cache.nbytes
    for i in range(steps):
        old, types = cache, jax.tree.map(jax.typeof, cache)
        out, cache = step(cache, x[:, i : i + 1])
        outputs.append(out)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
        assert jax.tree.map(jax.typeof, cache) == types  # nothing that would be traced anew
    assert_close(np.concatenate(outputs, axis=1), layer.full(x), np.float32)


@pytest.mark.parametrize("layer_type", [LayerType.HCA, LayerType.CSA])
def test_a_decoding_step_copies_nothing_of_the_cache(layer_type):
    """Temporaries at a large capacity are an index score and a rank a slot, not keys."""
    layer, capacity = build(layer_type), 1 << 18
    cache = jax.eval_shape(lambda: layer.init_cache(1, capacity))
    token = jax.ShapeDtypeStruct((1, 1, CONFIG.hidden_size), jnp.float32)
    memory = jax.jit(layer.decode, donate_argnums=0).lower(cache, token).compile().memory_analysis()
    assert memory is not None
    key = 4 * (CONFIG.index_head_dim if layer_type is LayerType.CSA else CONFIG.head_dim)
    # An HCA layer has a copy of its entries with those that are not finite zeroed.
    most = (0.25 if layer_type is LayerType.CSA else 1.25) * key * capacity // CONFIG.compress_ratio(layer_type)
    assert memory.temp_size_in_bytes < most


def test_packed_and_left_padded_prompts():
    layer, x = served(LayerType.CSA), text(10)
    lengths = [7, 0, 30]
    packed = np.concatenate([x[row, :n] for row, n in enumerate(lengths)])
    rows = unpack(packed, np.cumsum([0, *lengths]), max_length=48)
    left = np.zeros_like(x)
    for row, n in enumerate(lengths):
        left[row, LENGTH - n :] = x[row, :n]
    aligned = left_aligned(left, np.array(lengths))
    cache = layer.layer.init_cache(3, CAPACITY, max_rollback=ROLLBACK)
    want = layer.full(x)
    for values, counts in (rows, aligned):
        out, filled = layer.traced(cache, values, counts)
        np.testing.assert_array_equal(filled.lengths, lengths)
        for row, n in enumerate(lengths):
            assert_close(out[row, :n], want[row, :n], np.float32)


@every_layer_type
def test_under_vmap_and_sharded_over_the_batch(layer_type):
    layer, x = served(layer_type), text(11, rows=4)
    cache = layer.layer.init_cache(4, CAPACITY)
    held, full = [20, 3, 0, 13], layer.full(x)
    lengths = jnp.array(held)
    want = np.stack([np.pad(full[row, :n], ((0, 20 - n), (0, 0))) for row, n in enumerate(held)])

    one_each = jax.tree.map(lambda leaf: leaf[:, None], cache)
    mapped, mapped_cache = jax.jit(jax.vmap(layer.layer.prefill))(
        one_each, jnp.asarray(x[:, None, :20]), lengths[:, None]
    )
    assert_close(mapped[:, 0], want, np.float32)
    np.testing.assert_array_equal(mapped_cache.lengths[:, 0], lengths)

    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    by_row = jax.NamedSharding(mesh, jax.P("data"))
    # Eight tokens at a time, more than the window keeps, and at last one for whoever holds some: that behind those.
    placed, token, done = jax.device_put(cache, by_row), np.minimum(held, 1), np.zeros(4, int)
    step = jax.jit(layer.layer.prefill, out_shardings=by_row)
    programs = {size: step.lower(*jax.device_put((placed, x[:, :size], done), by_row)).compile() for size in (8, 1)}
    chunks = [(8, np.clip(np.subtract(held, first), 0, 8)) for first in (0, 8, 16)]
    for size, counts in (*chunks, (1, token)):
        chunk = np.stack([row[n : n + size] for row, n in zip(x, done, strict=True)])
        out, placed = programs[size](placed, *jax.device_put((chunk, counts), by_row))
        for row, (n, count) in enumerate(zip(done, counts, strict=True)):
            assert_close(out[row, :count], full[row, n : n + count], np.float32)
            np.testing.assert_array_equal(out[row, count:], 0.0)
        done = done + counts
    # Between devices go shared loop bounds and conditions, scalars, and nothing of a row.
    for compiled in programs.values():
        program = compiled.as_text() or ""
        assert not re.search(r"all-gather|all-to-all|collective-permute", program)
        assert set(re.findall(r" = (\S+) all-reduce\(", program)) <= {"s32[]", "pred[]"}
        assert "num_partitions=4" in program


@pytest.mark.slow
def test_a_stack_of_layers_is_a_cache_of_each():
    layers, x = [served(layer_type) for layer_type in CONFIG.layer_types], text(12)

    def model(stack, chunks):
        caches = []
        for layer, cache in zip(layers, stack, strict=True):
            more, cache = layer.append(cache, chunks)
            caches.append(cache)
            chunks = [chunk + new for chunk, new in zip(chunks, more, strict=True)]
        return chunks, CacheStack(tuple(caches))

    want = x
    for layer in layers:
        want = want + layer.full(want)
    stack = CacheStack.init(CONFIG, batch=3, capacity=CAPACITY, max_rollback=ROLLBACK)
    assert len(stack) == 3
    assert stack.nbytes == sum(cache.nbytes for cache in stack)
    out, stack = model(stack, list(x[:, :30]))
    assert_close(np.stack(out), want[:, :30], np.float32)
    _, stack = model(stack, [x[row, 35 : 35 + n] for row, n in enumerate((4, 1, 0))])
    order, gone = np.array([2, 0, 1]), np.array([True, False, False])
    stack = jax.jit(lambda stack: stack.rollback(np.array([4, 1, 0])).reorder(order))(stack)
    out, stack = model(stack, list(x[order, 30:34]))
    assert_close(np.stack(out), want[order, 30:34], np.float32)
    np.testing.assert_array_equal(stack.reset(gone).lengths, [0, 34, 34])


@pytest.mark.slow
@pytest.mark.parametrize("layer_type", [LayerType.HCA, LayerType.CSA])
def test_at_a_million_tokens(layer_type):
    """As `dense` has it, from a cache of random keys: 131072 and 262144 entries, the last of them complete or not."""
    layer, rng = served(layer_type).layer, np.random.default_rng(0)
    capacity = 1 << 20
    cache = layer.init_cache(1, capacity)
    cache = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype) if leaf.ndim == 3 else leaf, cache
    )
    x = jnp.asarray(text(13, rows=1, length=3))
    dense, decode = jax.jit(functools.partial(layer.decode, implementation="dense")), jax.jit(layer.decode)
    for length in (capacity - 3, capacity - 8, 999_999):
        held = dataclasses.replace(cache, lengths=jnp.array([length]))
        want, _ = dense(held, x)
        got, after = decode(held, x)
        assert_close(got, want, np.float32)
        np.testing.assert_array_equal(after.lengths, length + 3)


@pytest.mark.slow
def test_a_long_row_and_then_a_token():
    """Past 4096 tokens, where an index that was kept too narrow or a table that was too short would show."""
    for layer_type in LayerType:
        layer = served(layer_type, sizes=(1, 4200), index_topk=16)
        x = text(14, rows=1, length=4203)
        want = layer.full(x)[0, 4200:]
        _, cache = layer.append(layer.layer.init_cache(1, 4203), [x[0, :4200]])
        for step in range(3):
            out, cache = layer.append(cache, [x[0, 4200 + step : 4201 + step]])
            assert_close(out[0], want[step : step + 1], np.float32)


def test_no_tokens_at_all():
    for layer_type in LayerType:
        layer = served(layer_type).layer
        cache = layer.init_cache(3, CAPACITY)
        prefill = jax.jit(layer.prefill)
        out, after = prefill(cache, jnp.zeros((3, 0, CONFIG.hidden_size)))
        assert out.shape == (3, 0, CONFIG.hidden_size)
        np.testing.assert_array_equal(after.lengths, 0)
        none = layer.init_cache(0, CAPACITY)
        out, _ = prefill(none, jnp.zeros((0, 4, CONFIG.hidden_size)))
        assert out.shape == (0, 4, CONFIG.hidden_size)
