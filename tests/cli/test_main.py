"""How every command ends."""

import signal
import sys
import threading
import time

import pytest

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
