"""Numbers of tokens, as people write lengths of context."""

import argparse

import pytest

from foveal.cli.main import make_parser
from foveal.cli.numbers import tokens_between

WRITTEN = {
    0: "0",
    512: "0.5k 512.0",
    1000: "1_000",
    2500: "2.5e3",
    4096: "4k 4K",
    131_072: "128k",
    1_000_000: "1000000 1e6 1E+6",
    1 << 20: "1M 1m",
}
NONE = "k 1.5 0.3k -1 -4k 1e-3 1e99 9999G nan inf 4kk 4kB 0x10 1e999999999"


@pytest.mark.parametrize(
    ("written", "tokens"), [(written, tokens) for tokens, ways in WRITTEN.items() for written in ways.split()]
)
def test_a_number_of_tokens_is_read(written, tokens):
    assert tokens_between(0, 1 << 30)(written) == tokens


@pytest.mark.parametrize("written", ["", "4 k", *NONE.split()])
def test_what_is_no_number_of_tokens_is_refused(written):
    with pytest.raises(argparse.ArgumentTypeError) as raised:
        tokens_between(1, 4096)(written)
    assert str(raised.value) == f"expected a whole number of tokens from 1 to 4096, got {written!r}"


@pytest.mark.parametrize(
    ("line", "name", "expected"),
    [
        ("cache --length 1e6", "length", 1_000_000),
        ("cache --max-rollback 1k", "max_rollback", 1024),
        ("compile --seq 512,4k,128k,1M", "seq", [512, 4096, 131_072, 1 << 20]),
        ("demo --length 0.5k", "length", 512),
        ("verify --random --tokens 2k", "tokens", 2048),
    ],
)
def test_every_command_reads_them_and_its_help_says_so(line, name, expected, capsys):
    command, *arguments = line.split()
    assert getattr(make_parser().parse_args([command, *arguments]), name) == expected
    with pytest.raises(SystemExit):
        make_parser().parse_args([command, "--help"])
    assert "4k (4096), 1M (1048576) or 1e6" in " ".join(capsys.readouterr().out.split())
