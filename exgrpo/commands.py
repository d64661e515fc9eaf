"""The program `exgrpo`: one command for all programs of this package.

`exgrpo evaluate ...` equals `python -m exgrpo.tools.evaluate ...`.
"""

import difflib
import os
import runpy
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import exgrpo


@dataclass(frozen=True)
class Program:
    """A program of the package.

    Attributes:
        module: argument of `python -m`.
        what: short description for the usage.
    """

    module: str
    what: str


PROGRAMS = {
    "train": Program("exgrpo.tools.launch", "train a model, on one or several processes; --first: the first result"),
    "evaluate": Program("exgrpo.tools.evaluate", "score a model on held-out questions"),
    "report": Program("exgrpo.tools.report", "make a page about one or several runs"),
    "serve": Program("exgrpo.tools.serve", "generate rollouts for a trainer, by vLLM"),
    "experience": Program("exgrpo.tools.experience", "show or export the stored answers of a run, or import others"),
    "doctor": Program("exgrpo.tools.doctor", "check this machine"),
    "kernels": Program("exgrpo.kernels", "list the kernels' backends of this machine"),
    "hub": Program("exgrpo.tools.hub", "write the kernels as a folder for the Hub of Hugging Face"),
    "study": Program("studies.run", "compare methods, or judge one by `study bench`; in a checkout of the project"),
}
COMPLETION = "completion"
SCRIPT = Path(__file__).with_name("completion.bash")
"""Completion script for bash, written by `python -m tests.completion`."""
BEFORE = {"bash": "", "zsh": "autoload -U +X bashcompinit && bashcompinit\n"}
"""Lines printed before the script, for each supported shell."""


def main() -> None:
    """Run the program that the first argument names."""
    name, rest = (sys.argv[1:2] or ["--help"])[0], sys.argv[2:]
    if name in ("-h", "--help"):
        print(usage())
    elif name == "--version":
        print(exgrpo.__version__)
    elif name == COMPLETION and len(rest) == 1 and rest[0] in BEFORE:
        print(BEFORE[rest[0]] + SCRIPT.read_text(), end="")
    elif name == COMPLETION:
        _refuse(f"give a shell: exgrpo {COMPLETION} {' or '.join(BEFORE)}")
    elif name not in PROGRAMS:
        near = difflib.get_close_matches(name, PROGRAMS, 1)
        _refuse(f"no program {name!r}" + (f"; did you mean {near[0]}?" if near else "; see exgrpo --help"))
    else:
        sys.argv[1:] = rest
        sys.path.insert(0, os.getcwd())  # as `python -m` does: for a user's own modules
        if name == "study" and not _in_checkout():
            _refuse("studies need a checkout of the project: go to its folder, where studies/ is, and start them there")
        runpy.run_module(PROGRAMS[name].module, run_name="__main__", alter_sys=True)


def _refuse(problem: str) -> NoReturn:
    print(f"error: {problem}", file=sys.stderr)
    sys.exit(2)


def _in_checkout() -> bool:
    try:
        return find_spec(PROGRAMS["study"].module) is not None  # installed packages do not include the studies
    except ModuleNotFoundError:
        return False


def usage() -> str:
    """Return the usage: all programs and what they do."""
    rows = [f"  {name:<12}{program.what}" for name, program in PROGRAMS.items()]
    rows.append(f"  {COMPLETION:<12}print a completion script for {' or '.join(BEFORE)}")
    return "\n".join(["usage: exgrpo PROGRAM ...", "", *rows, "", "exgrpo PROGRAM --help has the options."])
