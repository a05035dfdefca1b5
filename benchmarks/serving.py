"""Cost of the cache: a decoding step by position, a prompt in chunks against one pass; CPU time, one thread.

    python -m benchmarks.serving --output benchmarks/results

Times are CPU seconds of this process, medians of interleaved rounds, for a layer of 16 heads of 128 dims and width 1024
with room for 65536 tokens. Each timing takes many steps, in place; the cache's contents are random.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

if __name__ == "__main__":
    # One core for XLA before it is loaded: its pool is as large as the number of cores it may use.
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.cases import Case
from benchmarks.measure import interleaved
from foveal import AttentionCache, CompressedAttention

CAPACITY, POSITIONS, STEPS = 65536, (4096, 65000), 20
PROMPT, CHUNK = 16384, 1024


def make_layer(kind: str, length: int) -> CompressedAttention:
    """Create a layer of the sizes that the other benchmarks use."""
    case = Case("layer", kind, length, 16, 128, backward=False)
    return CompressedAttention(case.config, layer_type=case.layer_type, rngs=nnx.Rngs(0))


def decoding(layer: CompressedAttention, capacity: int, position: int, steps: int) -> Callable[[], object]:
    """A run that decodes `steps` tokens from `position` on, in place."""
    rng = np.random.default_rng(0)
    token = jnp.asarray(rng.normal(size=(1, 1, layer.config.hidden_size)), jnp.float32)
    step = jax.jit(layer.decode, donate_argnums=0)
    random = {
        leaf.shape: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)
        for leaf in jax.tree.leaves(layer.init_cache(1, capacity))
        if leaf.ndim == 3
    }
    held = jax.tree.map(lambda leaf: jnp.array(random.get(leaf.shape, leaf)), layer.init_cache(1, capacity))

    def run() -> object:
        nonlocal held
        held, out = dataclasses.replace(held, lengths=jnp.full((1,), position, jnp.int32)), token
        for _ in range(steps):
            out, held = step(held, token)
        return jax.block_until_ready(out)

    return run


def prompts(layer: CompressedAttention, length: int, chunk: int) -> dict[str, Callable[[], object]]:
    """Runs of one prompt: a full pass without a cache, one prefill, and a prefill in chunks."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, length, layer.config.hidden_size)), jnp.float32)
    pieces = jnp.split(x, length // chunk, axis=1)
    whole, prefill = jax.jit(lambda x: layer(x)), jax.jit(layer.prefill, donate_argnums=0)

    def empty() -> AttentionCache:
        return layer.init_cache(1, length)

    def in_chunks() -> object:
        cache, out = empty(), x
        for piece in pieces:
            out, cache = prefill(cache, piece)
        return jax.block_until_ready(out)

    return {
        "pass": lambda: whole(x).block_until_ready(),
        "prefill": lambda: prefill(empty(), x)[0].block_until_ready(),
        "chunks": in_chunks,
    }


def measure(kind: str, rounds: int) -> list[dict[str, Any]]:
    """Measure a layer type: one row for decoding and one for prompts."""
    layer = make_layer(kind, CAPACITY)
    runs = {str(position): decoding(layer, CAPACITY, position, STEPS) for position in POSITIONS}
    steps = {name: seconds / STEPS for name, seconds in interleaved(runs, rounds).items()}
    near, far = (steps[str(position)] for position in POSITIONS)
    about = {"layer": kind, "jax": jax.__version__}
    seconds = interleaved(prompts(layer, PROMPT, CHUNK), rounds)
    return [
        {"what": "decode", **about, "capacity": CAPACITY, "seconds_at": steps, "ratio": far / near},
        {
            "what": "prefill",
            **about,
            "length": PROMPT,
            "chunk": CHUNK,
            "seconds": seconds,
            "ratio": seconds["chunks"] / seconds["pass"],
        },
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line of JSON per row, and keep them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--output", type=pathlib.Path, help="folder for JSON lines")
    options = parser.parse_args(arguments)
    rows = [row for kind in ("sliding", "csa", "hca") for row in measure(kind, options.rounds)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    print(lines, end="")
    if options.output:
        (options.output / f"serving-jax{jax.__version__}.jsonl").write_text(lines)


if __name__ == "__main__":
    main()
