"""`python -m exgrpo.tools.serve` in a process that has vLLM imported: the command that it becomes runs in that process.

vLLM's own processes, which on CPUs are spawned and import everything anew, are forked.
"""

import multiprocessing
import os
import runpy
import sys
from typing import NoReturn

from exgrpo.tools import serve


def become(_: str, command: list[str], environment: dict[str, str]) -> NoReturn:
    """In the place of `os.execve`: run the module of `python -m MODULE ...`."""
    os.environ.update(environment)
    python, option, module, *_ = command
    assert (python, option) == (sys.executable, "-m")
    sys.argv = command[2:]
    sys.exit(runpy.run_module(module, run_name="__main__", alter_sys=True))


if __name__ == "__main__":
    contexts = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: contexts("fork" if method == "spawn" else method)
    os.execve = become
    serve.main(sys.argv[1:])
