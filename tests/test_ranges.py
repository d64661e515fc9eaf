"""The ranges of versions: pyproject.toml, the page of what was tried and the workflow that tries again say the same."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE = (ROOT / "docs" / "compatibility.md").read_text()
CELLS = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| ")]
ROWS = [cells for cells in CELLS if len(cells) == 6]
MATRIX = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())["jobs"]["versions"]["strategy"]["matrix"]
PINNED = ("verl", "openrlhf", "liger-kernel", "kernels")
PACKAGES = ("python", *MATRIX["package"], *PINNED)


def range_of(name):
    """The versions of a package that pyproject.toml promises, or the one that the Makefile names."""
    if name == "python":
        return SpecifierSet(PROJECT["requires-python"])
    texts = [*PROJECT["dependencies"], *(text for group in PROJECT["optional-dependencies"].values() for text in group)]
    texts += re.findall(r"\b[\w-]+==[\d.]+", (ROOT / "Makefile").read_text())
    return next(needed.specifier for text in texts if (needed := Requirement(text)).name == name)


def oldest(name):
    return min(Version(part.version) for part in range_of(name) if part.operator in (">=", "=="))


def works(row, name):
    return (row[0], row[3]) == (name, "works")


@pytest.mark.parametrize("name", PACKAGES)
def test_the_page_has_both_ends_of_a_range_and_none_of_them_fails(name):
    tried = [row for row in ROWS if works(row, name) and SpecifierSet(row[2]) == range_of(name)]
    assert oldest(name) in {Version(row[1]) for row in tried if row[5].startswith("oldest")}
    assert [row for row in tried if re.match("(oldest and )?newest", row[5])]
    assert not [row for row in ROWS if (row[0], row[3]) == (name, "fails") and Version(row[1]) in range_of(name)]


@pytest.mark.parametrize("package", MATRIX["include"], ids=lambda package: package["package"])
def test_the_workflow_tries_the_oldest_version(package):
    name, version = re.search(rf"({package['package']}[\w-]*)==(\S+)", package["oldest"]).groups()
    assert Version(version) == oldest(package["package"])
    assert package["latest"] == name
    assert all((ROOT / path).exists() for path in package["tests"].split())


def test_the_workflow_tries_each_package_once():
    assert [package["package"] for package in MATRIX["include"]] == MATRIX["package"]


def test_what_is_classified_works():
    classified = "\n".join(PROJECT["classifiers"])
    pythons, makers = (
        set(re.findall(rf"{kind}$", classified, re.MULTILINE)) for kind in (r"Python :: (3\.\d+)", r"GPU :: (\w+).*")
    )
    assert pythons == {row[1] for row in ROWS if works(row, "python")}
    assert makers == {row[1].split()[0] for row in ROWS if works(row, "GPU")} == {"NVIDIA"}


def test_what_works_on_a_machine_has_a_record_of_that_day():
    machines = [row for row in ROWS if row[3] == "works" and row[0] in ("processor", "GPU", "triton")]
    assert len(machines) >= 4
    for row in machines:
        (record,) = re.findall(r"\]\(\.\./(benchmarks/results/[^)]+)\)", row[5])
        assert (ROOT / record).is_file()
        assert row[4] in record
