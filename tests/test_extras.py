"""What works where torch is the only package, and what else says which extra to install."""

import os
import re
import sys
from pathlib import Path

import pytest

from exgrpo.extras import needs
from tests.programs import ran

ROOT = Path(__file__).parents[1]
HIDDEN = (
    "accelerate datasets deepspeed jinja2 math_verify matplotlib numpy pebble plotly psutil pyarrow pydantic requests "
    "rich scipy tensorboard transformers triton trl tyro urllib3 yaml"
)
ALONE = """
import runpy, sys
from importlib.machinery import PathFinder
hidden, program, *sys.argv[1:] = sys.argv[1:]
class Hidden(PathFinder):
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in hidden.split() else PathFinder.find_spec(name, path, target)
sys.meta_path[:] = [Hidden if finder is PathFinder else finder for finder in sys.meta_path]
runpy.run_path(program, run_name="__main__") if program.endswith(".py") else runpy.run_module(program, None, "__main__")
"""


def with_torch_alone(*arguments, hidden=HIDDEN, status=0, **environment):
    """Runs a module or a file as a program that does not find what is hidden: all but torch and what torch needs."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": path, **environment}
    done = ran(sys.executable, "-W", "ignore", "-c", ALONE, hidden, *arguments, env=variables, timeout=240)
    assert done.returncode == status, done.stderr
    return done


@pytest.mark.long
def test_the_kernels_and_their_program_need_torch_alone():
    with_torch_alone("exgrpo.kernels")
    sizes = ("--tokens", "16", "--hidden", "4", "--vocabulary", "8", "--device", "cpu")
    done = with_torch_alone(ROOT / "examples" / "head_memory.py", *sizes)
    assert "full logits / fused" in done.stdout


@pytest.mark.long
def test_tritons_interpreter_without_numpy_is_not_available():
    pytest.importorskip("triton", reason="triton is not installed")
    done = with_torch_alone("exgrpo.kernels", hidden="numpy", TRITON_INTERPRET="1")
    assert "Triton's interpreter (TRITON_INTERPRET) needs numpy, which is not installed" in done.stdout


@pytest.mark.parametrize("program", ["doctor", "evaluate", "launch", "main.py"])
def test_programs_of_the_trainer_name_the_extra_in_one_line(program):
    package = ROOT / "exgrpo" / "train"
    done = with_torch_alone(package / program if program.endswith(".py") else f"exgrpo.tools.{program}", status=2)
    assert not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: this needs packages beside torch (No module named ")
    assert line.endswith("): pip install 'exgrpo[train]'")


@pytest.mark.parametrize(("module", "requirements"), [("transformers", "transformers"), ("trl", "'exgrpo[trl]'")])
def test_integrations_name_what_they_need(module, requirements):
    done = with_torch_alone(f"exgrpo.integrations.{module}", status=2)
    assert done.stderr.splitlines()[-1].endswith(f"): pip install {requirements}")


EVERY = """
import importlib, sys
for name in open(sys.argv[1]).read().split():
    try:
        importlib.import_module(name)
        print(name, "imported")
    except ImportError as error:
        print(name, str(error).splitlines()[0])
"""


def test_every_module_of_the_trainer_names_the_extra_that_it_lacks(tmp_path):
    """Also those of single files, which a user of a part imports."""
    package = ROOT / "exgrpo" / "train"
    files = [path.relative_to(ROOT).with_suffix("") for path in sorted(package.rglob("*.py"))]
    modules = [".".join(file.parts) for file in files if file.name not in ("__init__", "__main__", "main")]
    (tmp_path / "names").write_text("\n".join(modules))
    (tmp_path / "every.py").write_text(EVERY)
    done = with_torch_alone(tmp_path / "every.py", tmp_path / "names")
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith("exgrpo."))
    assert set(modules) == set(said)
    lacking = {name: told for name, told in said.items() if told != "imported"}
    assert len(lacking) > 100
    for name, told in lacking.items():
        assert re.search(r"this needs packages beside torch \(.*\): pip install .*exgrpo\[\w+\]'$", told), (name, told)


def test_a_defect_of_ours_stays_what_it_is():
    with pytest.raises(ImportError, match="^ours$"), needs("my.module", "exgrpo[train]"):
        raise ImportError("ours", name="exgrpo.train.gone")
