"""The contenders: each turns a case into something to run, and into results to check."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.cases import Case
from foveal import CompressedAttention, core_attention, select_entries
from foveal.testing.choices import UNDECIDED, selected_entries
from foveal.testing.generators import random_hidden, random_params
from foveal.testing.parameters import set_params

Results = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Contender:
    """A prepared case: `run` does the work once and waits for it, `results` gives its outputs and gradients."""

    run: Callable[[], object]
    results: Callable[[], Results]
    temporaries: int | None = None  # bytes in the compiler's plan; None where there is none


def core_inputs(case: Case) -> Results:
    """Seeded inputs of core attention: standard normal, so that logits are of order one; `indices` for CSA."""
    rng = np.random.default_rng(0)
    visibility = case.visibility

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    arrays = {
        "q": normal(1, case.length, case.heads, case.head_dim),
        "kv": normal(1, case.length, case.head_dim),
        "entries": normal(1, visibility.slots, case.head_dim),
        "sinks": normal(case.heads),
        "d_out": normal(1, case.length, case.heads, case.head_dim),
    }
    if case.layer == "csa":
        chosen = jax.jit(lambda q, w, k: select_entries(q, w, k, visibility=visibility, top_k=case.top_k))
        indices = chosen(normal(1, case.length, 1, 16), normal(1, case.length, 1), normal(1, visibility.slots, 16))
        arrays["indices"] = np.asarray(indices)
    return arrays


def foveal_core(case: Case, implementation: str) -> Contender:
    """Prepare this library's core attention."""
    arrays = core_inputs(case)
    dtype = jnp.dtype(case.dtype)
    q, kv, entries, d_out = (jnp.asarray(arrays[n]).astype(dtype) for n in ("q", "kv", "entries", "d_out"))
    sinks = jnp.asarray(arrays["sinks"])
    indices = jnp.asarray(arrays["indices"]) if "indices" in arrays else None
    visibility = case.visibility

    def attend(
        q: jax.Array, kv: jax.Array, entries: jax.Array, sinks: jax.Array, indices: jax.Array | None
    ) -> jax.Array:
        return core_attention(
            q, kv, entries, visibility=visibility, indices=indices, sinks=sinks, implementation=implementation
        )

    def both(q, kv, entries, sinks, indices, d_out):
        out, pull = jax.vjp(lambda q, kv, entries, sinks: attend(q, kv, entries, sinks, indices), q, kv, entries, sinks)
        return out, pull(d_out)

    operands = (q, kv, entries, sinks, indices)
    if case.backward:
        return _jax_contender(both, (*operands, d_out), lambda r: _named(r[0], r[1]))
    return _jax_contender(attend, operands, lambda r: {"out": np.asarray(r, np.float32)})


def undecided_queries(case: Case) -> tuple[int, ...]:
    """Queries whose selection rounding decides: two correct layers may differ there. Only CSA layers have any."""
    if case.what != "layer" or case.layer != "csa":
        return ()
    x = random_hidden(1, 1, case.length, case.config.hidden_size)
    _, lead = selected_entries(_layer(dataclasses.replace(case, dtype="float32")), x, case.documents)
    return tuple(np.flatnonzero(lead[0] <= UNDECIDED).tolist())


def _layer(case: Case) -> CompressedAttention:
    layer = CompressedAttention(case.config, layer_type=case.layer_type, dtype=jnp.dtype(case.dtype), rngs=nnx.Rngs(0))
    set_params(layer, random_params(case.config, case.layer_type, 0))
    return layer


def _layer_cotangent(case: Case, undecided: tuple[int, ...]) -> np.ndarray:
    d_out = random_hidden(2, 1, case.length, case.config.hidden_size)
    d_out[:, list(undecided)] = 0.0
    return d_out


def foveal_layer(case: Case, implementation: str, undecided: tuple[int, ...] = ()) -> Contender:
    """Prepare a whole layer of this library."""
    layer = _layer(case)
    x = jnp.asarray(random_hidden(1, 1, case.length, case.config.hidden_size)).astype(case.dtype)
    d_out = jnp.asarray(_layer_cotangent(case, undecided)).astype(case.dtype)
    graph, params = nnx.split(layer)

    def apply(params, x):
        return nnx.merge(graph, params)(x, implementation=implementation)

    def both(params, x, d_out):
        out, pull = jax.vjp(apply, params, x)
        return out, pull(d_out)

    if case.backward:
        return _jax_contender(both, (params, x, d_out), lambda r: {"out": _wide(r[0]), "d_x": _wide(r[1][1])})
    return _jax_contender(apply, (params, x), lambda r: {"out": _wide(r)})


def transformers_core(case: Case) -> Contender:
    """Prepare transformers' eager attention over concatenated keys, with its additive mask made beforehand."""
    import torch
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import eager_attention_forward

    torch.set_num_threads(1)
    arrays = core_inputs(case)
    mask = np.where(_mask(case, arrays.get("indices")), 0.0, -np.inf).astype(np.float32)
    bias = torch.from_numpy(mask)[None, None]
    leaves = {n: torch.from_numpy(arrays[n]).requires_grad_(case.backward) for n in ("q", "kv", "entries", "sinks")}
    d_out = torch.from_numpy(arrays["d_out"])
    module: Any = types.SimpleNamespace(num_key_value_groups=case.heads, sinks=leaves["sinks"], training=False)

    def run() -> torch.Tensor:
        with torch.set_grad_enabled(case.backward):
            keys = torch.cat([leaves["kv"], leaves["entries"]], dim=1)[:, None]
            q = leaves["q"].transpose(1, 2)
            out, _ = eager_attention_forward(module, q, keys, keys, bias, scaling=case.head_dim**-0.5)
            if case.backward:
                for leaf in leaves.values():
                    leaf.grad = None
                out.backward(d_out)
        return out

    def results() -> Results:
        out = {"out": run().detach().numpy()}
        return out | {f"d_{n}": leaf.grad.numpy() for n, leaf in leaves.items() if leaf.grad is not None}

    return Contender(run, results)


def transformers_layer(case: Case, undecided: tuple[int, ...] = ()) -> Contender:
    """Prepare transformers' DeepseekV4Attention with the same parameters, its tables and mask made beforehand."""
    import torch

    from foveal.testing.peer import peer_of_params

    torch.set_num_threads(1)
    config = case.config
    peer = peer_of_params(config, case.layer_type, random_params(config, case.layer_type, 0))
    module = peer.module.eval()
    x = torch.from_numpy(random_hidden(1, 1, case.length, config.hidden_size)).requires_grad_(case.backward)
    d_out = torch.from_numpy(_layer_cotangent(case, undecided))
    inputs = peer.inputs(x.detach())

    def run() -> torch.Tensor:
        with torch.set_grad_enabled(case.backward):
            out, _ = module(x, *inputs)
            if case.backward:
                module.zero_grad(set_to_none=True)
                x.grad = None
                out.backward(d_out)
        return out

    def results() -> Results:
        out = {"out": run().detach().numpy()}
        return out | ({"d_x": x.grad.numpy()} if x.grad is not None else {})

    return Contender(run, results)


def build(case: Case, contender: str, undecided: tuple[int, ...] = ()) -> Contender:
    """Prepare a contender, "chunked", "dense" or "transformers"; `undecided` queries take no part in the gradients."""
    if contender == "transformers":
        return transformers_core(case) if case.what == "core" else transformers_layer(case, undecided)
    return foveal_core(case, contender) if case.what == "core" else foveal_layer(case, contender, undecided)


def _jax_contender(function: Callable, operands: tuple, results: Callable) -> Contender:
    compiled = jax.jit(function).lower(*operands).compile()
    plan = compiled.memory_analysis()
    return Contender(
        lambda: jax.block_until_ready(compiled(*operands)),
        lambda: results(compiled(*operands)),
        None if plan is None else plan.temp_size_in_bytes,
    )


def _wide(array: jax.Array) -> np.ndarray:
    return np.asarray(array.astype(jnp.float32))


def _named(out: jax.Array, grads: tuple[jax.Array, ...]) -> Results:
    names = ("d_q", "d_kv", "d_entries", "d_sinks")
    return {"out": _wide(out)} | {name: _wide(grad) for name, grad in zip(names, grads, strict=True)}


def _mask(case: Case, indices: np.ndarray | None) -> np.ndarray:
    """Mask of the raw keys and entries that each query uses, bool [S, S + C]."""
    visibility = case.visibility
    window, entries = np.asarray(visibility.window_mask())[0], np.asarray(visibility.entry_mask())[0]
    if indices is not None:
        chosen = np.zeros((case.length, visibility.slots + 1), bool)
        np.put_along_axis(chosen, np.where(indices[0] < 0, visibility.slots, indices[0]), True, axis=1)
        entries = entries & chosen[:, :-1]
    return np.concatenate([window, entries], axis=1)
