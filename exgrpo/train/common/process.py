"""Life cycle of programs that may have several ranks: set-up, signals, exit status.

They end on Ctrl-C or SIGTERM, with their launcher or parent, or when their work is done.
"""

import atexit
import ctypes
import faulthandler
import logging
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import psutil

from exgrpo.train.common.errors import ConfigError, ExgrpoError, LostProcessError, is_first_rank, print_error, shown

_COLLECTIVE = re.compile(r"\bgloo/|\bNCCL\b|\bTCPStore\b")
"""Marks of torch's collectives in error messages, which have no exception class."""
_GPU_MEMORY = re.compile(r"\bCUDA\b.*\bout of memory\b", re.DOTALL | re.IGNORECASE)
"""Out-of-memory messages of torch, the driver and NCCL."""
INTERRUPTED = 130
"""Exit status of a program stopped by a user or the system."""
LAUNCHED = "EXGRPO_LAUNCHED"
"""Environment variable in which `exgrpo train` passes its options to the processes that it starts."""
LAUNCHER = "EXGRPO_LAUNCHER"
"""Environment variable with the process id of `exgrpo train`, for the processes that it starts."""
SERVER = "EXGRPO_SERVER"
"""Environment variable with the process id of a server, for its child processes."""
LOOK_EVERY = 1.0
GRACE = 30.0
"""Seconds between a request to end and the kill of a process."""


class Stopped(KeyboardInterrupt):
    """A run was stopped; the message says how to resume it."""


def run_program(work: Callable[[ExitStack], None], stopped: str) -> int:
    """Run a program and return its exit status.

    Args:
        work: the program; it registers its resources in the given stack, which is closed afterwards.
        stopped: message for an interrupt, unless the work raises `Stopped`.
    """
    quiet()
    stop_on_signals()
    end_with_launcher()
    try:
        with ExitStack() as resources:
            return _status(lambda: work(resources), stopped)
    except KeyboardInterrupt:  # while the resources are released
        return INTERRUPTED


def _status(work: Callable[[], None], stopped: str) -> int:
    try:
        work()
    except ExgrpoError as error:
        return print_error(error)
    except RuntimeError as error:
        if _GPU_MEMORY.search(str(error)):
            full = (
                f"a GPU has no memory left ({shown(error, 500)}): end other programs on it, lower "
                "optimizer.micro_batch_tokens, rollout.kv_cache_gib or rollout.batch_tokens, or take "
                "policy.gradient_checkpointing or distributed.offload_optimizer True; a run goes on by --resume auto"
            )
            return print_error(ConfigError(full))
        if not _COLLECTIVE.search(str(error)):
            raise
        lost = (
            f"another process of the run has ended or is not reached any more ({shown(error)}): if it has failed, it "
            "says why; if its machine or the network has, mend that; then go on with --resume auto"
        )
        return print_error(LostProcessError(lost))
    except KeyboardInterrupt as stop:
        if is_first_rank():
            print(stop if isinstance(stop, Stopped) else stopped, file=sys.stderr, flush=True)
        return INTERRUPTED
    return 0


def command_to_go_on(folder: Path) -> str:
    """Return the command that resumes a run in this folder on the same number of processes."""
    here = os.environ.get("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))  # DeepSpeed's, PyTorch's
    train = ["exgrpo", "train"] if shutil.which("exgrpo") else [sys.executable, "-m", "exgrpo.tools.launch"]
    if LAUNCHED in os.environ:
        train += shlex.split(os.environ[LAUNCHED])
    elif os.environ.get("WORLD_SIZE", here) != here:
        train = [*_launcher_of_hosts(here), sys.argv[0]]
    elif here != "1":
        train += ["--processes", here]
    return shlex.join([*train, "--resume", str(folder)])


def _launcher_of_hosts(processes: str) -> list[str]:
    """Return the launcher command of a run on several hosts, as started on this one; others have other ranks."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ["deepspeed", "--hostfile", "HOSTFILE"]  # the launcher does not pass the file's name on
    named = {"nnodes": "GROUP_WORLD_SIZE", "node_rank": "GROUP_RANK", "master_addr": "MASTER_ADDR"}
    own = [f"--{option}={os.environ[name]}" for option, name in named.items()]
    return ["torchrun", *own, f"--nproc_per_node={processes}"]


def quiet() -> None:
    """Silence start-up messages of libraries on the console; their warnings of failures remain."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning)
    logging.getLogger("DeepSpeed").addFilter(lambda record: not record.getMessage().startswith("Setting accelerator"))
    # Warning about a missing 4-bit CPU kernel, without which results are the same.
    loading = logging.getLogger("bitsandbytes.backends.cpu.ops")
    loading.addFilter(lambda record: "gemm_4bit_forward" not in record.getMessage())


def stop_on_signals() -> None:
    """End the program on SIGTERM, which launchers and schedulers send, as on Ctrl-C: by a KeyboardInterrupt.

    Only the first signal counts: launchers send several, and a second one would interrupt the clean-up. A process that
    has not ended `GRACE` seconds later prints the stacks of its threads and exits.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    # Python handlers wait for the main thread, which may hang in C, as in a collective; C writes to this pipe at once.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # Forked children, such as engines' workers, would write their own signals there.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    threading.Thread(target=_limit, args=(reader,), name="watch over the end", daemon=True).start()


def _limit(signals: int) -> None:
    """Exit `GRACE` seconds after the first stop signal; `signals` is a pipe with all signals received."""
    while os.read(signals, 1)[0] not in (signal.SIGINT, signal.SIGTERM):
        pass
    faulthandler.dump_traceback_later(GRACE, exit=True)


def _interrupt(*_: object) -> NoReturn:
    _ignore_signals()
    raise KeyboardInterrupt


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignore)


def _ignore(*_: object) -> None:
    """Handle a signal by doing nothing; processes started later would inherit SIG_IGN, but not this."""


def leave(status: int) -> NoReturn:
    """End the process without tearing down the interpreter, after its resources are released.

    The threads of a process group (gloo's, NCCL's) run as long as the process. One that releases a tensor during the
    interpreter's teardown aborts the process (torch 2.13), and a finished run would count as failed.
    """
    _ignore_signals()  # the work is done and the status known
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # C's exit, so that libraries release what outlives a process: vLLM on CPUs its shared memory.
    ctypes.CDLL(None).exit(status)
    raise AssertionError("C's exit does not return")


def end_with_launcher() -> None:
    """Stop this process when its launcher is gone: PyTorch's or DeepSpeed's, or the `deepspeed` that started it."""
    # A launcher that is gone before a process looks is no longer its parent; what this one starts has another parent.
    line = [os.getpid(), int(os.environ.pop(LAUNCHER, os.getppid()))]
    if "TORCHELASTIC_RUN_ID" not in os.environ and "deepspeed.launcher.launch" not in _command(line[-1]):
        return
    above = _parent(line[-1])
    if any(Path(word).name in ("deepspeed", "deepspeed.launcher.runner") for word in _command(above)):
        line.append(above)

    def end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os.kill(os.getpid(), signal.SIGKILL)

    _watch(line, end)


def end_with_ancestor(ancestor: int) -> None:
    """Kill this process, and those between it and an ancestor, when one is gone; do nothing if it is no ancestor."""
    line = [os.getpid()]
    while line[-1] != ancestor:
        line.append(_parent(line[-1]))
        if not line[-1]:
            return

    def end() -> None:
        for process in line[-2::-1]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    _watch(line, end)


def end_group_with_parent(parent: int) -> None:
    """Kill this process's group when the parent at the start, which may be gone already, is gone."""
    _watch([os.getpid(), parent], lambda: os.killpg(0, signal.SIGKILL))


def _watch(line: Sequence[int], end: Callable[[], None]) -> None:
    """Call `end` once any of a line of processes, each the child of the next one, is gone."""

    # Not PR_SET_PDEATHSIG: it fires when the thread ends that started this process, and covers parents only.
    def watch() -> None:
        while all(_parent(child) == parent for child, parent in pairwise(line)):
            time.sleep(LOOK_EVERY)
        end()

    threading.Thread(target=watch, name="watch over the parent", daemon=True).start()


# Both return nothing of a process that is gone, or another user's.
def _command(process: int) -> list[str]:
    with suppress(psutil.Error):
        return psutil.Process(process).cmdline()
    return []


def _parent(process: int) -> int:
    with suppress(psutil.Error):
        return psutil.Process(process).ppid()
    return 0
