"""Sample text from the model that `examples/train_tiny.py` trains, token by token with a cache.

    python examples/train_tiny.py                       # first, a few minutes
    python examples/generate.py --prompt "A list is"    # then this, as often as you like

Prompts of different lengths form one batch: all are prefilled in one right-padded call, and then every row decodes one
byte per step in one compiled program, in place. The script prints the texts, then tokens per second and the cache's
bytes per token, next to those of a plain cache of every head's keys and values.

Needs the extra `examples`.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from rich.console import Console
from rich.progress import track
from rich.table import Table

from foveal import CacheStack

if __package__:
    from examples.train_tiny import CONFIG, LanguageModel, Trainer, restore
else:  # run as a script: Python looks for modules beside it
    from train_tiny import CONFIG, LanguageModel, Trainer, restore


def extend(
    model: LanguageModel, caches: CacheStack, tokens: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, CacheStack]:
    """Logits [B, 256] after each row's last new token, and the caches with the new tokens.

    Args:
        model: the model.
        caches: one per layer.
        tokens: bytes int32 [B, T], right-padded.
        lengths: int32 [B], how many of the T tokens each row has, at least one.
    """
    x, new = model.embedding(tokens), []
    for block, cache in zip(model.blocks, caches, strict=True):
        attended, cache = block.attention.prefill(cache, block.attention_norm(x), lengths)
        x = x + attended
        x = x + block.down(jax.nn.gelu(block.up(block.mlp_norm(x))))
        new.append(cache)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return model.head(model.norm(last)), CacheStack(tuple(new))


class Generated(NamedTuple):
    """Result of `Generator.generate`.

    Attributes:
        tokens: bytes int32 [B, N] that follow the prompts.
        prefill_seconds: time of the prompts, without compilation.
        decode_seconds: time of all steps, without compilation.
        cache_bytes: size of the caches of all rows and layers.
        capacity: number of tokens per row that the caches have room for.
    """

    tokens: np.ndarray
    prefill_seconds: float
    decode_seconds: float
    cache_bytes: int
    capacity: int


class Generator:
    """The compiled programs: one for the prompts, one for every step."""

    def __init__(self, graph: Any, params: Any) -> None:
        self.graph, self.params = graph, params

    @functools.partial(jax.jit, static_argnames="self", donate_argnames="caches")
    def prefill(self, params: Any, caches: CacheStack, tokens: jax.Array, lengths: jax.Array) -> Any:
        """Compiled `extend`, for the prompts."""
        return extend(nnx.merge(self.graph, params), caches, tokens, lengths)

    @functools.partial(jax.jit, static_argnames="self", donate_argnames="caches")
    def step(self, params: Any, caches: CacheStack, logits: jax.Array, key: jax.Array, temperature: jax.Array) -> Any:
        """The next byte of each row, [B], the logits after it, and the caches with it."""
        drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6), axis=-1)
        token = jnp.where(temperature > 0, drawn, jnp.argmax(logits, axis=-1)).astype(jnp.int32)
        ones = jnp.ones(token.shape, jnp.int32)
        return token, *extend(nnx.merge(self.graph, params), caches, token[:, None], ones)

    def generate(self, prompts: list[bytes], count: int, *, temperature: float, seed: int, quiet: bool) -> Generated:
        """Generate `count` bytes after each prompt, sampled at the temperature, or greedily at 0."""
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        tokens = np.zeros((len(prompts), lengths.max()), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = np.frombuffer(prompt, np.uint8)
        capacity = int(lengths.max()) + count

        def empty() -> CacheStack:
            return CacheStack.init(CONFIG, batch=len(prompts), capacity=capacity)

        hot, keys = jnp.float32(temperature), jax.random.split(jax.random.key(seed), count)
        # Compile first, so that compilation is not timed.
        logits, caches = self.prefill(self.params, empty(), tokens, lengths)
        jax.block_until_ready(self.step(self.params, caches, logits, keys[0], hot))

        start = time.perf_counter()
        logits, caches = jax.block_until_ready(self.prefill(self.params, empty(), tokens, lengths))
        prefilled = time.perf_counter()
        drawn = []
        for key in track(keys, "", transient=True, disable=quiet):
            token, logits, caches = self.step(self.params, caches, logits, key, hot)
            drawn.append(token)
        drawn = np.stack(drawn, axis=1)
        return Generated(drawn, prefilled - start, time.perf_counter() - prefilled, caches.nbytes, capacity)


def load(out: pathlib.Path) -> Generator:
    """Load the last checkpoint in an output folder of `train_tiny`.

    Raises:
        FileNotFoundError: there is none.
    """
    folder = out.resolve() / "checkpoints"
    if not folder.is_dir():
        raise FileNotFoundError(f"no checkpoints in {out}: run examples/train_tiny.py --out {out} first")
    trainer = Trainer(CONFIG, 1e-3, 0)
    with ocp.CheckpointManager(folder) as manager:
        if manager.latest_step() is None:
            raise FileNotFoundError(f"no checkpoints in {out}: run examples/train_tiny.py --out {out} first")
        state, _ = restore(manager, trainer)
    return Generator(trainer.graph, state["params"])


def report(found: Generated) -> Table:
    """Table of speed and memory, next to a cache that keeps every head's keys and values of every token."""
    rows, count = found.tokens.shape
    plain = 2 * CONFIG.num_layers * CONFIG.num_attention_heads * CONFIG.head_dim * 4
    table = Table("", "tokens per second", "bytes per token", "bytes per row")
    for column in table.columns[1:]:
        column.justify = "right"
    held = found.cache_bytes // rows
    speed = f"{rows * count / found.decode_seconds:,.0f}"
    table.add_row("this cache", speed, f"{held / found.capacity:,.0f}", f"{held:,}")
    table.add_row("keys and values of all heads", "-", f"{plain:,}", f"{plain * found.capacity:,}")
    return table


def main(argv: list[str] | None = None) -> Generated:
    """Parse the arguments, generate and print; return what was generated."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompt", action="append", default=[], help="text to continue; repeat for more rows")
    parser.add_argument("--bytes", type=int, default=400, help="bytes to generate per row [%(default)s]")
    parser.add_argument("--temperature", type=float, default=0.7, help="of sampling; 0 is greedy [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="random seed [%(default)s]")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("train_tiny"), help="folder of train_tiny.py")
    args = parser.parse_args(argv)
    prompts = [prompt.encode() for prompt in args.prompt or ["The ", 'The "with" statement is used to ']]
    if not all(prompts):
        parser.error("--prompt: expected at least one character, got an empty prompt")
    if args.bytes < 1:
        parser.error(f"--bytes: expected at least 1, got {args.bytes}")
    if not args.temperature >= 0:
        parser.error(f"--temperature: expected a number >= 0, got {args.temperature}")
    try:
        generator = load(args.out)
    except FileNotFoundError as missing:
        parser.error(f"--out: {missing}")
    console = Console(highlight=False, markup=False, soft_wrap=True)
    quiet = not console.is_terminal
    found = generator.generate(prompts, args.bytes, temperature=args.temperature, seed=args.seed, quiet=quiet)
    for prompt, row in zip(prompts, found.tokens, strict=True):
        console.rule()
        console.print((prompt + bytes(row.tolist())).decode(errors="replace"))
    console.rule()
    console.print(report(found))
    return found


if __name__ == "__main__":
    main()
