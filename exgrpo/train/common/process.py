"""What every program that may have several ranks does around its work, and how it ends.

It ends by Ctrl-C or SIGTERM, with the processes that it belongs to, and when its work is done.
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
"""In the messages of torch's collectives, whose errors have no class of their own."""
_GPU_MEMORY = re.compile(r"\bCUDA\b.*\bout of memory\b", re.DOTALL | re.IGNORECASE)
"""In those of torch, of the driver and of NCCL where a GPU has no room left."""
INTERRUPTED = 130
"""Exit status of a program that a person or the system has stopped."""
LAUNCHED = "EXGRPO_LAUNCHED"
"""Environment variable in which the processes that `exgrpo train` starts find its own options."""
SERVER = "EXGRPO_SERVER"
"""Environment variable in which a server's processes find its process id."""
LOOK_EVERY = 1.0
GRACE = 30.0
"""Seconds. A process that has not ended by then, after it was asked to, is killed."""


class Stopped(KeyboardInterrupt):
    """A run was stopped; the message says how to go on with it."""


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
    """The command that goes on with a run in this folder on as many processes as now."""
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
    """The launcher of a run on several hosts as it is started on this one, and on the others by their own rank."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ["deepspeed", "--hostfile", "HOSTFILE"]  # the launcher does not tell its processes which file that is
    named = {"nnodes": "GROUP_WORLD_SIZE", "node_rank": "GROUP_RANK", "master_addr": "MASTER_ADDR"}
    own = [f"--{option}={os.environ[name]}" for option, name in named.items()]
    return ["torchrun", *own, f"--nproc_per_node={processes}"]


def quiet() -> None:
    """Leave the console to the display: libraries speak of what went wrong, not of how they start."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning)
    logging.getLogger("DeepSpeed").addFilter(lambda record: not record.getMessage().startswith("Setting accelerator"))
    # Of a kernel for weights in 4 bits on CPUs, without which it computes the same.
    loading = logging.getLogger("bitsandbytes.backends.cpu.ops")
    loading.addFilter(lambda record: "gemm_4bit_forward" not in record.getMessage())


def stop_on_signals() -> None:
    """SIGTERM, which launchers and schedulers send, ends the program as Ctrl-C does: by a KeyboardInterrupt.

    The first signal counts. Launchers send several, and another one in the middle of the clean-up would spoil it. A
    process that has not ended `GRACE` seconds later says what its threads are doing, and ends.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    # A handler in Python waits for the main thread, which may hang in C, as in a collective. To this pipe C writes.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # What is forked from here, as engines' workers are, would write there of its own signals.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    threading.Thread(target=_limit, args=(reader,), name="watch over the end", daemon=True).start()


def _limit(signals: int) -> None:
    """Give this process `GRACE` seconds from the first signal that stops it; a pipe tells of all signals."""
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
    """SIG_IGN would be inherited by processes that are started later, this is not."""


def leave(status: int) -> NoReturn:
    """End the process, once its resources are given back, and leave the interpreter as it is.

    The threads of a process group (gloo's, NCCL's) run as long as the process. One that lets go of a tensor while the
    interpreter is taken apart aborts the process (torch 2.13), and a run that has done its work would be a failed one.
    """
    _ignore_signals()  # its work is done, and its status is known
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # By C's exit, so that libraries give back what outlives a process: vLLM on CPUs its shared memory.
    ctypes.CDLL(None).exit(status)
    raise AssertionError("C's exit does not return")


def end_with_launcher() -> None:
    """Stop this process when its launcher is gone: PyTorch's or DeepSpeed's, or `deepspeed` that started that one."""
    line = [os.getpid(), os.getppid()]
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
    """Kill this process, and those between it and an ancestor, when one of them is gone: they serve nobody any more.

    Args:
        ancestor: process id of the parent, or of its parent, and so on; of any other process nothing happens.
    """
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
    """Kill this process's group when the parent is gone.

    Args:
        parent: process id of the parent at the start; it may be gone already.
    """
    _watch([os.getpid(), parent], lambda: os.killpg(0, signal.SIGKILL))


def _watch(line: Sequence[int], end: Callable[[], None]) -> None:
    """Do what ends this process once one of a line of processes, each the child of the next one, is gone."""

    # Not PR_SET_PDEATHSIG: that fires when the thread ends that started this process, and it knows parents only.
    def watch() -> None:
        while all(_parent(child) == parent for child, parent in pairwise(line)):
            time.sleep(LOOK_EVERY)
        end()

    threading.Thread(target=watch, name="watch over the parent", daemon=True).start()


def _command(process: int) -> list[str]:
    """The words of a process's command line; none where it cannot be read."""
    with suppress(psutil.Error):
        return psutil.Process(process).cmdline()
    return []


def _parent(process: int) -> int:
    """The parent of a process; 0 where it cannot be read."""
    with suppress(psutil.Error):
        return psutil.Process(process).ppid()
    return 0
