"""Nothing of a number is lost, however narrow the terminal is."""

import io
import re

import pytest
from rich.console import Console
from rich.table import Table

from foveal.cli import compile as compile_command
from foveal.cli import demo, verify
from foveal.cli.checks import Agreement, LayerCheck
from foveal.cli.console import print_table, progress
from foveal.cli.layer import DEMO_CONFIG, make_sample
from foveal.cli.main import main
from foveal.cli.verify_layer import Comparison, Range, Statistics
from foveal.layers import LayerType


class Terminal(io.StringIO):
    def isatty(self):
        return True


def numbers(text: str) -> set[str]:
    """Wherever they stand; the headers repeat those of theirs."""
    return set(re.findall(r"\d[\d.,e+-]*", text))


def printed(table: Table, width: int) -> str:
    file = io.StringIO()
    print_table(Console(file=file, width=width, markup=False, highlight=False, soft_wrap=True), table)
    return file.getvalue()


def compile_table() -> Table:
    case = compile_command.CompileCase("v5p", "core", "hca", "flash", 131072, "splash", True, 8, "bfloat16", ())
    sizes = {"peak_bytes": 38_654_705_664, "temporary_bytes": 1_234_567_890, "kernel_cycles": 602_012_345}
    seconds = {"mask_seconds": 0.2, "lower_seconds": 10.44, "compile_seconds": 113.25, "roofline_seconds": 0.0838}
    row = {**vars(case), "chosen": True, "implementation": "splash_dynamic", "verdict": "compiles", **sizes, **seconds}
    return compile_command._table([row, row])


def verify_tables() -> list[Table]:
    spread = Range(-0.0123, 1.2345e-5)
    found = Statistics(24, 1234, ("BF16", "F8_E4M3"), False, (), (), spread, spread, spread)
    compared = {dtype: Comparison(1.2e-6, 3.4e-7, 88, 0.987, ()) for dtype in ("float32", "bfloat16")}
    reports = [verify.VerifiedLayer(layer, LayerType.CSA, (), found, compared) for layer in (0, 42)]
    return [verify._weights_table(reports), verify._comparison_table(reports, "transformers 5.24.0")]


def demo_table() -> Table:
    agreement = Agreement(1.2e-6, 3.4e-7, ())
    reports = [LayerCheck(kind, 123.4, 1234.5, 16.25, 0, agreement, agreement, agreement, 1234.0) for kind in LayerType]
    return demo._table(reports, make_sample([b"thirty-three tokens of plain text"], 64, DEMO_CONFIG, 0))


TABLES = {"compile": compile_table, "demo": demo_table}
TABLES |= {f"verify {i}": lambda i=i: verify_tables()[i] for i in range(2)}


@pytest.mark.parametrize("name", TABLES)
def test_a_narrow_table_has_every_number_of_a_wide_one(name):
    table = TABLES[name]()
    wide, narrow = printed(table, 1000), printed(table, 40)
    assert "…" not in wide + narrow
    assert "─" in wide
    assert numbers(narrow) == numbers(wide)
    assert numbers(printed(table, 100)) == numbers(wide)


def test_a_narrow_table_is_a_line_a_cell():
    table = Table("layer", "max |error|", "same", title="beside")
    table.add_row("42", "1.2e-06", "")
    table.add_row("43", "3.4e-06", "99%")
    assert printed(table, 20) == (
        "beside\nlayer: 42\n    max |error|: 1.2e-06\nlayer: 43\n    max |error|: 3.4e-06\n    same: 99%\n"
    )


@pytest.mark.parametrize("columns", ["40", "200"])
def test_a_terminal_of_forty_columns(columns, monkeypatch, capsys):
    assert main(["cache", "--preset", "pro"]) == 0
    piped = capsys.readouterr().out
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["cache", "--preset", "pro"]) == 0
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", terminal.getvalue())
    assert "…" not in shown
    values = [re.findall(r"\d+\.\d+ [GMK]iB|\d+ B|[\d,]+\.\d", text) for text in (shown, piped)]
    assert len(values[0]) > 10
    assert values[0] == values[1]


@pytest.mark.parametrize("width", [40, 100])
def test_the_bar_gives_way_to_the_numbers_beside_it(width):
    file = io.StringIO()
    with progress(Console(file=file, force_terminal=True, width=width), 43) as advance:
        advance("layer 0, S = 131072, splash_dynamic")
    assert re.search(r"0/43 .*0:00:00", re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", file.getvalue()))
