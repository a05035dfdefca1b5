"""Examples run as scripts and as modules, wherever one stands."""

import os
import pathlib
import subprocess
import sys

import pytest

import foveal

ROOT = pathlib.Path(__file__).parents[2]


def run(*arguments: str, folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Without the checkout on Python's path, but for what `-m` puts there: the folder that it is run from."""
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(foveal.__file__).parents[1])}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["generate", "train_tiny"])
def test_an_example_runs_as_a_script_and_as_a_module(name, tmp_path):
    script = ROOT / "examples" / f"{name}.py"
    ways = [([str(script)], tmp_path), ([f"examples/{name}.py"], ROOT), (["-m", f"examples.{name}"], ROOT)]
    for command, folder in ways:
        done = run(*command, "--out", str(tmp_path / "none"), "--seed", "x", folder=folder)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.splitlines()[-1].endswith("argument --seed: invalid int value: 'x'"), command
