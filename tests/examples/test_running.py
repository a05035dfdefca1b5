"""Examples run as scripts and as modules, wherever one stands."""

import os
import pathlib
import subprocess
import sys

import pytest

import foveal

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["generate", "train_tiny", "-m examples.generate"])
def test_an_example_runs_as_a_script_and_as_a_module(name, tmp_path):
    """Without the checkout on Python's path, but for what `-m` puts there: the folder that it is run from.

    `generate` imports `train_tiny`, so that it shows how that is found either way.
    """
    script = [str(ROOT / "examples" / f"{name}.py")]
    command, folder = (name.split(), ROOT) if name.startswith("-m") else (script, tmp_path)
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
