"""The example generates what the trained model, run on all of the text at once, says comes next."""

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from examples import generate, train_tiny

# Orbax closes its event loops when the process ends.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]
PROMPTS = ["The ", 'The "with" statement']


COUNT = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of a model that has learned nothing, so that no byte is far likelier than all others."""
    out = tmp_path_factory.mktemp("untrained")
    trainer = train_tiny.Trainer(train_tiny.CONFIG, 1e-3, 0)
    with ocp.CheckpointManager(out / "checkpoints") as manager:
        state = ocp.args.StandardSave(trainer.initial)
        manager.save(1, args=ocp.args.Composite(state=state, log=ocp.args.JsonSave({"rows": []})))
    return out


@pytest.fixture(scope="module")
def loaded(folder):
    """Its programs: one object, so that they are compiled once."""
    return generate.load(folder)


def test_the_likeliest_bytes_are_those_of_a_full_pass(folder, loaded, capsys, monkeypatch):
    monkeypatch.setattr(generate, "load", {folder: loaded}.__getitem__)
    arguments = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    found = generate.main([*arguments, "--bytes", str(COUNT), "--temperature", "0", "--out", str(folder)])
    texts = np.zeros((len(PROMPTS), found.capacity), np.int32)
    ids = np.zeros_like(texts)
    for row, (prompt, drawn) in enumerate(zip(PROMPTS, found.tokens, strict=True)):
        texts[row, : len(prompt) + COUNT] = [*prompt.encode(), *drawn]
        ids[row, : len(prompt) + COUNT] = 1
    model = nnx.merge(loaded.graph, loaded.params)
    logits, _ = nnx.jit(model, static_argnums=2)(jnp.asarray(texts), jnp.asarray(ids), "top_k")
    for row, prompt, drawn in zip(np.asarray(logits), PROMPTS, found.tokens, strict=True):
        before = row[len(prompt) - 1 : len(prompt) + COUNT - 1]
        # What was drawn is the likeliest, but for rounding.
        np.testing.assert_allclose(before[np.arange(COUNT), drawn], before.max(axis=1), rtol=1e-4)
    printed = capsys.readouterr().out
    assert "this cache" in printed
    assert all(prompt in printed for prompt in PROMPTS)
    # 3 layers, keys and values of 4 heads of 32, float32.
    assert "3,072" in printed
    assert found.cache_bytes < 2 * 3072 * found.capacity


def test_the_seed_and_the_temperature_count(loaded):
    prompts = [prompt.encode() for prompt in PROMPTS]

    def drawn(temperature: float, seed: int) -> list:
        return loaded.generate(prompts, COUNT, temperature=temperature, seed=seed, quiet=True).tokens.tolist()

    assert drawn(0.7, 1) == drawn(0.7, 1)
    assert drawn(0.7, 1) != drawn(0.7, 2)
    assert drawn(0.0, 1) == drawn(0.0, 2)


@pytest.mark.parametrize("bad", [["--bytes", "0"], ["--prompt", ""], ["--temperature", "-1"], ["--out", "nowhere"]])
def test_what_cannot_be(bad, capsys):
    with pytest.raises(SystemExit):
        generate.main(bad)
    assert f"{bad[0]}: " in capsys.readouterr().err
