"""What every program that may have several ranks does around its work."""

import logging
import os
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from exgrpo.train.ending import Stopped, end_with_launcher, stop_on_signals
from exgrpo.train.errors import ExgrpoError, LostProcessError, is_first_rank, print_error, shown

_COLLECTIVE = re.compile(r"\bgloo/|\bNCCL\b|\bTCPStore\b")
"""In the messages of torch's collectives, whose errors have no class of their own."""
INTERRUPTED = 130
"""Exit status of a program that a person or the system has stopped."""


LAUNCHED = "EXGRPO_LAUNCHED"
"""Environment variable in which the processes that `exgrpo train` starts find its own options."""


def run_program(work: Callable[[ExitStack], None], stopped: str) -> int:
    """Do the work of a program; returns its exit status.

    Args:
        work: opens what it needs in the stack that it is given, which is closed afterwards.
        stopped: what a person who stops it is told, where the work does not say so by `Stopped`.
    """
    quiet()
    stop_on_signals()
    end_with_launcher()
    try:
        with ExitStack() as resources:
            return _status(lambda: work(resources), stopped)
    except KeyboardInterrupt:  # while the resources are given back
        return INTERRUPTED


def _status(work: Callable[[], None], stopped: str) -> int:
    try:
        work()
    except ExgrpoError as error:
        return print_error(error)
    except RuntimeError as error:
        if not _COLLECTIVE.search(str(error)):
            raise
        return print_error(_lost(error))
    except KeyboardInterrupt as stop:
        if is_first_rank():
            print(stop if isinstance(stop, Stopped) else stopped, file=sys.stderr, flush=True)
        return INTERRUPTED
    return 0


def _lost(error: RuntimeError) -> LostProcessError:
    return LostProcessError(
        f"another process of the run has ended or is not reached any more ({shown(error)}): if it has failed, it says "
        "why; if its machine or the network has, mend that; then go on with --resume auto"
    )


def command_to_go_on(folder: Path) -> str:
    """The command that goes on with a run in this folder on as many processes as now, to be pasted."""
    here = os.environ.get("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))  # DeepSpeed's, PyTorch's
    train = ["exgrpo", "train"] if shutil.which("exgrpo") else [sys.executable, "-m", "exgrpo.train.launch"]
    if LAUNCHED in os.environ:
        train += shlex.split(os.environ[LAUNCHED])
    elif os.environ.get("WORLD_SIZE", here) != here:  # several hosts, which DeepSpeed knows by its hostfile
        train = ["deepspeed", sys.argv[0]]
    elif here != "1":
        train += ["--processes", here]
    return shlex.join([*train, "--resume", str(folder)])


def quiet() -> None:
    """Leave the console to the display: libraries speak of what went wrong, not of how they start."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning)
    logging.getLogger("DeepSpeed").addFilter(lambda record: not record.getMessage().startswith("Setting accelerator"))
    # Of a kernel for weights in 4 bits on CPUs, without which it computes the same.
    loading = logging.getLogger("bitsandbytes.backends.cpu.ops")
    loading.addFilter(lambda record: "gemm_4bit_forward" not in record.getMessage())
