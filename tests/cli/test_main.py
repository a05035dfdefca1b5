"""How every command ends."""

import contextlib
import errno
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
COMMANDS = [
    [],
    ["--help"],
    ["--version"],
    ["verify", "--help"],
    ["cache"],
    ["cache", "--json"],
    ["verify", "{folder}"],
    ["verify", "{folder}", "--json"],
    ["compile"],
    ["compile", "--json"],
    ["demo"],
]
LEFT = 141  # 128 + SIGPIPE, as a shell says of other programs


def to(stream: io.TextIOWrapper | None, command, folder, monkeypatch) -> int:
    monkeypatch.setattr("foveal.cli.compile._in_a_process", lambda case, timeout, cycles: REPORT)
    monkeypatch.setattr("sys.stdout", stream)
    return main([part.replace("{folder}", str(folder)) for part in command])


def left_pipe() -> io.TextIOWrapper:
    reading, writing = os.pipe()
    os.close(reading)
    return open(writing, "w")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("buffering", [1, -1], ids=["lines", "blocks"])
def test_a_full_device_ends_every_command_with_one_line(command, buffering, tmp_path, monkeypatch, capsys):
    with open("/dev/full", "w", buffering=buffering) as full:
        assert to(full, command, tmp_path, monkeypatch) == 2
    assert capsys.readouterr().err == "foveal: error: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_reader_who_has_left_ends_every_command_without_a_word(command, tmp_path, monkeypatch, capsys):
    with left_pipe() as pipe:
        assert to(pipe, command, tmp_path, monkeypatch) == LEFT
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_closed_output_is_a_mistake_in_the_set_up(command, tmp_path, monkeypatch, capsys):
    assert to(None, command, tmp_path, monkeypatch) == 2
    assert capsys.readouterr().err == "foveal: error: cannot write to standard output: it is closed\n"


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


@pytest.mark.parametrize("stream", ["closed", "full", "left"])
def test_where_nobody_can_be_told_the_code_says_it(stream, monkeypatch):
    with contextlib.ExitStack() as opened:
        streams = {"closed": lambda: None, "full": lambda: opened.enter_context(open("/dev/full", "w", buffering=1))}
        streams["left"] = lambda: opened.enter_context(left_pipe())
        monkeypatch.setattr("sys.stderr", streams[stream]())
        assert main(["cache", "--length", "x"]) == 2
        assert main(["verify"]) == 2


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("cache --json > /dev/full", 2, "foveal: error: cannot write to standard output: No space left on device\n"),
        ("cache >&-", 2, "foveal: error: cannot write to standard output: it is closed\n"),
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


def test_without_a_command_there_is_help(capsys):
    assert main([]) == 0
    bare = capsys.readouterr()
    assert main(["--help"]) == 0
    assert bare == capsys.readouterr()
    for command in ("demo", "compile", "cache", "verify"):
        assert command in bare.out
