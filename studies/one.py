"""One run on one core, for `studies.runner`: `python -m studies.one CORE PARENT [arguments of the trainer]`."""

import os
import sys
from collections.abc import Sequence

from exgrpo.train.common.process import end_with_ancestor, leave


def main(argv: Sequence[str]) -> int:
    """Train; returns the exit status of the trainer. The run ends when the process PARENT is gone."""
    core, parent, *arguments = argv
    os.sched_setaffinity(0, {int(core)})
    end_with_ancestor(int(parent))
    from exgrpo.train.main import main as train

    return train(arguments)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
