"""What every test runs under: eight CPU devices, strict promotion, reproducible randomness."""

import collections
import gc
import os
import pathlib
import zlib
from collections.abc import Iterator

# Before jax is imported: it reads these once.
os.environ["JAX_PLATFORMS"] = "cpu"
# LLVM's optimisations are left out: most of the time goes into compiling what runs once. XLA's own passes all run. With
# them: XLA_FLAGS=--xla_backend_optimization_level=3, as .ci/run has it on the newest Python. What is given counts.
os.environ["XLA_FLAGS"] = " ".join(
    ["--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0", os.environ.get("XLA_FLAGS", "")]
).strip()
# One thread for torch in each of the test workers, and nothing from a model hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import jax
import numpy as np
import pytest

# Programs and traces are kept: to look at them every 700 new objects takes a twentieth of the time.
gc.set_threshold(10_000, 20, 20)
_MOST_MAPS = 20_000

# Files that `make test-quick` runs: as many as two minutes allow on two cores, of those whose tests took at most 0.65 s
# each on average in a run of the whole suite beside other work (pytest --durations=0).
_QUICK = """
    backends/test_registry backends/test_splash_choice backends/test_splash_cycles
    backends/test_splash_mesh checkpoint/test_files checkpoint/test_files_fuzz checkpoint/test_fp8 checkpoint/test_index
    checkpoint/test_names checkpoint/test_problem_files checkpoint/test_problems
    checkpoint/test_values cli/test_cache cli/test_console cli/test_mistakes cli/test_numbers cli/test_verify_whole
    geometry/test_document_law geometry/test_documents geometry/test_packing geometry/test_visibility nn/test_bad_input
    ops/test_core_attention ops/test_core_attention_edge_cases ops/test_core_attention_errors
    ops/test_output_projection ops/test_rope testing/test_checkpoints testing/test_generators
    testing/test_numerics test_aot test_cache test_checks test_config test_extras test_flops test_hf_config
    test_hf_config_writing test_local_files test_refusals test_schedule
"""
_QUICK_FILES = {pathlib.Path(__file__).parent / f"{name}.py" for name in _QUICK.split()}

if jax.__version_info__ < (0, 11):
    # XLA's older emitters for CPUs compile in half the time; JAX 0.12 has neither them nor the flag. To be set only
    # while jax reads the flags: libtpu, which reads them later, ends the process over one that it does not know.
    given = os.environ["XLA_FLAGS"]
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
    jax.devices()
    os.environ["XLA_FLAGS"] = given

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# An example may compile, so its time says nothing: no deadline.
_EVERYWHERE = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("ci", _EVERYWHERE, derandomize=True, max_examples=50)
# For a longer search by hand: make test PYTEST_ARGS=--hypothesis-profile=deep
hypothesis.settings.register_profile("deep", _EVERYWHERE, derandomize=False, max_examples=2000)
# For a quick pass on another Python.
hypothesis.settings.register_profile("quick", _EVERYWHERE, derandomize=True, max_examples=10)
hypothesis.settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--every N` is for a quick pass: on another Python, or while one works; `--reports` for `make reports`."""
    parser.addoption("--reports", action="store_true", help="run what is marked `report`, and nothing else")
    parser.addoption("--every", type=int, default=1, metavar="N", help="of a test's cases run the first and each N-th")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the quick tests, and deselects what `--every` and `--reports` leave out, alike in every worker."""
    every, reports = int(config.getoption("--every") or 1), bool(config.getoption("--reports"))
    seen: collections.Counter[str] = collections.Counter()
    kept, left_out = [], []
    for item in items:
        if item.path in _QUICK_FILES:
            item.add_marker("quick")
        test = item.nodeid.partition("[")[0]
        wanted = seen[test] % every == 0 and (item.get_closest_marker("report") is not None) == reports
        (kept if wanted else left_out).append(item)
        seen[test] += 1
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps() -> Iterator[None]:
    """Forgets compiled programs before there are too many: each takes several of the 65530 maps of a Linux process."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend on the test's name alone: on neither the worker nor the order."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def unchecked_annotations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls as a user makes them: this suite's check of annotations would speak first."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
