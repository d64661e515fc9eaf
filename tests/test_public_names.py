"""docs/public_names.md: every public name is in it and has its help, and every name in it is there."""

import inspect
import json
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from exgrpo.train.config.options import Config
from tests.signatures import FILE, entries, is_section

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "public_names.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OWNERS = ("liger", "openrlhf", "transformers", "trl", "verl")
WHOLE = ("kernels", "heads", *(f"integrations.{owner}" for owner in OWNERS))
"""The modules of which every name without an underscore is public."""


def rows(section):
    """The rows of the table below a heading, as lists of cells."""
    table = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return found[2:]


def quoted(cell):
    return re.findall(r"`([^`]+)`", cell)


NAMES = [name for row in rows("Python") for name in quoted(row[0])]
PROGRAMS = [name for row in rows("Programs") for name in quoted(row[0])]


SECTIONS = {"of the run": Config}
SECTIONS |= {name: field.annotation for name, field in Config.model_fields.items() if is_section(field)}


def module_and_name(dotted):
    module, _, name = dotted.rpartition(".")
    try:
        return import_module(module), name
    except ImportError as error:  # the message names the packages
        if (error.name or "").partition(".")[0] == "exgrpo":
            raise
        pytest.skip(str(error))


def found(dotted):
    """What has a public name; None where its packages are not installed."""
    try:
        module, name = module_and_name(dotted)
    except pytest.skip.Exception:
        return None
    return getattr(module, name)


def public(module):
    """The names that a module gives: those of ``__all__``, or the functions and classes that it defines."""
    own = set()
    for name, value in vars(module).items():
        if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__:
            own.add(name)
    return set(getattr(module, "__all__", {name for name in own if name[0] != "_"}))


@pytest.mark.parametrize("dotted", NAMES)
def test_a_name_is_there_and_has_help(dotted):
    module, name = module_and_name(dotted)
    value = getattr(module, name)
    if not isinstance(value, str):
        assert (value.__doc__ or "").strip(), f"{dotted} has no docstring"


@pytest.mark.parametrize("module", WHOLE)
def test_every_name_of_a_public_module_is_listed(module):
    dotted = f"exgrpo.{module}"
    found, _ = module_and_name(f"{dotted}.any")
    listed = {name.removeprefix(f"{dotted}.") for name in NAMES if name.rpartition(".")[0] == dotted}
    assert public(found) == listed, f"docs/public_names.md and {dotted} differ"


def imported_by_pages():
    for page in PAGES:
        for module, names in re.findall(r"from (exgrpo[\w.]*) import (\w[\w, ]*)", page.read_text()):
            yield from (f"{module}.{name}" for name in names.split(", "))


def test_what_pages_tell_to_import_is_public():
    found = set(imported_by_pages())
    assert len(found) > 20
    assert found <= set(NAMES)


def test_every_program_of_the_pages_is_listed_and_there():
    named = {module for page in PAGES for module in re.findall(r"python -m (exgrpo[\w.]*\w)", page.read_text())}
    packages = {".".join(path.relative_to(ROOT).parts[:-1]) for path in (ROOT / "exgrpo").rglob("__main__.py")}
    assert named | packages <= set(PROGRAMS)
    assert [module for module in PROGRAMS if find_spec(module) is None] == []


def test_the_options_are_those_of_a_run():
    known = {name: {*section.model_fields} - {*SECTIONS} for name, section in SECTIONS.items()}
    listed = {row[0].strip("`"): set(quoted(row[1])) for row in rows("Options")}
    gone = {name: options - known.get(name, set()) for name, options in listed.items()}
    assert not any(gone.values()), f"options that recipes use are gone: {gone}"
    new = {name: options - listed.get(name, set()) for name, options in known.items()}
    assert not any(new.values()), f"add these options to docs/public_names.md: {new}"


def test_signatures_and_defaults_are_those_that_were_written_down():
    written = json.loads(FILE.read_text())
    values = {name: value for name in NAMES if (value := found(name)) is not None}
    values |= {f"options: {name}": section for name, section in SECTIONS.items()}
    differing = {name: lines for name, value in values.items() if (lines := entries(value)) != written.get(name, [])}
    gone = set(written) - {*NAMES, *values}
    mend = "`python -m tests.signatures` writes them down; CHANGELOG.md says what a user has to edit"
    assert not differing, f"parameters or defaults of public names are new or changed: {differing}; {mend}"
    assert not gone, f"public names are gone: {gone}; {mend}"
