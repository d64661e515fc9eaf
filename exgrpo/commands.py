"""The program `exgrpo`: one name for the programs of this package.

`exgrpo evaluate ...` does what `python -m exgrpo.train.evaluate ...` does.
"""

import difflib
import os
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass

import exgrpo


@dataclass(frozen=True)
class Program:
    """A program by its module.

    Attributes:
        module: what `python -m` starts.
        what: it does, in a few words.
        also: a module that has further options of this program.
    """

    module: str
    what: str
    also: str | None = None


PROGRAMS = {
    "train": Program("exgrpo.train.launch", "train a model, on one or several processes", "exgrpo.train.main"),
    "evaluate": Program("exgrpo.train.evaluate", "score a model on held-out questions"),
    "report": Program("exgrpo.train.report", "make a page about one or several runs"),
    "estimate": Program(
        "exgrpo.train.estimate", "whether a recipe fits, and how long a step takes", "exgrpo.train.main"
    ),
    "serve": Program("exgrpo.train.serve", "give rollouts to a trainer, by vLLM"),
    "experience": Program("exgrpo.train.experience", "show or export what a run has stored"),
    "doctor": Program("exgrpo.train.doctor", "what works on this machine"),
    "kernels": Program("exgrpo.kernels", "the kernels' backends of this machine"),
    "study": Program("studies.run", "compare methods over tasks and seeds; in a checkout of the project"),
}
COMPLETION = "completion"
SHELLS = ("bash", "zsh")
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w.-]*")


def main() -> None:
    """Run the program that the first argument names."""
    name, rest = (sys.argv[1:2] or ["--help"])[0], sys.argv[2:]
    if name in ("-h", "--help"):
        print(usage())
    elif name == "--version":
        print(exgrpo.__version__)
    elif name == COMPLETION and len(rest) == 1 and rest[0] in SHELLS:
        print(completion(rest[0]))
    elif name == COMPLETION:
        sys.exit(f"error: give a shell: exgrpo {COMPLETION} {' or '.join(SHELLS)}")
    elif name not in PROGRAMS:
        near = difflib.get_close_matches(name, PROGRAMS, 1)
        print(f"error: no program {name!r}" + (f"; did you mean {near[0]}?" if near else "; see exgrpo --help"))
        sys.exit(2)
    else:
        sys.argv[1:] = rest
        sys.path.insert(0, os.getcwd())  # as `python -m` does: for a user's own modules
        runpy.run_module(PROGRAMS[name].module, run_name="__main__", alter_sys=True)


def usage() -> str:
    """What there is."""
    rows = [f"  {name:<12}{program.what}" for name, program in PROGRAMS.items()]
    rows.append(f"  {COMPLETION:<12}print what {' or '.join(SHELLS)} needs to complete all this")
    return "\n".join(["usage: exgrpo PROGRAM ...", "", *rows, "", "exgrpo PROGRAM --help has the options."])


def completion(shell: str) -> str:
    """A script for a shell, with the options that the programs of this installation have."""
    cases = [f"        {name}) words='{' '.join(_options(program))}' ;;" for name, program in PROGRAMS.items()]
    return "\n".join(
        [
            *(["autoload -U +X bashcompinit && bashcompinit"] if shell == "zsh" else []),
            "_exgrpo() {",
            f"    local words='{' '.join([*PROGRAMS, COMPLETION])}'",
            '    [ "$COMP_CWORD" -eq 1 ] || case "${COMP_WORDS[1]}" in',
            *cases,
            f"        {COMPLETION}) words='{' '.join(SHELLS)}' ;;",
            "    esac",
            '    COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))',
            "}",
            "complete -o default -F _exgrpo exgrpo",
        ]
    )


def _options(program: Program) -> list[str]:
    """The options that its help names; none where it cannot run here."""
    modules = filter(None, (program.module, program.also))
    wide = {**os.environ, "COLUMNS": "400"}
    found: dict[str, None] = {}
    for module in modules:
        command = [sys.executable, "-m", module, "--help"]
        told = subprocess.run(command, capture_output=True, text=True, env=wide, check=False)
        found |= dict.fromkeys(_OPTION.findall(told.stdout) if told.returncode == 0 else [])
    return sorted(found)
