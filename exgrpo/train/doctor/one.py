"""The process of one check: `python -m exgrpo.train.doctor.one RECIPE FOLDER PARENT`.

Its standard input is the function of the check, pickled by the doctor. Its standard output is one line of JSON, the
finding; all that libraries print goes to its standard error.
"""

import json
import os
import pickle
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from exgrpo.train.doctor.check import Given, Skipped
from exgrpo.train.ending import end_group_with_parent, leave
from exgrpo.train.errors import ExgrpoError
from exgrpo.train.process import run_program
from exgrpo.train.recipe import load_recipe


def main(argv: Sequence[str]) -> int:
    """Do the check; the exit status is 0 where it has come to a finding."""
    recipe, folder = map(Path, argv[:2])
    end_group_with_parent(int(argv[2]))
    answer = os.dup(1)
    os.dup2(2, 1)

    def work(resources: ExitStack) -> None:
        try:
            said = "ok", pickle.load(sys.stdin.buffer)(Given(load_recipe(recipe), folder, resources))
        except Skipped as reason:
            said = "skipped", str(reason)
        except ExgrpoError as error:
            said = "failed", str(error)
        os.write(answer, json.dumps(dict(zip(("result", "text"), said, strict=True))).encode() + b"\n")

    return run_program(work, "the check was stopped")


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
