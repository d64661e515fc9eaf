"""All GPU measurements in one program: `python -m benchmarks.gpu --minutes 25`.

The parts run in order of importance until the time is up. Each part writes into one record when it ends,
OUTPUT/DATE_DEVICE.json, with a page (.md); OUTPUT/PART.log has its output. The next call continues the
newest record of the device: finished parts are skipped, and parts that failed or timed out come last. The exit status
is 0 if no part failed.
"""

import argparse
import datetime
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.programs import ROOT
from benchmarks.record import MACHINE, Record, read
from benchmarks.render import seconds, slug, write

GRACE = 30.0
"""Seconds between interrupting and killing a part, for pytest to write its report."""
MEASURING, LEAST = 0.8, 0.25
"""Shares of a part's time: a benchmark starts no group after the first; no part starts with less than the second."""
TAUGHT = "runs/models/SmolLM2-135M-countdown"
REMEDIES = {
    "xdist": "pip install '.[test]'",
    "pytest_benchmark": "pip install '.[bench]'",
    "deepspeed": "pip install '.[train]'",
    "vllm": "pip install '.[vllm]'",
    TAUGHT: "see studies/long_answers.yaml for how to make it",
}
"""Modules and a folder that parts need, with instructions to get them."""


@dataclass(frozen=True)
class Part:
    """One command and its limits.

    In the command `python` is this interpreter, {result} the part's result file, and {minutes} the time after which it
    starts nothing more.
    """

    name: str
    minutes: float  # time limit
    command: str
    full: str = ""  # further arguments on a GPU
    tiny: str = ""  # further arguments in the rehearsal
    result: str = ""  # suffix of its file: .json of pytest-benchmark, a text, or one that is kept as it is; "": none
    needs: str = ""  # keys of REMEDIES, separated by spaces

    def words(self, rehearse: bool, result: Path, minutes: float) -> list[str]:
        """Return the command line for this many minutes."""
        words = shlex.split(f"{self.command} {self.tiny if rehearse else self.full}")
        filled = [word.format(result=result, minutes=f"{MEASURING * minutes:.2f}") for word in words]
        return [sys.executable if word == "python" else word for word in filled]

    def missing(self) -> str:
        """Return the missing requirements with their remedies; "" if there are none."""
        needs = {need: (ROOT / need).is_dir() if "/" in need else find_spec(need) for need in self.needs.split()}
        return "; ".join(f"left out, it needs {need}: {REMEDIES[need]}" for need, there in needs.items() if not there)


PYTEST = "python -m pytest -q -p no:cacheprovider"


def benchmark(name: str, minutes: float, file: str, full: str, tiny: str, needs: str = "") -> Part:
    command = f"{PYTEST} benchmarks/{file} --benchmark-only --benchmark-json={{result}} --minutes={{minutes}}"
    return Part(name, minutes, command, full, f"--sizes=tiny {tiny}", ".json", f"pytest_benchmark {needs}")


HOST_TESTS = ("test_cpu_*", "test_cuda_*", "test_triton*_compile*", "test_extension.py")
"""Tests of the kernels that need no GPU: they emulate it, or compile for several."""
IGNORED = " ".join(f"'--ignore-glob=tests/kernels/{files}'" for files in HOST_TESTS)
# With more threads, pytest's workers would hang at exit, waiting for the processes of torch's compiler.
KERNELS = f"env TORCHINDUCTOR_COMPILE_THREADS=1 {PYTEST} -n {min(8, (os.cpu_count() or 2) // 2)}"
IN_A_ROW = "--sizes=full --in-a-row=20 -k 'policy_loss and bfloat16 and not entropy and not active'"
TUNE = "python -m benchmarks.tune --output {result}"
TINY_TUNE = "--shape 4 16 128 --minutes 0.02"
LONG_ANSWERS = "python -m studies.run studies/long_answers.yaml"
STEPS = "test_training_step.py"
TRACE = f"env STEP_TRACE={{result}} {PYTEST} benchmarks/{STEPS} --benchmark-only --rounds=1"
TRACED, TINY_TRACED = "--sizes=full -k '1.5B and vllm and policy'", "--sizes=tiny -k on-policy"
PARTS = (
    Part("doctor", 4, "python -m exgrpo.tools.doctor --output {result}", "", "--only versions", ".md", "deepspeed"),
    Part("kernels", 8, KERNELS, f"tests/kernels {IGNORED}", "tests/kernels/test_sequences.py", needs="xdist"),
    benchmark("head", 8, "test_head.py", "--sizes=full", "-k 'exgrpo or floor or verl'"),
    benchmark("head_in_a_row", 6, "test_head.py", IN_A_ROW, "--in-a-row=3 -k 'floor or torch'"),
    benchmark("step_0.5", 14, STEPS, "--sizes=full --rounds=2 -k 0.5B", "--rounds=1 -k 'not vllm'", "deepspeed"),
    benchmark("step_1.5", 14, STEPS, "--sizes=full --rounds=2 -k 1.5B", "--rounds=1 -k on-policy", "deepspeed"),
    Part("step_trace", 8, TRACE, TRACED, TINY_TRACED, ".json.gz", "pytest_benchmark deepspeed vllm"),
    benchmark("rollouts", 12, "test_rollouts.py", "--sizes=full", "-k fp32", "deepspeed vllm"),
    Part("launch_table", 12, TUNE, "--minutes {minutes}", TINY_TUNE, ".txt"),
    Part("study", 60, LONG_ANSWERS, "--workers 10", "--plan", needs=f"deepspeed {TAUGHT}"),
)


def run(words: Sequence[str], more: dict[str, str], limit: float, log: Path) -> int | None:
    """Run a command in the repository's root; return its exit status, or None after `limit` seconds.

    It is interrupted at its limit, and killed after GRACE, with all processes that it has started.
    """
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            words, cwd=ROOT, env={**os.environ, **more}, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def problem_of(part: Part, status: int | None, result: Path, log: Path) -> str:
    """Return why an ended part is not finished; "" if it is."""
    lines = log.read_text(encoding="utf-8", errors="replace").replace(f"{ROOT}{os.sep}", "").splitlines()
    last = next((line for line in reversed(lines) if line.strip()), "")
    if status != 0:
        return f"its time was up: {last}" if status is None else f"exit status {status}: {last}"
    return "it left no result" if part.result and not result.exists() else ""


def take(record: Record, part: Part, folder: Path, rehearse: bool, minutes: float) -> Record:
    """Run a part for at most this many minutes; return the record with its results."""
    result, log = folder / f"{part.name}{part.result}", folder / f"{part.name}.log"
    if part.result:
        result.unlink(missing_ok=True)
    limit = min(part.minutes, minutes)
    print(f"{part.name}, at most {seconds(60 * limit)}", flush=True)
    begin = time.monotonic()
    status = run(part.words(rehearse, result, limit), {"TRITON_INTERPRET": "1"} if rehearse else {}, 60 * limit, log)
    took, problem = round(time.monotonic() - begin, 1), problem_of(part, status, result, log)
    print(f"  {seconds(took)}, {problem or 'finished'}", flush=True)
    entry: dict[str, Any] = {"name": part.name, "problem": problem, "seconds": took}
    entry |= {"date": str(datetime.date.today()), "revision": revision()}
    if part.result == ".json" and result.exists():
        record = joined(record, part.name, read(result))
    elif part.result in (".txt", ".md") and result.exists():
        entry["text"] = result.read_text(encoding="utf-8")
    return replace(record, parts=[one for one in record.parts if one["name"] != part.name] + [entry])


def joined(record: Record, part: str, measured: Record) -> Record:
    """Return the record with the rows measured by a part in place of its earlier rows; the first date is kept."""
    rows = [row for row in record.rows if row.get("part") != part]
    rows += [{**row, "part": part} for row in measured.rows]
    reasons = {name: list(of_row) for name, of_row in record.left_out.items()}
    for name, of_row in measured.left_out.items():
        reasons[name] = list(dict.fromkeys([*reasons.get(name, []), *of_row]))
    return replace(measured, date=record.date, rows=rows, left_out=reasons, parts=record.parts)


def revision() -> str:
    """Return the commit of the working tree, with `+` if it has changes; "" if unknown."""
    with suppress(OSError):
        words = ["git", "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty=+"]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def problems(record: Record) -> dict[str, str]:
    """Return why started parts are not finished, by name; "" for finished ones."""
    return {one["name"]: one["problem"] for one in record.parts if "date" in one}


def save(record: Record, folder: Path) -> Path:
    """Write the record, with an entry for each part in order, and its page; return the page."""
    known = {one["name"]: one for one in record.parts if "date" in one}
    new = {part.name: part.missing() or "not begun yet" for part in PARTS}
    entries = [known.get(name) or {"name": name, "problem": problem} for name, problem in new.items()]
    return write(replace(record, parts=entries), folder)


def begun(folder: Path, device: str) -> Record:
    """Return the newest record of a device in a folder, or an empty one of today. Raise ValueError for a bad file."""
    found = sorted(folder.glob(f"*_{slug(device)}.json"))
    if not found:
        machine = dict.fromkeys(MACHINE, "unknown") | {"device": device, "versions": {}}
        return Record(str(datetime.date.today()), "", False, machine, [])
    try:
        return read(found[-1])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{found[-1]} is no record ({error}): use another --output, or remove it") from None


def measure(record: Record, chosen: Sequence[Part], folder: Path, rehearse: bool, deadline: float) -> bool:
    """Run parts until the deadline, and write the record after each; return True if one has failed."""
    failed: list[str] = []
    for part in chosen:
        left = (deadline - time.monotonic()) / 60
        if reason := part.missing():
            print(f"{part.name}: {reason}")
        elif left <= (0 if rehearse else LEAST * part.minutes):
            print(f"{part.name}: not begun, {max(0.0, left):.1f} minutes are left")
        else:
            record = take(record, part, folder, rehearse, left)
            failed += filter(None, [problems(record)[part.name]])
            save(record, folder)
    print(save(record, folder))
    return bool(failed)


def main(argv: list[str]) -> int:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, default=25.0, help="for all parts of this call (%(default)s)")
    parser.add_argument("--parts", nargs="+", choices=names, default=(), help="run these, finished or not")
    parser.add_argument("--output", type=Path, help="folder of all results (runs/gpu)")
    parser.add_argument("--rehearse", action="store_true", help="every part tiny, also on a CPU (runs/gpu_rehearsal)")
    options = parser.parse_args(argv)
    on_gpu = torch.cuda.is_available()
    folder = (options.output or ROOT / "runs" / ("gpu_rehearsal" if options.rehearse else "gpu")).resolve()
    try:
        if not on_gpu and not options.rehearse:
            raise ValueError("there is no CUDA device; --rehearse tries the parts on the CPU")
        record = begun(folder, torch.cuda.get_device_name() if on_gpu else "cpu")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    before = problems(record)
    left = [part for part in PARTS if before.get(part.name, "not begun")]
    left.sort(key=lambda part: part.name in before)  # failed parts come last
    chosen = [part for part in PARTS if part.name in options.parts] or left
    try:
        return int(measure(record, chosen, folder, options.rehearse, time.monotonic() + 60 * options.minutes))
    except KeyboardInterrupt:
        print("stopped: the next call continues with this part")
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
