"""Commands, run as on a command line."""

import json

import pytest

from foveal.cli.main import main


@pytest.fixture
def run(capsys):
    """Runs a command, whose words are divided by single blanks, and returns what it printed."""

    def run(words: str, *more: object, code: int = 0) -> str:
        assert main([*words.split(" "), *map(str, more)]) == code
        return capsys.readouterr().out

    return run


@pytest.fixture
def rows(run):
    """Runs a command and returns its lines of JSON; NaN and Infinity are none."""

    def rows(words: str, *more: object, code: int = 0) -> list[dict]:
        printed = run(words, *more, "--json", code=code)
        return [json.loads(line, parse_constant=pytest.fail) for line in printed.splitlines()]

    return rows
