"""Train a byte-level language model of a sliding, a CSA and an HCA layer on Python's own reference manual.

    python examples/train_tiny.py                 # trains for a few minutes on a CPU, writes into train_tiny/
    python examples/train_tiny.py --steps 2000    # goes on from the last checkpoint in train_tiny/

The CSA layer's indexer gets no gradient from the language model's loss, only from its own. During the warm-up all
layers attend to all entries, and the indexer learns which of them attention gives the most weight. After it, the CSA
layer attends to the entries that the indexer selects. Both losses and the recall of the indexer are plotted in
train_tiny/training.png.

Needs the extra `examples`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
from pydoc_data.topics import topics as TOPICS
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from foveal import (
    AttentionConfig,
    CompressedAttention,
    Documents,
    IndexerLoss,
    IndexerRecall,
    Visibility,
    pack_documents,
)

CONFIG = dataclasses.replace(
    AttentionConfig.tiny(),
    hidden_size=128,
    q_lora_rank=64,
    o_lora_rank=64,
    sliding_window=32,
    hca_ratio=32,
    index_topk=16,
)
BYTES = 256


class Block(nnx.Module):
    """Attention and a plain MLP, each on normed activations, added to the residual stream."""

    def __init__(self, config: AttentionConfig, layer_index: int, *, rngs: nnx.Rngs) -> None:
        width = config.hidden_size
        self.attention_norm = nnx.RMSNorm(width, rngs=rngs)
        self.attention = CompressedAttention(config, layer_index, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, segment_ids: jax.Array, select: Any) -> tuple[jax.Array, IndexerLoss]:
        """Activations [B, S, E] -> activations [B, S, E], and the indexer's loss."""
        attended, loss = self.attention(self.attention_norm(x), segment_ids, select=select, return_indexer_loss=True)
        x = x + attended
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x)))), loss


class LanguageModel(nnx.Module):
    """Language model that gives next-byte logits."""

    def __init__(self, config: AttentionConfig, *, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(BYTES, config.hidden_size, rngs=rngs)
        self.blocks = nnx.List([Block(config, i, rngs=rngs) for i in range(config.num_layers)])
        self.norm = nnx.RMSNorm(config.hidden_size, rngs=rngs)
        self.head = nnx.Linear(config.hidden_size, BYTES, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array, segment_ids: jax.Array, select: Any) -> tuple[jax.Array, IndexerLoss]:
        """Bytes [B, S] -> logits [B, S, 256], and the sum of the layers' indexer losses."""
        x, losses = self.embedding(tokens), []
        for block in self.blocks:
            x, loss = block(x, segment_ids, select)
            losses.append(loss)
        return self.head(self.norm(x)), jax.tree.map(lambda *parts: sum(parts), *losses)

    def indexer_recall(self, tokens: jax.Array, segment_ids: jax.Array) -> IndexerRecall:
        """Recall of the layers' indexers, summed, with attention to all entries in every layer."""
        x, found = self.embedding(tokens), []
        for block in self.blocks:
            found.append(block.attention.indexer_recall(block.attention_norm(x), segment_ids))
            x, _ = block(x, segment_ids, "all")
        return jax.tree.map(lambda *parts: sum(parts), *found)


class Rows(NamedTuple):
    """Packed text: bytes int32 [N, S], segment ids int32 [N, S]."""

    tokens: np.ndarray
    segment_ids: np.ndarray

    def at(self, rows: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Some rows, on the device."""
        return jnp.asarray(self.tokens[rows]), jnp.asarray(self.segment_ids[rows])


def load_text(row_length: int) -> tuple[Rows, Rows]:
    """Load the language reference's topics as packed rows to train on, and every tenth topic as rows to test on."""
    topics = [text.encode() for _, text in sorted(TOPICS.items())]
    sets = [text for i, text in enumerate(topics) if i % 10], topics[::10]
    rows = []
    for texts in sets:
        pieces = [text[i : i + row_length] for text in texts for i in range(0, len(text), row_length)]
        packed = pack_documents([np.frombuffer(piece, np.uint8) for piece in pieces], row_length)
        rows.append(Rows(packed.values.astype(np.int32), packed.segment_ids))
    return rows[0], rows[1]


def batch_rows(count: int, batch_size: int, seed: int, step: int) -> np.ndarray:
    """Indices, below `count`, of the rows that a step trains on: each epoch is shuffled anew, from the seed alone."""
    epoch, place = divmod(step, count // batch_size)
    order = np.random.default_rng((seed, epoch)).permutation(count)
    return order[place * batch_size : (place + 1) * batch_size]


def language_loss(logits: jax.Array, tokens: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Mean cross entropy of each byte's successor within its document, in nats."""
    same = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    each = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return jnp.sum(jnp.where(same, each, 0.0)) / jnp.sum(same, dtype=jnp.float32)


class Trainer:
    """The compiled steps. Its state is {"params", "opt_state"}, a pytree of arrays."""

    def __init__(self, config: AttentionConfig, learning_rate: float, seed: int) -> None:
        self.graph, params = nnx.split(LanguageModel(config, rngs=nnx.Rngs(seed)))
        rate = optax.linear_schedule(0.0, learning_rate, 50)  # then constant: it does not depend on when training ends
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.01))
        self.initial = {"params": params, "opt_state": self.optimizer.init(params)}

    @functools.partial(jax.jit, static_argnames=("self", "select"))
    def step(self, state: dict[str, Any], tokens: jax.Array, segment_ids: jax.Array, *, select: str) -> Any:
        """Return the new state, and the losses before the step: the language model's and its indexer's."""

        def objective(params: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
            logits, indexer = nnx.merge(self.graph, params)(tokens, segment_ids, select)
            loss = language_loss(logits, tokens, segment_ids)
            # The losses share no parameters, so their sum needs no weights.
            return loss + indexer.mean, {"loss": loss, "indexer_loss": indexer.mean}

        gradients, losses = jax.grad(objective, has_aux=True)(state["params"])
        updates, opt_state = self.optimizer.update(gradients, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, losses

    @functools.partial(jax.jit, static_argnames=("self",))
    def test(self, params: Any, tokens: jax.Array, segment_ids: jax.Array) -> dict[str, jax.Array]:
        """Test on held-out rows: the loss with selected entries, and the indexer's loss and recall over all entries."""
        model = nnx.merge(self.graph, params)
        logits, _ = model(tokens, segment_ids, "top_k")
        _, indexer = model(tokens, segment_ids, "all")
        recall = model.indexer_recall(tokens, segment_ids)
        loss = language_loss(logits, tokens, segment_ids)
        return {"test_loss": loss, "indexer_divergence": indexer.mean, "indexer_recall": recall.mean}


def chance(segment_ids: jax.Array | np.ndarray, config: AttentionConfig) -> float:
    """Mean recall of an indexer that selects at random."""
    visibility = Visibility(Documents.from_segment_ids(segment_ids), config.sliding_window, config.csa_ratio)
    seen = np.asarray(visibility.entry_counts)
    return float(np.mean(config.index_topk / seen[seen > config.index_topk]))


Log = list[dict[str, float]]


def train(args: argparse.Namespace, training: Rows, testing: Rows, console: Console) -> Log:
    """Train up to step `args.steps`, from the last checkpoint if there is one.

    Returns:
        One row per step since the first: the losses before it and, at some steps, the test results after it.
    """
    trainer = Trainer(CONFIG, args.learning_rate, args.seed)
    test_rows = testing.at(np.arange(args.test_rows))
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(args.out.resolve() / "checkpoints", options=options) as manager:
        state, log = restore(manager, trainer)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("", total=args.steps)
            for step in range(len(log), args.steps):
                batch = training.at(batch_rows(len(training.tokens), args.batch_size, args.seed, step))
                state, losses = trainer.step(state, *batch, select="all" if step < args.warm_up else "top_k")
                log.append({"step": step + 1, **{name: float(value) for name, value in losses.items()}})
                last = step + 1 == args.steps
                if step % args.test_every == 0 or last:
                    found = trainer.test(state["params"], *test_rows)
                    log[-1] |= {name: float(value) for name, value in found.items()}
                    console.print("  ".join(f"{name} {value:.4g}" for name, value in log[-1].items()))
                if (step + 1) % args.save_every == 0 or last:
                    save = ocp.args.Composite(state=ocp.args.StandardSave(state), log=ocp.args.JsonSave({"rows": log}))
                    manager.save(step + 1, args=save)
                bar.update(task, completed=step + 1, description=f"loss {log[-1]['loss']:.3f}")
    return log


def restore(manager: ocp.CheckpointManager, trainer: Trainer) -> tuple[dict[str, Any], Log]:
    """The last checkpoint's state and log, or the initial state and an empty log."""
    step = manager.latest_step()
    if step is None:
        return trainer.initial, []
    wanted = ocp.args.Composite(state=ocp.args.StandardRestore(trainer.initial), log=ocp.args.JsonRestore())
    restored = manager.restore(step, args=wanted)
    return restored["state"], restored["log"]["rows"]


def plot(log: Log, by_chance: float, warm_up: int, path: pathlib.Path) -> None:
    """Plot the losses above, and the tests of the indexer below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    steps, tests = [row["step"] for row in log], [row for row in log if "test_loss" in row]
    tested = [row["step"] for row in tests]
    above.plot(steps, [row["loss"] for row in log], linewidth=0.7, label="training")
    above.plot(tested, [row["test_loss"] for row in tests], label="test")
    above.set_ylabel("nats per byte")
    above.legend()
    divergence = below.plot(tested, [row["indexer_divergence"] for row in tests], color="tab:red")
    below.set_ylabel("divergence from the attention, nats", color="tab:red")
    below.set_xlabel("step")
    shares = below.twinx()
    recall = shares.plot(tested, [row["indexer_recall"] for row in tests], color="tab:green")
    luck = shares.axhline(by_chance, color="tab:green", linestyle=":")
    shares.set_ylabel("share of the attention's top-k that is found", color="tab:green")
    shares.set_ylim(0.0, 1.0)
    warm = below.axvline(warm_up, color="gray", linewidth=0.8)
    below.legend(
        [*divergence, *recall, luck, warm],
        ["the indexer's divergence", "its recall", "recall by chance", "end of the warm-up"],
        fontsize="small",
        loc="center right",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> Log:
    """Parse the arguments, train and plot; return the log."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000, help="steps in total, resumed ones included [%(default)s]")
    parser.add_argument("--warm-up", type=int, default=300, help="first steps, with all entries [%(default)s]")
    parser.add_argument("--batch-size", type=int, default=4, help="rows per step [%(default)s]")
    parser.add_argument("--row-length", type=int, default=512, help="bytes per row [%(default)s]")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="reached after 50 steps [%(default)s]")
    parser.add_argument("--test-every", type=int, default=50, help="steps between tests [%(default)s]")
    parser.add_argument("--test-rows", type=int, default=16, help="rows to test on [%(default)s]")
    parser.add_argument("--save-every", type=int, default=250, help="steps between checkpoints [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="random seed [%(default)s]")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("train_tiny"), help="for output [%(default)s]")
    args = parser.parse_args(argv)
    training, testing = load_text(args.row_length)
    for name, limit in (("batch_size", len(training.tokens)), ("test_rows", len(testing.tokens))):
        if not 1 <= getattr(args, name) <= limit:
            option = f"--{name.replace('_', '-')}"
            parser.error(f"{option}: expected 1 to {limit}, the number of rows, got {getattr(args, name)}")
    shortest = CONFIG.csa_ratio * (CONFIG.index_topk + 1)
    if args.row_length < 2 * shortest:  # no query would see more entries than it may select
        parser.error(f"--row-length: expected at least {2 * shortest}, got {args.row_length}")
    console = Console(highlight=False, soft_wrap=True)
    log = train(args, training, testing, console)
    by_chance = chance(testing.segment_ids[: args.test_rows], CONFIG)
    plot(log, by_chance, args.warm_up, args.out / "training.png")
    console.print(f"recall by chance {by_chance:.3g}; wrote {args.out / 'training.png'}")
    return log


if __name__ == "__main__":
    main()
