"""An independent reference for DeepSeek-V4 attention: slow, small, and a plain transcription of the mathematics.

Written from the published description (DeepSeek-V4 technical report, arXiv 2606.19348, equations 9-23, and DeepSeek's
public inference code) in plain `jax.numpy`. It shares only the configuration with the library and deliberately
works differently: every document is cut out of its row and run alone from position 0, windows are lists of tokens,
attention is one dense softmax. A result that agrees with this one was computed independently.

`segment_ids` must be concrete. All else is differentiable; the top-k selection is a constant. The arithmetic runs in
the widest dtype among the inputs, at least float32: float64 inputs under `jax.enable_x64` stay float64 throughout. Each
query holds its own copy of all keys, T * (T + T // m) * D numbers: meant for hundreds of tokens, not thousands.

Dimensions: B batch, S rows, T tokens of one document, E model width, H query heads, D head dim, R rope dims, G output
groups, m compress ratio, n = T // m entries of one document, I indexer heads, J indexer head dim.
"""

import functools
import math
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from foveal.config import AttentionConfig
from foveal.layers import LayerType, RopeConfig

Params = Mapping[str, ArrayLike]


def _einsum(subscripts: str, *operands: jax.Array) -> jax.Array:
    # Accelerators would otherwise multiply float32 in fewer bits.
    return jnp.einsum(subscripts, *operands, precision="highest")


def _working_dtype(*arrays: ArrayLike) -> np.dtype:
    """float64 if any of the arrays is, else float32."""
    return np.dtype(np.float64 if any(jnp.result_type(array) == np.float64 for array in arrays) else np.float32)


def _cast(dtype: np.dtype, params: Params, *arrays: ArrayLike) -> tuple[dict[str, jax.Array], *tuple[jax.Array, ...]]:
    cast = {name: jnp.asarray(value).astype(dtype) for name, value in params.items()}
    return cast, *(jnp.asarray(array).astype(dtype) for array in arrays)


def reference_rope_frequencies(rope: RopeConfig, rope_dim: int) -> np.ndarray:
    """Angle per position of every rotated pair, with YaRN if configured (DeepSeek-V4 has no "mscale").

    Args:
        rope: theta and the optional YaRN constants.
        rope_dim: number of rotated dimensions R.

    Returns:
        float64 [R / 2].
    """
    frequencies = rope.theta ** (-2.0 * np.arange(rope_dim // 2, dtype=np.float64) / rope_dim)
    yarn = rope.yarn
    if yarn is None:
        return frequencies

    def pair_that_turns(rotations: float) -> float:
        # The (fractional) pair index whose wave completes `rotations` turns within the original context.
        wavelength = yarn.original_max_position_embeddings / (2.0 * math.pi * rotations)
        return rope_dim * math.log(wavelength) / (2.0 * math.log(rope.theta))

    low: float = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high: float = min(math.ceil(pair_that_turns(yarn.beta_slow)), rope_dim - 1)
    if low == high:
        high += 0.001
    for i in range(rope_dim // 2):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        frequencies[i] = frequencies[i] / yarn.factor * ramp + frequencies[i] * (1.0 - ramp)
    return frequencies


def reference_rope(
    x: ArrayLike, positions: ArrayLike, rope: RopeConfig, rope_dim: int, *, inverse: bool = False, time_axis: int = 0
) -> jax.Array:
    """Rotate the trailing `rope_dim` dimensions of x in interleaved pairs (2i, 2i + 1) by position * frequency_i.

    As in the published code the angle is a product in the working dtype: a float32 angle is off by about 4e-5 radians
    at position 1000.

    Args:
        x: [..., D], D >= rope_dim, of length T along `time_axis`; for example [T, D] or [T, H, D].
        positions: integer [T].
        rope: theta and the optional YaRN constants.
        rope_dim: number of rotated dimensions R.
        inverse: rotate by the negative angle.
        time_axis: the axis of x that `positions` runs along.

    Returns:
        The shape of x, in float32 or wider.

    Raises:
        ValueError: positions do not match x along `time_axis`.
    """
    dtype = _working_dtype(x)
    x = jnp.asarray(x).astype(dtype)
    positions = jnp.asarray(positions)
    if positions.ndim != 1 or positions.shape[0] != x.shape[time_axis]:
        raise ValueError(f"positions: expected shape ({x.shape[time_axis]},) to match x, got {positions.shape}")
    frequencies = jnp.asarray(reference_rope_frequencies(rope, rope_dim).astype(dtype))
    angles = positions.astype(dtype).reshape(-1, 1) * frequencies.reshape(1, -1)
    shape = [1] * x.ndim
    shape[time_axis], shape[-1] = angles.shape
    cos, sin = jnp.cos(angles).reshape(shape), jnp.sin(angles).reshape(shape)
    sin = -sin if inverse else sin
    untouched, rotated = x[..., : x.shape[-1] - rope_dim], x[..., x.shape[-1] - rope_dim :]
    a, b = rotated[..., 0::2], rotated[..., 1::2]
    turned = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(rotated.shape)
    return jnp.concatenate([untouched, turned], axis=-1)


def _unit_rms(x: jax.Array, eps: float) -> jax.Array:
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def _rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    return _unit_rms(x, eps) * scale.reshape((1,) * (x.ndim - 1) + scale.shape)


def reference_entries(
    params: Params, prefix: str, h: ArrayLike, config: AttentionConfig, *, ratio: int, head_dim: int, overlap: bool
) -> jax.Array:
    """The compressed entries of ONE document: softmax-gated window pooling, norm, RoPE at each window's first token.

    The gate is a softmax over the window's tokens, feature by feature (equations 9-12 and 20-23). With `overlap`
    the projections are twice as wide: a token's second half serves its own window, its first half the next one; the
    first window of the document has no previous half.

    Args:
        params: the layer's parameters, flat; those under `prefix` are used.
        prefix: "compressor", or "compressor.indexer" for the indexer's keys.
        h: [T, E] the document's hidden states, from its first token.
        config: the layer's configuration (norm eps, rope dims, compress RoPE table).
        ratio: tokens per window, m.
        head_dim: D, or J for the indexer.
        overlap: True for CSA and its indexer, False for HCA.

    Returns:
        [T // m, head_dim]. Tokens after the last complete window give no entry.
    """
    p, h = _cast(_working_dtype(h, *params.values()), params, h)
    windows, halves = h.shape[0] // ratio, 2 if overlap else 1
    if windows == 0:
        return jnp.zeros((0, head_dim), h.dtype)
    shape = (-1, halves, head_dim)
    content = _einsum("te,ef->tf", h, p[f"{prefix}.kv_proj.kernel"]).reshape(shape)
    gate = _einsum("te,ef->tf", h, p[f"{prefix}.gate_proj.kernel"]).reshape(shape)
    bias = p[f"{prefix}.position_bias"].reshape(shape)

    # The members of window i: token, which of its halves, and its place in its own window.
    members = [
        [(i * ratio + j, halves - 1, j) for j in range(ratio)]
        + ([((i - 1) * ratio + j, 0, j) for j in range(ratio)] if overlap else [])
        for i in range(windows)
    ]
    token, half, place = np.moveaxis(np.array(members), -1, 0)
    exists = jnp.asarray(token >= 0)[:, :, None]
    logits = jnp.where(exists, gate[token, half] + bias[place, half], -jnp.inf)
    pooled = jnp.sum(jax.nn.softmax(logits, axis=1) * jnp.where(exists, content[token, half], 0.0), axis=1)
    normed = _rms_norm(pooled, p[f"{prefix}.kv_norm.scale"], config.rms_norm_eps)
    return reference_rope(normed, np.arange(windows) * ratio, config.compress_rope, config.qk_rope_head_dim)


def reference_index_scores(params: Params, config: AttentionConfig, h: ArrayLike, q_residual: ArrayLike) -> jax.Array:
    """The lightning indexer's score of every entry for every query of ONE document (equations 13-16), unmasked.

    score[t, i] = sum over heads of weight[t, head] * relu(query[t, head] . key[i]), weights scaled by (J * I)^-0.5.
    The official Hadamard rotation cancels without quantisation and is left out.

    Args:
        params: the layer's parameters, flat.
        config: the layer's configuration.
        h: [T, E] hidden states of the document.
        q_residual: [T, q_lora_rank] the normed low-rank query, shared with the main queries.

    Returns:
        [T, T // m], m = config.csa_ratio.
    """
    p, h, q_residual = _cast(_working_dtype(h, q_residual, *params.values()), params, h, q_residual)
    heads, dim = config.index_n_heads, config.index_head_dim
    keys = reference_entries(p, "compressor.indexer", h, config, ratio=config.csa_ratio, head_dim=dim, overlap=True)
    queries = _einsum("tq,qf->tf", q_residual, p["compressor.indexer.q_b_proj.kernel"])
    queries = queries.reshape(h.shape[0], heads, dim)
    queries = reference_rope(queries, np.arange(h.shape[0]), config.compress_rope, config.qk_rope_head_dim)
    weights = _einsum("te,ei->ti", h, p["compressor.indexer.scorer.weights_proj.kernel"])
    weights = weights * (dim**-0.5 * heads**-0.5)
    matches = jnp.maximum(_einsum("tij,nj->tin", queries, keys), 0)
    return _einsum("ti,tin->tn", weights, matches)


def reference_top_k(scores: ArrayLike, visible: ArrayLike, k: int) -> jax.Array:
    """The k best visible entries of every query; among equal scores the lower slot wins.

    -0.0 equals 0.0, NaN is never selected, and no gradient passes.

    Args:
        scores: [T, n].
        visible: bool [T, n].
        k: how many to select.

    Returns:
        int32 [T, k], the selected slots ascending, then -1 where fewer than k could be selected.
    """
    scores = jax.lax.stop_gradient(jnp.asarray(scores))
    tokens, n = scores.shape
    selectable = jnp.asarray(visible) & ~jnp.isnan(scores)
    descending = jnp.where(selectable & (scores != 0), -scores, 0.0)  # -0.0 becomes 0.0
    slots = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32).reshape(1, -1), scores.shape)
    # The last key is the primary one: selectable before not, higher score before lower, lower slot before higher.
    best = jnp.lexsort((slots, descending, ~selectable), axis=-1).astype(jnp.int32)[:, : min(k, n)]
    enough = jnp.arange(min(k, n)).reshape(1, -1) < jnp.sum(selectable, axis=-1, keepdims=True)
    ascending = jnp.sort(jnp.where(enough, best, n), axis=-1)
    chosen = jnp.where(ascending < n, ascending, -1).astype(jnp.int32)
    return jnp.concatenate([chosen, jnp.full((tokens, max(k - n, 0)), -1, jnp.int32)], axis=-1)


def reference_core_attention(
    q: ArrayLike,
    kv: ArrayLike,
    entries: ArrayLike,
    window_mask: ArrayLike,
    entry_mask: ArrayLike,
    sinks: ArrayLike | None,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """One dense softmax over raw keys, entries and the sink, for ONE row; keys are also the values.

    Keys that a query does not see are zeroed before multiplication: what they hold, NaN included, has no effect.

    Args:
        q: [T, H, D].
        kv: [N, D] raw keys (N = T for a document on its own).
        entries: [n, D]; n may be 0.
        window_mask: bool [T, N], True where the query sees the raw key.
        entry_mask: bool [T, n], True where the query sees the entry.
        sinks: [H] unscaled logits in the denominator only, or None; -inf is no sink, +inf gives zeros.
        scale: factor on the query-key products.

    Returns:
        out [T, H, D] and lse [T, H], the log-sum-exp over the keys alone. A query that sees nothing has exactly zero
        for out and -inf for lse; gradients are finite.
    """
    sinks = jnp.full(jnp.shape(q)[1], -jnp.inf) if sinks is None else sinks
    _, q, kv, entries, sinks = _cast(_working_dtype(q, kv, entries), {}, q, kv, entries, sinks)
    seen = jnp.concatenate([jnp.asarray(window_mask), jnp.asarray(entry_mask)], axis=-1)  # [T, N + n]
    keys = jnp.where(seen[:, :, None], jnp.concatenate([kv, entries])[None], 0.0)  # [T, N + n, D]
    seen, anything = seen[:, None, :], jnp.any(seen, axis=-1)[:, None]  # [T, 1, N + n] and [T, 1]
    logits = _einsum("thd,tnd->thn", q, keys) * scale

    def masses(shift: jax.Array) -> jax.Array:
        return jnp.where(seen, jnp.exp(jnp.where(seen, logits - shift[:, :, None], 0.0)), 0.0)

    highest = jnp.max(jnp.where(seen, logits, -jnp.inf), axis=-1, initial=-jnp.inf)
    highest = jax.lax.stop_gradient(jnp.where(anything, highest, 0.0))  # [T, H]
    lse = jnp.where(anything, highest + jnp.log(jnp.where(anything, jnp.sum(masses(highest), axis=-1), 1.0)), -jnp.inf)

    infinite = jnp.isinf(sinks[None])
    sink = jnp.where(infinite, 0.0, sinks[None])
    # The shift that keeps every exponential at or below 1 must cover the sink too.
    shift = jax.lax.stop_gradient(jnp.where(infinite, highest, jnp.maximum(highest, sink)))
    denominator = jnp.sum(masses(shift), axis=-1) + jnp.where(infinite, 0.0, jnp.exp(sink - shift))
    answered = anything & (sinks[None] != jnp.inf)
    weights = masses(shift) / jnp.where(answered, denominator, 1.0)[:, :, None]
    return jnp.where(answered[:, :, None], _einsum("thn,tnd->thd", weights, keys), 0.0), lse


def _runs(ids: np.ndarray) -> Iterator[tuple[int, int]]:
    """(start, stop) of every document of one row [S]: the maximal runs of one nonzero id."""
    start = 0
    for row in range(1, len(ids) + 1):
        if row == len(ids) or ids[row] != ids[start]:
            if ids[start] != 0:
                yield start, row
            start = row


# Compiled, since dispatching every operation on its own takes many times longer. The arithmetic is the same.
@functools.partial(jax.jit, static_argnames=("config", "layer_type", "select"))
def _document_attention(
    p: Mapping[str, jax.Array], config: AttentionConfig, layer_type: LayerType, h: jax.Array, select: str
) -> jax.Array:
    """The layer on one document [T, E] alone, from position 0; all arrays already in the working dtype."""
    tokens = h.shape[0]
    heads, dim, eps = config.num_attention_heads, config.head_dim, config.rms_norm_eps
    rope = config.rope if layer_type == LayerType.SLIDING else config.compress_rope
    positions = np.arange(tokens)

    q_residual = _rms_norm(_einsum("te,eq->tq", h, p["q_a_proj.kernel"]), p["q_a_norm.scale"], eps)
    q = _einsum("tq,qf->tf", q_residual, p["q_b_proj.kernel"]).reshape(tokens, heads, dim)
    q = reference_rope(_unit_rms(q, eps), positions, rope, config.qk_rope_head_dim)
    kv = _rms_norm(_einsum("te,ed->td", h, p["kv_proj.kernel"]), p["kv_norm.scale"], eps)
    kv = reference_rope(kv, positions, rope, config.qk_rope_head_dim)

    t, s = positions.reshape(-1, 1), positions.reshape(1, -1)
    window_mask = jnp.asarray((s <= t) & (t - s < config.sliding_window))
    if layer_type == LayerType.SLIDING:
        entries, entry_mask = jnp.zeros((0, dim), h.dtype), jnp.zeros((tokens, 0), bool)
    else:
        sparse = layer_type == LayerType.CSA
        ratio = config.csa_ratio if sparse else config.hca_ratio
        entries = reference_entries(p, "compressor", h, config, ratio=ratio, head_dim=dim, overlap=sparse)
        last_token = np.arange(entries.shape[0]).reshape(1, -1) * ratio + ratio - 1
        entry_mask = jnp.asarray(last_token <= t)
        if sparse and select == "top_k":
            scores = reference_index_scores(p, config, h, q_residual)
            indices = reference_top_k(scores, entry_mask, config.index_topk)
            slots = jnp.arange(entries.shape[0], dtype=jnp.int32).reshape(1, 1, -1)
            entry_mask = jnp.any(indices[:, :, None] == slots, axis=1)

    out, _ = reference_core_attention(q, kv, entries, window_mask, entry_mask, p["sinks"], dim**-0.5)
    out = reference_rope(out, positions, rope, config.qk_rope_head_dim, inverse=True)
    groups = out.reshape(tokens, config.o_groups, -1)
    low_rank = _einsum("tgi,gir->tgr", groups, p["o_a_proj.kernel"]).reshape(tokens, -1)
    return _einsum("tr,re->te", low_rank, p["o_b_proj.kernel"])


def reference_attention(
    params: Params,
    config: AttentionConfig,
    layer_type: LayerType,
    x: ArrayLike,
    segment_ids: ArrayLike | None = None,
    *,
    select: str = "top_k",
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """A whole attention layer, each document of each row computed alone from position 0.

    Args:
        params: the layer's parameters, flat ("compressor.kv_proj.kernel", ...); linear kernels are [in, out].
        config: the layer's configuration.
        layer_type: type of the layer.
        x: [B, S, E] hidden states.
        segment_ids: concrete integers [B, S]; 0 is padding, a document is a maximal run of one nonzero id.
            None: every row is one document.
        select: "top_k": a CSA layer uses the indexer's entries; "all": every visible one.
        dtype: dtype to compute in, float32 or float64; None: the widest dtype of x and params, at least float32.

    Returns:
        [B, S, E] in the working dtype; padding rows are zero.

    Raises:
        ValueError: unknown `select` or `dtype`, float64 without x64, or segment_ids of another shape than [B, S].
    """
    if select not in ("top_k", "all"):
        raise ValueError(f"select: expected 'top_k' or 'all', got {select!r}")
    working = _working_dtype(x, *params.values()) if dtype is None else np.dtype(dtype)
    if working not in (np.float32, np.float64):
        raise ValueError(f"dtype: expected float32 or float64, got {working}")
    if working != jax.dtypes.canonicalize_dtype(working):
        raise ValueError(f"dtype: {working} needs `with jax.enable_x64(True)` around the call, got it switched off")
    p, x = _cast(working, params, x)
    batch, length, width = x.shape
    ids = np.ones((batch, length), np.int32) if segment_ids is None else np.asarray(segment_ids)
    if ids.shape != (batch, length):
        raise ValueError(f"segment_ids: expected shape {(batch, length)}, got {ids.shape}")

    rows = []
    for b in range(batch):
        pieces, filled = [], 0
        for start, stop in _runs(ids[b]):
            pieces.append(jnp.zeros((start - filled, width), working))
            pieces.append(_document_attention(p, config, LayerType(layer_type), x[b, start:stop], select))
            filled = stop
        pieces.append(jnp.zeros((length - filled, width), working))
        rows.append(jnp.concatenate(pieces))
    return jnp.stack(rows)


def reference_visibility(segment_ids: ArrayLike, sliding_window: int, ratio: int) -> tuple[np.ndarray, np.ndarray]:
    """Visibility by brute force over documents, windows and queries.

    The entry of the w-th complete window of a document that starts at row d is in slot (d + w * m) // m. That
    document's queries see it from the window's last row on.

    Args:
        segment_ids: concrete integers [B, S]; 0 is padding.
        sliding_window: raw keys that a query sees, itself included.
        ratio: tokens per window m; 0 for a layer without entries.

    Returns:
        bool [B, S, S], query row by key row, and bool [B, S, S // m], query row by slot ([B, S, 0] for ratio 0).
    """
    ids = np.asarray(segment_ids)
    batch, length = ids.shape
    window = np.zeros((batch, length, length), dtype=bool)
    entry = np.zeros((batch, length, length // ratio if ratio else 0), dtype=bool)
    for b in range(batch):
        for start, stop in _runs(ids[b]):
            for t in range(start, stop):
                for s in range(start, t + 1):
                    window[b, t, s] = t - s < sliding_window
                for w in range((stop - start) // ratio if ratio else 0):
                    first, last = start + w * ratio, start + w * ratio + ratio - 1
                    if last <= t:
                        entry[b, t, first // ratio] = True
    return window, entry
