"""The workflows: their own linter finds nothing, and all that they start is there."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
BIN = Path(sys.executable).parent
ACTIONLINT = BIN / "actionlint"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def started(program):
    """Its output with the shellcheck of this environment, which it uses for what the steps run."""
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])
    command = [ACTIONLINT, *map(str, program)]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True)


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
    """No step can write to the repository with the token that it is given, and no job hangs for six hours."""
    workflow = yaml.safe_load(file.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job and "permissions" not in job for job in workflow["jobs"].values())


def unknown(text):
    """What a workflow names that is not there: targets of the Makefile, files of tests, modules, extras."""
    makefile = (ROOT / "Makefile").read_text()
    targets = {*re.findall(r"^([a-z-]+):", makefile, re.MULTILINE), *re.findall(r"^\w+ := (\S+)$", makefile, re.M)}
    named = re.findall(r"(?:\bmake|made:) ([.\w/-]+)", text)
    groups = [group for groups in re.findall(r"\.\[([\w,]+)\]", text) for group in groups.split(",")]
    return [
        *(target for target in named if target not in targets),
        *(path for path in re.findall(r"\btests/[\w./-]+", text) if not (ROOT / path).exists()),
        *(
            module
            for module in re.findall(r"python -m ((?:exgrpo|benchmarks|tests)[\w.]*)", text)
            if find_spec(module) is None
        ),
        *(group for group in groups if group not in PROJECT["optional-dependencies"]),
    ]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_what_a_workflow_starts_is_there(file):
    assert not unknown(file.read_text())


def test_the_tests_run_on_every_python_that_the_package_allows():
    (checks,) = (yaml.safe_load(file.read_text()) for file in WORKFLOWS if file.stem == "checks")
    first, last = map(int, re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups())
    assert checks["jobs"]["tests"]["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in range(first, last)]


def test_hooks_start_programs_of_the_environment():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    needed = " ".join(PROJECT["optional-dependencies"]["test"])
    programs = {re.match(r"\.venv/bin/(\w+)", hook["entry"])[1] for hook in hooks}
    assert programs == {"ruff", "mypy", "shellcheck", "actionlint"}
    assert all(program in needed for program in programs)


def test_who_reports_a_defect_is_asked_for_the_doctors_text():
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/defect.yml").read_text())
    (asked,) = (field for field in form["body"] if field.get("id") == "doctor")
    assert asked["validations"] == {"required": True}
    assert "python -m exgrpo.tools.doctor" in asked["attributes"]["description"]
    assert "python -m exgrpo.tools.doctor" in (ROOT / ".github/PULL_REQUEST_TEMPLATE.md").read_text()
    assert not unknown(asked["attributes"]["description"])
