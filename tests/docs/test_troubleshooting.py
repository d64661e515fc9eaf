"""The messages that the page on troubleshooting quotes are those of the programs."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
QUOTED = re.findall(r"^\| `(.+?)` \| ", PAGE.read_text(), re.MULTILINE)


def templates(program):
    """The texts of a program, literal ones and f-strings, with three points for each value that is put in."""
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
            yield "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def fits(quoted, template):
    """Whether the fixed parts of what a page quotes stand in a template, in their order."""
    parts = [part.strip() for part in quoted.split("...") if part.strip()]
    return re.search(".*".join(map(re.escape, parts)), template, re.DOTALL) is not None


@pytest.fixture(scope="module")
def all_templates():
    return [text for path in sorted((ROOT / "exgrpo").rglob("*.py")) for text in templates(path.read_text())]


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_message_is_one_of_the_programs(quoted, all_templates):
    assert any(fits(quoted, template) for template in all_templates)
