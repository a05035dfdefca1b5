"""What to install is said in one way: nothing of this name is published, so it is a checkout's."""

import ast
import pathlib
import re
import tomllib

import pytest

import foveal
from foveal.backends import registry
from foveal.extras import missing

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = sorted(pathlib.Path(foveal.__file__).parent.rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_the_message_names_the_package_and_a_command_for_a_checkout():
    assert missing("tokamax", "tpu") == "tokamax is missing: pip install '.[tpu]' in a checkout of Foveal"


@pytest.mark.parametrize("path", [*SOURCES, *PAGES], ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_command_installs_a_name_that_anyone_could_register(path):
    text = path.read_text()
    assert "foveal[" not in text
    assert not re.search(r"pip install ['\"]?foveal\b", text)


def test_every_extra_that_is_named_exists():
    named = set()
    for path in SOURCES:
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        extras = [call.args[1] for call in calls if getattr(call.func, "id", "") in ("missing", "require")]
        named |= {extra.value for extra in extras if isinstance(extra, ast.Constant)}
    named |= {needs[1] for needs in (registry.named(name).needs for name in registry.names()) if needs}
    for path in [*SOURCES, *PAGES]:
        named |= {extra for some in re.findall(r"'\.\[([a-z,-]+)\]'", path.read_text()) for extra in some.split(",")}
    assert {"checkpoint", "demo", "tpu", "tpu-aot"} <= named <= set(EXTRAS)
