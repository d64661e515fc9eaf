"""Does the cases of a plan in processes of their own, each of which is replaced where a case has ended it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from queue import SimpleQueue

from tests.hostile.plan import KNOWN, is_kept, kind_of
from tests.hostile.worker import Plan, Record

TAIL = 3000
"""Characters of what a process has printed that has ended."""


class CampaignError(Exception):
    """The processes that do cases cannot be started."""


class Process:
    """One that does cases; see `tests.hostile.worker`. It leads a group of processes, which end with it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._process: subprocess.Popen[str] | None = None

    def do(self, number: int) -> Record:
        """Do a case; if the process does not survive it, that is a problem.

        Raises:
            CampaignError: the process does not start.
        """
        process = self._started()
        assert process.stdin
        assert process.stdout
        with suppress(BrokenPipeError):
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if line:
            values = json.loads(line)
            return Record(**values | {"problems": tuple(values["problems"])})
        status, printed = process.wait(), self._printed()
        self.close()
        kinds = self.plan.kinds
        kind = KNOWN if is_kept(number, kinds) else kind_of(self.plan.seed, number, kinds)
        problem = f"ends the process, or takes more than {self.plan.seconds:.0f} s (status {status}): {printed}"
        return Record(number, kind, "", "ended", problems=(problem,))

    def _started(self) -> "subprocess.Popen[str]":
        if self._process is None:
            Path(self.plan.folder).mkdir(parents=True, exist_ok=True)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.hostile.worker", json.dumps(asdict(self.plan))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            assert self._process.stdout
            if self._process.stdout.readline() != "ready\n":
                raise CampaignError(f"no cases can be done: {self._printed()}")
        return self._process

    def _printed(self) -> str:
        return (Path(self.plan.folder) / "printed").read_text(errors="replace")[-TAIL:]

    def close(self) -> None:
        """End it, with all that it has started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
            self._process = None


def done(plan: Plan, numbers: Iterable[int], workers: int) -> Iterator[Record]:
    """Do cases; gives what came of each as soon as it is there.

    Args:
        plan: whose folder gets one for each process; those of cases with a problem stay there.
        numbers: of the cases.
        workers: processes that work at a time.
    """
    processes = [Process(replace(plan, folder=str(Path(plan.folder) / f"worker_{i}"))) for i in range(workers)]
    free: SimpleQueue[Process] = SimpleQueue()
    for process in processes:
        free.put(process)

    def do(number: int) -> Record:
        process = free.get()
        try:
            return process.do(number)
        finally:
            free.put(process)

    executor = ThreadPoolExecutor(workers)
    try:
        yield from executor.map(do, numbers)
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.close()
