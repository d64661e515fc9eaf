"""The workflows: their own linter finds nothing, and all that they start is there."""

import os
import re
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.programs import ran

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
BIN = Path(sys.executable).parent
ACTIONLINT = BIN / "actionlint"
PUBLISH = "publish"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def started(program):
    """Its output with the shellcheck of this environment, which it uses for what the steps run."""
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])
    return ran(ACTIONLINT, *program, cwd=ROOT, env={**os.environ, "PATH": path})


@pytest.mark.skipif(not ACTIONLINT.exists(), reason="actionlint is not installed: exgrpo[test]")
def test_actionlint_has_nothing_to_complain_about(tmp_path):
    assert len(WORKFLOWS) >= 4
    done = started(WORKFLOWS)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(WORKFLOWS[0].read_text().replace("matrix.python", "matrix.pyhton"))
    assert 'property "pyhton" is not defined' in started([wrong]).stdout


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_reads_the_repository_and_ends(file):
    """No step can write with the token that it is given, but those that publish; and no job hangs for six hours."""
    workflow = yaml.safe_load(file.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job or "uses" in job for job in workflow["jobs"].values())
    with_rights = {name: set(job["permissions"]) for name, job in workflow["jobs"].items() if "permissions" in job}
    assert with_rights == ({PUBLISH: {"id-token", "attestations", "contents"}} if file.stem == "release" else {})


def test_a_person_publishes_and_what_is_published_runs_no_code_beside_pinned_actions():
    """A version is uploaded where a person publishes a release, behind the approval of the environment."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    job = workflow["jobs"][PUBLISH]
    assert workflow[True] == {"release": {"types": ["published"]}}  # YAML reads the key "on" as true
    assert job["environment"] == "pypi"
    assert [step["run"].split()[:3] for step in job["steps"] if "run" in step] == [["gh", "release", "upload"]]
    assert not [step for step in job["steps"] if "password" in step.get("with", {})]


def test_every_action_is_pinned_by_its_commit():
    """Who moves a tag of an action changes nothing here; dependabot asks for newer commits."""
    files = [*WORKFLOWS, *sorted((ROOT / ".github" / "actions").glob("*/action.yml"))]
    named = [name for file in files for name in re.findall(r"\buses: *(.+)", file.read_text())]
    assert len(named) > 20
    pinned = r"\./\S+|[\w-]+/[\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+"
    assert not [name for name in named if not re.fullmatch(pinned, name)]
    versions = {tuple(name.split("@")) for name in named if "@" in name}
    assert len(versions) == len(dict(versions)), "an action has one version in all files"


def unknown(text):
    """What a workflow names that is not there: targets of the Makefile, files of tests, modules, extras."""
    makefile = (ROOT / "Makefile").read_text()
    targets = {*re.findall(r"^([a-z-]+):", makefile, re.MULTILINE), *re.findall(r"^\w+ := (\S+)$", makefile, re.M)}
    named = re.findall(r"(?:\bmake|made:) ([.\w/-]+)", text)
    groups = [group for groups in re.findall(r"\.\[([\w,]+)\]", text) for group in groups.split(",")]
    modules = re.findall(r"python -m ((?:exgrpo|benchmarks|tests)[\w.]*)", text)
    return [
        *(target for target in named if target not in targets),
        *(path for path in re.findall(r"\btests/[\w./-]+", text) if not (ROOT / path).exists()),
        *(module for module in modules if find_spec(module) is None),
        *(group for group in groups if group not in PROJECT["optional-dependencies"]),
    ]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_what_a_workflow_starts_is_there(file):
    assert not unknown(file.read_text())


def test_the_tests_run_on_every_python_that_the_package_allows():
    (checks,) = (yaml.safe_load(file.read_text()) for file in WORKFLOWS if file.stem == "checks")
    first, last = map(int, re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups())
    assert checks["jobs"]["tests"]["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in range(first, last)]
