"""Completion script of bash for the programs and their options: `python -m tests.completion` writes it."""

import os
import re

from exgrpo.commands import BEFORE, COMPLETION, PROGRAMS, SCRIPT
from tests.programs import python

ALSO = {"experience": [["exgrpo.tools.experience", name] for name in ("show", "export", "import")]}
"""What else tells options of a program, beside the program itself."""
OPTION = re.compile(r"(?<![\w-])--[a-z][\w.-]*")


def script():
    """Return the script, with the options from the programs' help."""
    cases = [f"        {name}) words='{' '.join(options(name))}' ;;" for name in PROGRAMS]
    lines = [
        "_exgrpo() {",
        f"    local words='{' '.join([*PROGRAMS, COMPLETION])}'",
        '    [ "$COMP_CWORD" -eq 1 ] || case "${COMP_WORDS[1]}" in',
        *cases,
        f"        {COMPLETION}) words='{' '.join(BEFORE)}' ;;",
        "    esac",
        '    COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))',
        "}",
        "complete -o default -F _exgrpo exgrpo",
    ]
    return "\n".join(lines) + "\n"


def options(name):
    """Return the options named in a program's help."""
    wide, found = {**os.environ, "COLUMNS": "400"}, set()
    for words in [[PROGRAMS[name].module], *ALSO.get(name, [])]:
        found |= set(OPTION.findall(python("-m", *words, "--help", env=wide)))
    return sorted(found)


if __name__ == "__main__":
    SCRIPT.write_text(script())
