"""How every command ends."""

import contextlib
import errno
import functools
import io
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import foveal
from foveal.cli.main import main


@pytest.fixture
def interruptible():
    """Ctrl-C as a process has it that was not told otherwise."""
    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupted:
    def __del__(self):
        raise KeyboardInterrupt


class Failing:
    def __del__(self):
        raise RuntimeError("in a destructor")


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_that_arrives_in_a_destructor_is_not_lost(capsys, monkeypatch):
    went_on = []

    def run(args):
        Interrupted()
        for _ in range(100):  # the signal is looked at between two instructions
            time.sleep(0.01)
        went_on.append(True)
        return 0

    monkeypatch.setattr("foveal.cli.cache.run", run)
    hook = sys.unraisablehook
    assert main(["cache"]) == 130
    assert not went_on
    assert capsys.readouterr() == ("", "")
    assert sys.unraisablehook is hook


def test_other_exceptions_in_destructors_are_left_to_whom_they_concern(monkeypatch):
    seen = []

    def run(args):
        Failing()
        return 0

    monkeypatch.setattr("foveal.cli.cache.run", run)
    monkeypatch.setattr("sys.unraisablehook", seen.append)
    assert main(["cache"]) == 0
    assert [unraisable.exc_type for unraisable in seen] == [RuntimeError]


# --- Output that cannot be written ------------------------------------------------------------------------------------

REPORT = {"verdict": "compiles", "message": ""}
COMMANDS = ["", "--help", "--version", "verify --help", "cache", "cache --json", "verify {folder}"]
COMMANDS += ["verify {folder} --json", "compile", "compile --json", "demo"]
LEFT = 141  # 128 + SIGPIPE, as a shell says of other programs
FULL_ERROR = "foveal: error: cannot write to standard output: No space left on device\n"
CLOSED_ERROR = "foveal: error: cannot write to standard output: it is closed\n"


def left_pipe() -> io.TextIOWrapper:
    reading, writing = os.pipe()
    os.close(reading)
    return open(writing, "w")


STREAMS = {
    "full, by lines": (functools.partial(open, "/dev/full", "w", buffering=1), 2, FULL_ERROR),
    "full, by blocks": (functools.partial(open, "/dev/full", "w"), 2, FULL_ERROR),
    "left by its reader": (left_pipe, LEFT, ""),
    "closed": (contextlib.nullcontext, 2, CLOSED_ERROR),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("stream", STREAMS)
def test_an_output_that_cannot_be_written_ends_every_command(stream, command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("foveal.cli.compile._in_a_process", lambda case, timeout, cycles: REPORT)
    opened, code, said = STREAMS[stream]
    with opened() as output:
        monkeypatch.setattr("sys.stdout", output)
        assert main([part.replace("{folder}", str(tmp_path)) for part in command.split()]) == code
    assert capsys.readouterr().err == said


def test_a_long_command_ends_with_the_next_line_that_nobody_reads(monkeypatch):
    compiled = []
    monkeypatch.setattr("foveal.cli.compile._in_a_process", lambda case, *_, **__: compiled.append(case) or REPORT)
    with left_pipe() as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        assert main(["compile", "--seq", "512,1024,2048", "--json"]) == LEFT
    assert len(compiled) == 1


def test_a_file_that_is_full_is_not_taken_for_the_output(monkeypatch):
    """What else goes wrong with files is the command's own affair."""

    def run(args):
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/x")

    monkeypatch.setattr("foveal.cli.cache.run", run)
    with pytest.raises(OSError, match="No space left"):
        main(["cache"])


@pytest.mark.parametrize("stream", ["full, by lines", "left by its reader", "closed"])
def test_where_nobody_can_be_told_the_code_says_it(stream, monkeypatch):
    with STREAMS[stream][0]() as error:
        monkeypatch.setattr("sys.stderr", error)
        assert main(["cache", "--length", "x"]) == 2
        assert main(["verify"]) == 2


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("cache --json > /dev/full", 2, FULL_ERROR),
        ("cache >&-", 2, CLOSED_ERROR),
        ("cache | :", LEFT, ""),
        ("cache --length x 2> /dev/full", 2, ""),
    ],
)
def test_the_process_ends_as_the_command_does(line, code, said):
    """Nothing is left for Python to complain about when it ends."""
    script = f"set -o pipefail; {shlex.quote(sys.executable)} -m foveal {line}"
    environment = {**os.environ, "PYTHONPATH": str(Path(foveal.__file__).parents[1])}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, said)
    assert done.stdout == ""


def test_help_and_version(capsys):
    assert main(["--help"]) == 0
    found = capsys.readouterr()
    assert main([]) == 0
    assert capsys.readouterr() == found
    for command in ("demo", "compile", "cache", "verify"):
        assert command in found.out
    assert main(["demo", "--help"]) == 0
    of_demo = capsys.readouterr()
    assert "demo" in of_demo.out
    assert main(["--version"]) == 0
    assert capsys.readouterr() == (f"foveal {foveal.__version__}\n", "")
    assert found.err == of_demo.err == ""
