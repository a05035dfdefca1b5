"""The README's code runs as printed, and its commands exist."""

import contextlib
import io
import itertools
import pathlib
import re
import shlex

import pytest

from foveal.cli.main import make_parser

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: pathlib.Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run_and_print_what_the_page_says(page: pathlib.Path) -> None:
    """The blocks of a page run in order in one namespace; a text block after a python block is what that prints."""
    namespace: dict[str, object] = {}
    found = blocks(page)
    for (language, code), following in itertools.zip_longest(found, found[1:], fillvalue=("", "")):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(page), "exec"), namespace)
        if following[0] == "text":
            assert printed.getvalue().strip() == following[1].strip()


def test_the_readme_has_an_example() -> None:
    assert any(language == "python" for language, _ in blocks(ROOT / "README.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_named_by_a_page_exist(page: pathlib.Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE))
    assert named <= targets


COMMANDS = [
    pytest.param(line, id=f"{page.name}: {line}")
    for page in PAGES
    for language, code in blocks(page)
    if language == "sh"
    for line in code.splitlines()
    if line.startswith("foveal ")
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_a_page_are_ones_that_foveal_takes(command: str) -> None:
    assert callable(make_parser().parse_args(shlex.split(command)[1:]).run)
