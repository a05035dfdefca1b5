"""`foveal` and `foveal demo`: what they print, what they refuse, and that the checks can fail."""

import dataclasses
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import foveal
from foveal.backends.chunked import Chunked
from foveal.backends.dense import Dense
from foveal.cli import checks, errors, layer, main, picture, text
from foveal.cli.console import progress
from foveal.config import AttentionConfig
from foveal.geometry import Visibility
from foveal.layers import LayerType
from foveal.testing import choices
from foveal.testing.reference import reference_attention

SOURCE = str(Path(foveal.__file__).parents[1])
PROSE = (
    "# A heading\n\nAll happy families are alike; each unhappy family is unhappy in its own way.\n \t\n"
    "Call me Ishmael.\r\n\r\nIt was the best of times, it was the worst of times, it was the age of wisdom.\n"
)


@pytest.fixture
def prose(tmp_path):
    path = tmp_path / "prose.txt"
    path.write_bytes(PROSE.encode())
    return str(path)


@pytest.fixture
def run_one_layer(monkeypatch, tmp_path, capsys):
    """The demo with one small layer, to compile quickly, and no picture."""

    def run_one_layer(kind, length=48, code=0):
        path = tmp_path / "two.txt"
        path.write_text("Call me Ishmael.\n\nAll happy families are alike.")
        monkeypatch.setattr(layer, "DEMO_CONFIG", dataclasses.replace(AttentionConfig.tiny(), layer_types=(kind,)))
        monkeypatch.setattr(picture, "draw", lambda paragraphs, seed, path: None)
        assert main(["demo", str(path), "--length", str(length), "--output", str(tmp_path / "picture.png")]) == code
        out, err = capsys.readouterr()
        assert err == ""
        assert out.splitlines()[-1].startswith("FAIL" if code else "PASS")
        return out

    return run_one_layer


# --- The report -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_full_size_layers_pass_and_the_report_is_plain_text(prose, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    picture = tmp_path / "new" / "folder" / "picture.png"
    assert main(["demo", prose, "--length", "192", "--rows", "1", "--output", str(picture)]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "\x1b" not in out
    assert f"Text: {prose}" in out
    assert "Documents: 4 of 11 to 79 bytes" in out
    (none,) = (line for line in out.splitlines() if "no entries" in line)
    assert none.startswith(
        "HCA: no entries to compare, as each covers 128 tokens and the longest document has 79; only"
    )
    assert out.splitlines()[-1].startswith("PASS (float32")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_layer_that_looks_across_documents_fails(run_one_layer, monkeypatch):
    honest = foveal.CompressedAttention.__call__
    monkeypatch.setattr(foveal.CompressedAttention, "__call__", lambda self, x, **_: honest(self, x))
    out = run_one_layer(LayerType.HCA, code=1)
    assert "HCA, packed vs alone: output" in out
    assert "HCA, packed vs alone: gradient" in out
    assert "HCA, packed vs reference: output" in out


def test_a_wrong_gradient_alone_fails(run_one_layer, monkeypatch):
    def reference(*arguments):
        out = reference_attention(*arguments)
        return out + 1e-4 * (out - jax.lax.stop_gradient(out))

    monkeypatch.setattr(checks, "reference_attention", reference)
    out = run_one_layer(LayerType.SLIDING, code=1)
    assert "packed vs reference: gradient" in out
    assert "packed vs reference: output" not in out
    assert "packed vs alone:" not in out


@pytest.mark.parametrize("implementation", [Chunked, Dense])
def test_implementations_that_disagree_fail(implementation, run_one_layer, monkeypatch):
    """The report is about the chunked one, so the reference has something to say only if that is wrong."""
    honest = implementation.__call__

    def wrong(self, request):
        out, lse = honest(self, request)
        return out * 1.001, lse

    monkeypatch.setattr(implementation, "__call__", wrong)
    out = run_one_layer(LayerType.SLIDING, code=1)
    assert "sliding, chunked vs dense: output" in out
    assert "sliding, chunked vs dense: gradient" in out
    assert ("packed vs reference:" in out) is (implementation is Chunked)


@pytest.mark.slow
def test_undecided_queries_are_left_out_and_counted(run_one_layer, monkeypatch):
    """With every lead taken for rounding, those queries are left that see few entries, and they still agree."""
    monkeypatch.setattr(checks, "UNDECIDED", 1e9)
    out = run_one_layer(LayerType.CSA)
    assert "CSA: queries left out of the comparison" in out
    assert "no entries" not in out


def test_rows_too_short_for_an_entry_are_said_to_have_none(run_one_layer):
    none = "CSA: no entries to compare, as each covers 4 tokens and the longest document has 3; only the sliding"
    assert none in run_one_layer(LayerType.CSA, length=3)


def test_progress_shows_on_a_terminal_only():
    for terminal in (True, False):
        file = io.StringIO()
        with progress(Console(file=file, force_terminal=terminal, width=80), 2) as advance:
            advance("picture")
        shown = file.getvalue()
        assert ("picture" in shown) is terminal
        assert (shown == "") is not terminal


def test_long_files_and_odd_bytes_are_drawn(tmp_path):
    paragraphs = [b"a", b"$x^2$ \xff\x00", b"\xe4\xb8\xad", b"long " * 400]
    picture.draw(paragraphs, 0, tmp_path / "picture.PNG")
    assert (tmp_path / "picture.PNG").read_bytes().startswith(b"\x89PNG")


# --- What the report is made of ---------------------------------------------------------------------------------------


def test_the_indexer_selects_as_many_visible_entries_as_it_may():
    config = AttentionConfig.tiny()
    sample = layer.make_sample([b"thirty-three tokens of plain text", b"and some more"], 64, config, 0)
    documents = sample.packed.documents
    module = layer.make_layer(config, LayerType.CSA, 0)
    slots, lead = choices.selected_entries(module, sample.packed.values, documents)
    visibility = Visibility(documents, config.sliding_window, config.csa_ratio)
    counts = np.asarray(visibility.entry_counts)
    assert ((slots >= 0).sum(-1) == np.minimum(counts, config.index_topk)).all()
    assert np.asarray(visibility.sees_slots(jnp.asarray(slots)))[slots >= 0].all()
    assert (np.isinf(lead) == (counts <= config.index_topk)).all()
    assert (lead > 0).all()


def test_a_tie_is_undecided_and_an_invisible_rival_is_none():
    scores = np.array([[[3.0, 2.0, 2.0], [3.0, 2.0, 1.0], [-3.0, -4.0, 9.0]]], np.float32)
    visible = np.array([[[True, True, True], [True, True, True], [True, True, False]]])
    lead = choices._lead(jnp.asarray(scores), jnp.asarray(visible), 2)
    np.testing.assert_allclose(lead, [[0.0, 1 / 3, np.inf]], rtol=1e-6)


@pytest.mark.parametrize("lengths", [[5], [3, 1, 9], [500] + [1] * 300])
def test_every_document_runs_alone_once_in_at_most_two_shapes(lengths):
    batches = list(checks._batches(lengths))
    assert sorted(member for members, _, _ in batches for member in members) == list(range(len(lengths)))
    assert all(len(members) <= rows for members, rows, _ in batches)
    assert all(lengths[member] <= width for members, _, width in batches for member in members)
    assert len({(rows, width) for _, rows, width in batches}) <= 2


# --- Text -------------------------------------------------------------------------------------------------------------


def test_paragraphs_stand_between_blank_lines():
    content = b"\n\n a\nb\n\n\nc\r\n\r\nd\n \t\ne\n\n  \n"
    assert text.split_paragraphs(content) == [b" a\nb", b"c", b"d", b"e"]


@settings(max_examples=30)  # each new number of rows compiles
@given(
    st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=30), st.sampled_from([3, 16]), st.integers(1, 2)
)
def test_pieces_fill_the_rows_in_order(paragraphs, length, rows):
    pieces = text.fit_rows(paragraphs, length, rows)
    packed = foveal.pack_documents([np.frombuffer(piece, np.uint8) for piece in pieces.documents], length)
    assert packed.values.shape[0] <= rows
    every = [paragraph[i : i + length] for paragraph in paragraphs for i in range(0, len(paragraph), length)]
    rest = iter(every)
    assert all(piece in rest for piece in pieces.documents)
    assert pieces.complete == (len(pieces.documents) == len(every))
    assert pieces.split <= sum(len(paragraph) > length for paragraph in paragraphs)


def test_splitting_is_counted_by_paragraph():
    assert text.fit_rows([b"abcdefghi", b"jk"], 4, 9) == ([b"abcd", b"efgh", b"i", b"jk"], 1, True)
    assert text.fit_rows([b"abcd", b"efgh"], 4, 1) == ([b"abcd"], 0, False)


def test_the_default_text_is_that_of_the_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "foveal"\n')
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    for name in ("README.md", "docs/deep/page.md", "other.md"):
        (tmp_path / name).write_text(f"in {name}")
    assert text.read_text([]) == ("README.md, docs/deep/page.md", [b"in README.md", b"in docs/deep/page.md"])


@pytest.mark.parametrize("project", ['[project]\nname = "another"\n', "not toml", "project = 1", None])
def test_elsewhere_the_default_text_is_the_package_description(project, tmp_path, monkeypatch):
    class Metadata(dict):
        @property
        def json(self):
            return {"description": "What it is.\n\nHow to use it."}

    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("somebody else's")
    if project is not None:
        (tmp_path / "pyproject.toml").write_text(project)
    monkeypatch.setattr(text.importlib.metadata, "metadata", lambda name: Metadata(Version="1.2"))
    source, paragraphs = text.read_text([])
    assert "installed package foveal 1.2" in source
    assert paragraphs == [b"What it is.", b"How to use it."]


def test_without_installation_or_checkout_a_file_is_asked_for(tmp_path, monkeypatch):
    def missing(name):
        raise text.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(text.importlib.metadata, "metadata", missing)
    with pytest.raises(errors.CliError, match="name a text file"):
        text.read_text([])


def test_help_and_version_load_neither_rich_nor_matplotlib():
    """Flax itself may import rich; what matters is that the command line does not add to it."""
    probe = "import sys, foveal; before = set(sys.modules); from foveal.cli import main; main(['--help']);"
    probe += "print({name.split('.')[0] for name in set(sys.modules) - before} & {'rich', 'matplotlib', 'torch'})"
    out = subprocess.check_output([sys.executable, "-c", probe], env={**os.environ, "PYTHONPATH": SOURCE}, text=True)
    assert out.splitlines()[-1] == "set()"


def test_ctrl_c_ends_without_a_traceback(prose, tmp_path):
    # To a process of its own it gets through even if this one ignores it.
    start = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
    start += "from foveal.cli import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", start, "demo", prose, "--output", str(tmp_path / "p.png")],
        env={**os.environ, "PYTHONPATH": SOURCE},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert first.startswith("Text: ")
    assert (process.returncode, err) == (130, "")
