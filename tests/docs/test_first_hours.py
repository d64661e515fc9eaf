"""The first hours in docs/how_to run as they are written, files, changes and commands, and print what they show."""

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.programs import printed
from tests.train.launch import environment

ROOT = Path(__file__).parents[2]
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# (\w+\.py)\n")
HUNK = re.compile(r"((?:[ -].*\n)+)((?:\+.*\n)*)")
NEEDS = {"own_loop": (), "trl_script": ("trl",), "own_data": ("vllm",)}
"""The pages, and what `make check` does not install for them."""
SHORTER = {
    "T, D, V = 2048, 576, 49152": "T, D, V = 256, 64, 4096",
    "python before.py && python after.py && python whole_loss.py": "python -c 'import before, after, whole_loss'",
}
"""What takes less time in a page, whose numbers are not compared: smaller sizes, and one import of torch."""


def program_of(page):
    """The page as one program of a shell, without the block that installs."""
    files, lines = {}, ["set -eo pipefail"]
    for language, text in FENCED.findall(page):
        if language == "diff":
            old, new, changes = re.fullmatch(r"--- (\S+)\n\+\+\+ (\S+)\n(.*)", text, re.DOTALL).groups()
            files[new] = changed(files[old], changes)
            lines.append(written(new, files[new]))
        elif language == "python":
            name = NAMED.match(text)[1]
            files[name] = text
            lines.append(written(name, text))
        elif language == "bash" and "pip install" not in text:
            lines.append(text)
    return "\n".join(lines)


def changed(text, changes):
    """A file after the changes: the lines that stand in it once, with those that take their place or follow them."""
    for before, added in HUNK.findall(changes):
        kept = "".join(line[1:] for line in before.splitlines(True) if line[0] == " ")
        old, new = re.sub("^.", "", before, flags=re.MULTILINE), kept + re.sub(r"^\+", "", added, flags=re.MULTILINE)
        assert f"\n{text}".count(f"\n{old}") == 1, f"not once in the file:\n{old}"
        text = f"\n{text}".replace(f"\n{old}", f"\n{new}")[1:]
    return text


def written(name, text):
    return f"cat >{name} <<'END_OF_FILE'\n{text}END_OF_FILE"


def form(text):
    """A text without its numbers and breaks of lines: what is the same on another machine."""
    return re.sub(r"\s+", " ", re.sub(r"[+-]?\d+(\.\d+)?(e-?\d+)?", "#", text)).strip()


def follow(name, folder, variables):
    """Does what a page says, in a folder, and holds what it prints against the page."""
    page = (ROOT / "docs" / "how_to" / f"{name}.md").read_text()
    for text, shorter in SHORTER.items():
        page = page.replace(text, shorter)
    variables = {**variables, "COLUMNS": "200"}
    output = printed("bash", "-c", program_of(page), cwd=folder, env=variables, timeout=1700)
    shown = [line for language, text in FENCED.findall(page) if language == "text" for line in text.splitlines()]
    assert shown
    assert not [line for line in shown if form(line) not in form(output)], output


@pytest.mark.parametrize(
    "name", ["own_loop", *(pytest.param(name, marks=pytest.mark.long) for name in ("trl_script", "own_data"))]
)
@pytest.mark.timeout(1800)
def test_a_page_runs_where_all_is_installed(name, tmp_path):
    if absent := [package for package in NEEDS[name] if find_spec(package) is None]:
        pytest.skip(f"not installed: {', '.join(absent)}")
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    follow(name, tmp_path, {**environment(), "PATH": programs})
