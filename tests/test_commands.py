"""The program `exgrpo`: one name for all programs."""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from io import StringIO

import pytest
import yaml

import exgrpo
from exgrpo import commands
from exgrpo.commands import PROGRAMS, completion, main, usage
from exgrpo.train import launch
from exgrpo.train.recipe import parse_args, to_yaml


def told(monkeypatch, capsys, *arguments):
    """The exit status of `exgrpo ARGUMENTS`, and what it printed."""
    monkeypatch.setattr(sys, "argv", ["exgrpo", *arguments])
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        main()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            return 1, ended.code
        return ended.code or 0, capsys.readouterr().out
    return 0, capsys.readouterr().out


def test_what_there_is_is_listed_and_there(monkeypatch, capsys):
    assert told(monkeypatch, capsys) == told(monkeypatch, capsys, "--help") == (0, usage() + "\n")
    for name, program in PROGRAMS.items():
        assert f"  {name} " in usage()
        assert find_spec(program.module)
        assert not program.also or find_spec(program.also)
    assert told(monkeypatch, capsys, "--version") == (0, f"{exgrpo.__version__}\n")


OWN = """
from exgrpo.commands import PROGRAMS, Program, main
PROGRAMS["own"] = Program("a_program_of_a_test", "prints")
main()
"""


def test_a_program_gets_the_arguments_behind_its_name(tmp_path):
    """Also one that is found in the folder where the user is."""
    (tmp_path / "a_program_of_a_test.py").write_text("import sys\nprint(__name__, *sys.argv[1:])\nsys.exit(3)\n")
    command = [sys.executable, "-c", OWN, "own", "--steps=1", "x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "__main__ --steps=1 x\n"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tran"], "no program 'tran'; did you mean train?"),
        (["17"], "no program '17'; see exgrpo --help"),
        (["completion"], "give a shell: exgrpo completion bash or zsh"),
        (["completion", "dos"], "give a shell"),
    ],
)
def test_a_mistake_is_one_line(monkeypatch, capsys, arguments, message):
    status, said = told(monkeypatch, capsys, *arguments)
    assert status != 0
    assert message in said


@pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash")
def test_bash_completes_programs_and_their_options(monkeypatch):
    options = {"train": ["--experience.ratio", "--experience.replayed", "--steps"], "report": ["--output"]}
    names = {program: name for name, program in PROGRAMS.items()}
    monkeypatch.setattr(commands, "_options", lambda program: options.get(names[program], []))
    script = completion("bash")

    def completed(*words):
        ask = f'COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}; _exgrpo; echo "${{COMPREPLY[@]}}"'
        return subprocess.run(["bash", "-c", f"{script}\n{ask}"], check=True, capture_output=True, text=True).stdout

    assert completed("exgrpo", "ev").split() == ["evaluate"]
    assert completed("exgrpo", "train", "--experience.r").split() == options["train"][:2]
    assert completed("exgrpo", "report", "--").split() == ["--output"]
    assert completed("exgrpo", "completion", "z").split() == ["zsh"]


def test_the_options_are_those_of_the_help():
    found = commands._options(PROGRAMS["train"])
    assert {"--restarts", "--hosts", "--experience.ratio", "--recipe"} <= set(found)


def test_a_dry_run_shows_the_configuration_the_plan_and_an_estimate_and_starts_nothing(monkeypatch, tmp_path):
    printed = StringIO()
    monkeypatch.setattr(launch, "Console", lambda: launch_console(printed))
    monkeypatch.setattr(launch, "_start", lambda *_: pytest.fail("started"))
    given = ["--questions=12", "--steps=7", f"--output.folder={tmp_path}"]
    assert launch.main(["--dry-run", "--processes=4", *given]) == 0
    text = printed.getvalue()
    settings, rest = text.split("4 processes train ")
    assert yaml.safe_load(settings) == yaml.safe_load(to_yaml(parse_args(given)))
    assert "A step has 12 questions with 8 answers each, 96 in all" in rest
    assert "Held-out questions: test (512)" in rest
    assert "It fits: peak" in rest
    assert list(tmp_path.iterdir()) == []


def launch_console(file):
    from rich.console import Console

    return Console(file=file, width=200)


def test_a_mistake_of_a_dry_run_is_one_line(capsys, tmp_path):
    assert launch.main(["--dry-run", "--data.test_limit=none", f"--output.folder={tmp_path}"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
