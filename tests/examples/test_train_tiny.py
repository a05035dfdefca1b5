"""The example trains: what it logs falls or rises as it should, and what a checkpoint holds is all there is."""

import shutil

import jax
import numpy as np
import pytest

from examples import train_tiny
from foveal.testing.reference import reference_visibility

SHORT = ["--row-length", "160", "--batch-size", "4", "--test-rows", "8", "--warm-up", "40", "--test-every", "1000"]
# Orbax's, not ours: it closes its event loops when the process ends.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]


class Alike(train_tiny.Trainer):
    """Trainers that are equal, as here they differ in nothing: JAX takes the programs of the first for all."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        # Where Orbax puts what it restores: JAX compiles anew for arrays that are bound to a device.
        self.initial = jax.device_put(self.initial, jax.devices()[0])

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alike)


@pytest.fixture(scope="module", autouse=True)
def compiled_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_tiny, "Trainer", Alike)
        yield


def run(arguments: list[str]) -> train_tiny.Log:
    """With JAX's usual rules of promotion: optax is not made for stricter ones."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return train_tiny.main(arguments)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder and the log of a run that nobody interrupted."""
    out = tmp_path_factory.mktemp("whole")
    return out, run([*SHORT, "--steps", "60", "--save-every", "30", "--out", str(out)])


def test_losses_fall_and_recall_rises_from_chance(whole):
    out, log = whole
    assert [row["step"] for row in log] == list(range(1, 61))
    first, last = (next(row for row in rows if "test_loss" in row) for rows in (log, log[::-1]))
    assert first["loss"] > 5.0  # of 256 bytes nothing is known yet: log 256 = 5.5
    assert last["test_loss"] < 3.2
    assert last["indexer_divergence"] < 0.6 * first["indexer_divergence"]
    segment_ids = train_tiny.load_text(160)[1].segment_ids[:8]
    chance = train_tiny.chance(segment_ids, train_tiny.CONFIG)
    assert abs(first["indexer_recall"] - chance) < 0.1
    assert last["indexer_recall"] > chance + 0.1
    assert (out / "training.png").stat().st_size > 10_000


def test_a_run_that_went_on_from_a_checkpoint_is_the_same_run(whole, tmp_path):
    """To the bit: parameters, the optimiser's state and the place in the data all came back."""
    out, log = whole
    # What is there of a run that stopped after 30 steps.
    shutil.copytree(out / "checkpoints" / "30", tmp_path / "checkpoints" / "30")
    resumed = run([*SHORT, "--save-every", "30", "--out", str(tmp_path), "--steps", "60"])
    for row, expected in zip(resumed, log, strict=True):
        assert (row["loss"], row["indexer_loss"]) == (expected["loss"], expected["indexer_loss"]), row["step"]


def test_chance_is_that_of_a_random_choice():
    segment_ids = train_tiny.load_text(160)[1].segment_ids[:4]
    config = train_tiny.CONFIG
    seen = reference_visibility(segment_ids, config.sliding_window, config.csa_ratio)[1].sum(axis=2)
    expected = np.mean([config.index_topk / n for n in seen.ravel() if n > config.index_topk])
    assert train_tiny.chance(segment_ids, config) == pytest.approx(expected)


def test_every_row_of_an_epoch_is_trained_on_once():
    rows = [train_tiny.batch_rows(22, 4, 0, step) for step in range(10)]
    for epoch in (rows[:5], rows[5:]):
        assert len(set(np.concatenate(epoch).tolist())) == 20
    assert np.concatenate(rows[:5]).tolist() != np.concatenate(rows[5:]).tolist()


def test_the_text_is_whole_and_its_parts_are_apart():
    training, testing = train_tiny.load_text(160)
    lengths = [int((rows.segment_ids > 0).sum()) for rows in (training, testing)]
    assert sum(lengths) == sum(len(text.encode()) for text in train_tiny.TOPICS.values())
    assert 0.03 < lengths[1] / sum(lengths) < 0.3


@pytest.mark.parametrize("bad", [["--test-rows", "0"], ["--batch-size", "100000"], ["--row-length", "64"]])
def test_what_cannot_be_is_said_before_anything_is_trained(bad, capsys, tmp_path):
    with pytest.raises(SystemExit):
        train_tiny.main([*bad, "--out", str(tmp_path)])
    assert f"{bad[0]}: expected" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
