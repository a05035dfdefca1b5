"""Examples run as scripts and as modules, wherever one stands."""

import os
import pathlib
import subprocess
import sys

import pytest

import foveal

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["script", "script of this folder", "module"])
@pytest.mark.parametrize("name", ["generate", "train_tiny"])
def test_an_example_runs_as_a_script_and_as_a_module(name, way, tmp_path):
    """Without the checkout on Python's path, but for what `-m` puts there: the folder that it is run from."""
    command, folder = {
        "script": ([str(ROOT / "examples" / f"{name}.py")], tmp_path),
        "script of this folder": ([f"examples/{name}.py"], ROOT),
        "module": (["-m", f"examples.{name}"], ROOT),
    }[way]
    done = subprocess.run(
        [sys.executable, *command, "--out", str(tmp_path / "none"), "--seed", "x"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(foveal.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].endswith("argument --seed: invalid int value: 'x'")
