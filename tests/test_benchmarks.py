"""The benchmark: what it measures, and that it gives no ratio where the contenders disagree."""

import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import types
from unittest import mock

import numpy as np
import pytest

from benchmarks import compiled, contenders, indexer, measure, report, serving, tiles
from benchmarks.cases import Case, suite
from foveal import LayerType

BENCHMARKS = pathlib.Path(compiled.__file__).parent
RESULTS = BENCHMARKS / "results"
HCA = Case("core", "hca", length=256, heads=4, head_dim=64, backward=True)
CSA = Case("core", "csa", length=64, heads=4, head_dim=64, backward=True, top_k=8)
PEERS = {"chunked", "dense"} | ({"transformers"} if importlib.util.find_spec("transformers") else set())


@pytest.fixture(scope="module")
def attention() -> types.ModuleType:
    """The script; it sets the environment to one thread when imported, which must not outlive these tests."""
    with mock.patch.dict(os.environ):
        import benchmarks.attention

    return benchmarks.attention


build_once = functools.cache(contenders.build)


@pytest.fixture
def measured(attention, monkeypatch):
    """Measures a case, with a small matmul for the peak and each contender built once for all tests."""
    monkeypatch.setattr(attention, "PEAK_SIZE", 128)
    monkeypatch.setattr(attention, "build", build_once)
    return lambda case: attention.measure(case, rounds=1, memory=False)


def row(case=HCA, disagreement="", **seconds):
    return {
        "case": case.name,
        **dataclasses.asdict(case),
        "seconds": seconds,
        "utilisation": dict.fromkeys(seconds, 0.5),
        "resident_bytes": {"chunked": 3 << 20},
        "temporaries_bytes": {"chunked": 5 << 20},
        "disagreement": disagreement,
        "versions": {"jax": "1.2.3"},
    }


# --- Cases ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["quick", "core", "layer", "long", "bf16"])
def test_every_suite_names_valid_cases_each_once(name):
    cases = suite(name)
    assert cases
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert case.config.num_attention_heads == case.heads  # building the config checks the sizes
        assert case.layer_type in LayerType
        assert case.documents.shape == (1, case.length)
        assert case.visibility.slots == case.length // {"hca": 128, "csa": 4}[case.layer]


def test_an_unknown_suite_is_refused():
    with pytest.raises(ValueError, match="suite: expected quick, core, layer, long or bf16, got 'nonsense'"):
        suite("nonsense")


def test_scores_that_would_not_fit_are_left_to_chunked(attention):
    assert attention.contenders(HCA) == ["chunked", *sorted(PEERS - {"chunked"})]
    assert attention.contenders(dataclasses.replace(HCA, length=1 << 16)) == ["chunked"]
    assert attention.contenders(dataclasses.replace(HCA, dtype="bfloat16")) == ["chunked", "dense"]


# --- Measuring --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [HCA, CSA, pytest.param(dataclasses.replace(CSA, what="layer"), marks=pytest.mark.slow)],
    ids=lambda case: case.name,
)
def test_contenders_agree_and_are_timed(case, measured):
    found = measured(case)
    assert found["disagreement"] == ""
    assert set(found["seconds"]) == PEERS
    assert all(taken >= 0 for taken in found["seconds"].values())
    assert set(found["utilisation"]) == PEERS
    assert found["resident_bytes"] == {}
    assert json.loads(json.dumps(found))["case"] == found["case"]


@pytest.mark.parametrize("contender", sorted(PEERS))
@pytest.mark.parametrize("result", ["out", "d_kv"])
def test_one_wrong_contender_is_a_disagreement_and_no_ratio(contender, result, measured, attention, monkeypatch):
    """Off by a hundredth of the largest element, which no float32 tolerance forgives."""

    def build(case, name, undecided=()):
        built = build_once(case, name, undecided)
        results = built.results()
        wrong = {**results, result: results[result] + 0.01 * np.abs(results[result]).max()}
        return dataclasses.replace(built, results=lambda: wrong if name == contender else results)

    monkeypatch.setattr(attention, "build", build)
    found = measured(HCA)
    assert found["disagreement"].startswith("chunked and ")
    assert contender == "chunked" or contender in found["disagreement"]
    assert ("output" if result == "out" else "d_kv") in found["disagreement"]
    assert "disagree" in report.table([found])


def test_a_disagreement_ends_in_code_1(attention, monkeypatch, capsys):
    monkeypatch.setattr(attention, "suite", lambda name: [HCA])
    for disagreement, code in (("", 0), ("chunked and dense: output", 1)):
        monkeypatch.setattr(attention, "measure", lambda *_, said=disagreement, **__: row(disagreement=said, chunked=1))
        assert attention.main([]) == code
        assert HCA.name in capsys.readouterr().out


def test_times_are_medians_after_a_warm_up():
    calls = []
    seconds = measure.interleaved({name: lambda name=name: calls.append(name) for name in "ab"}, 3)
    assert calls == list("abababab")  # in turn, and once more than measured
    assert set(seconds) == {"a", "b"}
    assert all(0 <= taken < 1 for taken in seconds.values())


def test_what_is_to_settle_is_run_once_more_before_each_time():
    calls = []
    runs = {name: lambda name=name: calls.append(name) for name in "ab"}
    measure.interleaved(runs, 2, settle=frozenset("b"))
    assert "".join(calls) == "ab" + "abb" * 2


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's memory high-water mark")
def test_resident_growth_counts_what_a_run_touches_and_frees():
    # In a process of its own: threads of this one, which has gigabytes, may free some of them meanwhile.
    code = "import numpy as np; from benchmarks import measure\n"
    code += "print(measure.peak_resident_growth(lambda: np.ones(64 << 20, np.uint8).sum()))"
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=BENCHMARKS.parent)
    assert 48 << 20 < int(ran.stdout) < 160 << 20


# --- The report -------------------------------------------------------------------------------------------------------


def test_ratios_are_to_chunked():
    text = report.table([row(chunked=0.5, dense=1.0, transformers=2.0)])
    assert [part in text for part in ("2.0x", "4.0x", "500", "disagree")] == [True, True, True, False]


def test_no_ratio_is_printed_where_the_contenders_disagree():
    said = "chunked and dense: output: 3 of 4 elements differ"
    bad = row(disagreement=said, chunked=0.5, dense=1.0, transformers=2.0)
    text = report.table([bad, row(CSA, chunked=1.0, dense=3.0)])
    of_bad, of_good = (next(line for line in text.splitlines() if case.name in line) for case in (HCA, CSA))
    assert "x " not in of_bad.split(HCA.name)[1]
    assert of_bad.count("disagree") == 2
    assert "3.0x" in of_good
    assert text.splitlines()[-1] == f"{HCA.name}: {said}"


def test_a_report_is_three_files(tmp_path):
    rows = [row(chunked=0.5, dense=1.0), row(CSA, chunked=1.0)]
    report.write(rows, tmp_path / "new", "core")
    lines, plot, text = sorted((tmp_path / "new").iterdir(), key=lambda path: path.suffix)
    assert [path.name for path in (lines, plot, text)] == [f"core-jax1.2.3.{end}" for end in ("jsonl", "png", "txt")]
    assert [json.loads(line) for line in lines.read_text().splitlines()] == rows
    assert text.read_text() == report.table(rows)
    assert plot.read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------------------------------- what the TPU compiler reports


def test_a_report_is_written_as_the_command_prints_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(compiled.REPORTS, "small", ("--preset", "tiny", "--target", "v5e", "--no-cycles"))
    compiled.main(["small", "--out", str(tmp_path)])
    (row,) = map(json.loads, (tmp_path / "compile-small.jsonl").read_text().splitlines())
    assert (row["preset"], row["verdict"]) == ("tiny", "compiles")
    monkeypatch.setitem(compiled.REPORTS, "small", ("--target", "none"))
    with pytest.raises(SystemExit, match="small: foveal compile ended with code 2"):
        compiled.main(["small", "--out", str(tmp_path)])


def kept(name: str) -> dict[tuple[int, str], dict]:
    """A kept report by length and implementation."""
    lines = (RESULTS / f"compile-{name}.jsonl").read_text().splitlines()
    return {(row["length"], row["implementation"]): row for row in map(json.loads, lines)}


def test_reports_are_those_of_the_commands():
    assert {path.name for path in RESULTS.glob("compile-*.jsonl")} == {f"compile-{n}.jsonl" for n in compiled.REPORTS}
    for name, arguments in compiled.REPORTS.items():
        asked = dict(zip(arguments, [*arguments[1:], ""], strict=True))
        rows = kept(name).values()
        assert {str(row["length"]) for row in rows} == set(asked["--seq"].split(","))
        assert {row["implementation"] for row in rows} == set(asked.get("--implementation", "splash").split(","))
        assert {row["backward"] for row in rows} == {"--backward" in arguments}
        assert {row["target"] for row in rows} == {asked.get("--target", "v5p")}


def test_the_table_in_the_docs_has_the_kept_figures():
    """Memory and cycles of static and dynamic masks, and the least time."""
    text = (RESULTS.parents[1] / "docs" / "splash.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if "| forward" in line and line[2].isdigit()]
    assert len(rows) == 10
    for length, passes, *cells in rows:
        name = "backward" if passes == "forward and backward" else "forward"
        static, dynamic = kept(f"core-{name}"), kept(f"dynamic-{name}")
        length = int(length)
        reports = [static[length, "splash"], dynamic[length, "splash_dynamic"], static[length, "chunked"]]
        expected = [f"{r['peak_bytes'] / 2**30:.1f}" if r["verdict"] == "compiles" else r["verdict"] for r in reports]
        expected += [f"{r['kernel_cycles'] / 1e6:.1f}" if r.get("kernel_cycles") else "" for r in reports[:2]]
        expected.append(f"{reports[0]['roofline_seconds'] * 1e3:.1f}")
        assert [cell.strip() for cell in cells] == expected, length


def test_the_picture_of_tiles(tmp_path):
    path = tmp_path / "tiles.png"
    tiles.draw(str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------------------------------------------------- the indexer


def test_the_indexers_row():
    row = indexer.measure(indexer.Case(128, 2, 8, 16), rounds=1)
    assert row["queries_that_differ"] == 0
    assert set(row["seconds"]) == {"ours", "materialised"}
    assert all(seconds > 0 for seconds in row["seconds"].values())
    visible = sum((t + 1) // 4 for t in range(128))
    assert indexer.Case(128, 2, 8, 16).operations == visible * 2 * 2 * 8


def test_the_indexers_resident_memory():
    """Of a small case, so next to nothing; a megabyte is the allocator's own grain."""
    assert indexer.resident_growth(indexer.Case(512, 2, 8, 16)) < 64 << 20


# ------------------------------------------------------------------------------------------------------------ the cache


def test_a_step_and_a_prompt_behind_a_cache():
    """What is timed runs, and a prompt in chunks ends as one pass does."""
    layer = serving.make_layer("hca", 256)
    out = np.asarray(serving.decoding(layer, 256, 100, steps=2)())
    assert out.shape == (1, 1, layer.config.hidden_size)
    assert np.isfinite(out).all()
    runs = serving.prompts(layer, 256, 64)
    whole, prefill, chunks = (np.asarray(runs[name]()) for name in ("pass", "prefill", "chunks"))
    np.testing.assert_allclose(prefill, whole, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(chunks, whole[:, -64:], rtol=1e-5, atol=1e-5)
