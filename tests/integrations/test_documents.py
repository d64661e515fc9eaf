"""What users read is right: examples run, links lead somewhere, options and modules of commands exist."""

import ast
import doctest
import inspect
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from pydantic import BaseModel

from exgrpo import kernels
from exgrpo.train.config.options import Config
from tests.programs import python

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARK = "# runs in the tests"
SECTIONS = {
    name: field.annotation.model_fields
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}
FUNCTIONS = [getattr(kernels, name) for name in kernels.__all__ if inspect.isfunction(getattr(kernels, name))]


def examples(page):
    """The page's examples as one program whose lines have the numbers that they have in the page."""
    lines, block = [], None
    for line in page.splitlines():
        if block is None:
            block = [] if line.rstrip() == "```python" else None
            lines.append("")
        elif line.rstrip() == "```":
            runs = block[:1] == [MARK]
            lines += [*(block if runs else [""] * len(block)), ""]
            block = None
        else:
            block.append(line)
    return "\n".join(lines)


def missing(program):
    """Packages that it imports at its top and that are not installed."""
    imports = [node for node in ast.parse(program).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {name.split(".")[0] for node in imports for name in imported(node)}
    return sorted(name for name in names if find_spec(name) is None)


def imported(node):
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]


def pages_to_run():
    """The first pages that a reader sees in every run of the tests, all of them in the long one."""
    for page in PAGES:
        if MARK in page.read_text():
            marks = () if page.stem in ("README", "kernels") else pytest.mark.long
            yield pytest.param(page, marks=marks, id=page.stem)


@pytest.mark.parametrize("page", list(pages_to_run()))
def test_the_examples_of_a_page_run(page, tmp_path):
    program = examples(page.read_text())
    if absent := missing(program):
        pytest.skip(f"not installed: {', '.join(absent)}")
    script = tmp_path / f"{page.stem}_page.py"
    script.write_text(program)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    python(script, cwd=tmp_path, env=environment, timeout=300)


def unknown(text, folder):
    """What a page names that is not there: files it links to, options of training, modules that its commands run."""
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    options = re.findall(rf"--({'|'.join(SECTIONS)})\.(\w+)", text)
    modules = re.findall(r"python -m ((?:exgrpo|benchmarks)[\w.]*)", text)
    return [
        *(link for link in links if not (folder / link).exists()),
        *(f"--{section}.{name}" for section, name in options if name not in SECTIONS[section]),
        *(module for module in modules if find_spec(module) is None),
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_options_and_modules_that_a_page_names_exist(page):
    assert not unknown(page.read_text(), page.parent)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_help_explains_every_argument_with_an_example_that_runs(function):
    text = inspect.getdoc(function)
    for section in ("Args:", "Returns:", "Raises:", "Example::"):
        assert f"\n{section}\n" in text
    arguments = text.split("\nArgs:\n")[1].split("\nReturns:\n")[0]
    described = ", ".join(re.findall(r"^    (\w+(?:, \w+)*):", arguments, re.MULTILINE)).split(", ")
    assert sorted(described) == sorted(inspect.signature(function).parameters)
    example = doctest.DocTestParser().get_doctest(
        text, {"torch": torch, **vars(kernels)}, function.__name__, None, None
    )
    assert example.examples
    report = []
    doctest.DocTestRunner().run(example, out=report.append)
    assert not report, "".join(report)
