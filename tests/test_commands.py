"""The program `exgrpo`: one name for all programs."""

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import exgrpo
from exgrpo.commands import PROGRAMS, SCRIPT, main, usage
from exgrpo.tools import launch
from exgrpo.train.config.command_line import _options as keys_of
from exgrpo.train.config.options import Config
from exgrpo.train.config.recipe import RecipeArgument
from tests import completion
from tests.programs import printed, python, ran

ROOT = Path(__file__).parents[1]


def told(monkeypatch, capsys, *arguments):
    """The exit status of `exgrpo ARGUMENTS`, and what it printed."""
    monkeypatch.setattr(sys, "argv", ["exgrpo", *arguments])
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        main()
    except SystemExit as ended:
        return ended.code or 0, "".join(capsys.readouterr())
    return 0, "".join(capsys.readouterr())


def test_what_there_is_is_listed_and_there(monkeypatch, capsys):
    assert told(monkeypatch, capsys) == told(monkeypatch, capsys, "--help") == (0, usage() + "\n")
    for name, program in PROGRAMS.items():
        assert f"  {name} " in usage()
        assert find_spec(program.module)
    assert told(monkeypatch, capsys, "--version") == (0, f"{exgrpo.__version__}\n")


OWN = """
from exgrpo.commands import PROGRAMS, Program, main
PROGRAMS["own"] = Program("a_program_of_a_test", "prints")
main()
"""


def test_a_program_gets_the_arguments_behind_its_name(tmp_path):
    """Also one that is found in the folder where the user is."""
    (tmp_path / "a_program_of_a_test.py").write_text("import sys\nprint(__name__, *sys.argv[1:])\nsys.exit(3)\n")
    done = ran(sys.executable, "-c", OWN, "own", "--steps=1", "x", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "__main__ --steps=1 x\n"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tran"], "no program 'tran'; did you mean train?"),
        (["completion"], "give a shell: exgrpo completion bash or zsh"),
        (["completion", "bash", "--hlep"], "give a shell"),
    ],
)
def test_a_mistake_is_one_line(monkeypatch, capsys, arguments, message):
    status, said = told(monkeypatch, capsys, *arguments)
    assert status == 2
    assert said.startswith(f"error: {message}")
    assert said.count("\n") == 1


def test_studies_outside_a_checkout_are_refused_in_one_line(tmp_path):
    main = "from exgrpo.commands import main; main()"
    done = ran(sys.executable, "-E", "-c", main, "study", "trial.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: studies need a checkout of the project")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash")
def test_bash_completes_programs_and_their_options(monkeypatch, capsys):
    status, script = told(monkeypatch, capsys, "completion", "bash")
    assert status == 0

    def completed(*words):
        ask = f'COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}; _exgrpo; echo "${{COMPREPLY[@]}}"'
        return printed("bash", "-c", f"{script}\n{ask}")

    assert completed("exgrpo", "ev").split() == ["evaluate"]
    assert completed("exgrpo", "train", "--experience.r").split() == [
        f"--experience.{name}" for name in ("ratio", "repeat", "replayed")
    ]
    assert completed("exgrpo", "train", "--rest").split() == ["--restarts"]
    assert completed("exgrpo", "report", "--ou").split() == ["--output"]
    assert completed("exgrpo", "completion", "z").split() == ["zsh"]


@pytest.mark.long
def test_the_script_that_is_shipped_has_the_options_that_there_are():
    assert SCRIPT.read_text() == completion.script(), "python -m tests.completion"


def test_zsh_gets_the_same_script_for_its_way_to_complete(monkeypatch, capsys):
    _, for_zsh = told(monkeypatch, capsys, "completion", "zsh")
    first, _, rest = for_zsh.partition("\n")
    assert (first, rest) == ("autoload -U +X bashcompinit && bashcompinit", SCRIPT.read_text())


def test_printing_the_script_imports_nothing_of_the_programs():
    program = "import sys; sys.argv[1:] = ['completion', 'bash']; from exgrpo.commands import main; main(); "
    found = "print([name for name in sys.modules if name.partition('.')[0] in ('torch', 'tyro', 'pydantic', 'numpy')])"
    assert python("-c", program + found).endswith("\n[]\n")


def test_the_help_of_training_has_all_its_options():
    words = set(python("-m", "exgrpo.tools.launch", "--processes=2", "--help").replace(",", " ").split())
    of_launch = {f"--{name.replace('_', '-')}" for name in launch.LaunchOptions.model_fields}
    of_recipes = {"data.sources", "evaluation.sets"}
    of_training = {f"--{key}" for model in (Config, RecipeArgument) for key in keys_of(model) if key not in of_recipes}
    assert len(of_training) > 100
    assert not (of_launch | of_training | of_recipes) - words
