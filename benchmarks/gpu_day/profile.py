"""A summary of one kernel of the head by Nsight Compute: `python -m benchmarks.gpu_day.profile product OUT.txt`.

The program starts itself under ncu, once: `--call` is the call that is looked at.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.programs import ROOT
from exgrpo.tools.heads import WITH_ENTROPY, Case, Ours, default_backend, make_problem

KERNELS = {"product": "product_kernel|exponentials_kernel", "rows": "entropy_kernel|gradient_kernel"}
"""Regular expressions of kernels' names: the fused product of either backend, and the pass of the entropy bonus."""
SHAPE, TINY = (8192, 1536, 151936), (64, 64, 1000)
SECTIONS = ("SpeedOfLight", "LaunchStats", "Occupancy", "MemoryWorkloadAnalysis")
REFUSALS = {
    "ERR_NVGPUCTRPERM": "ncu may not read the counters: root has it, or a driver that gives it to all users",
    "LibraryNotLoaded": "ncu cannot read the counters of this machine",
    "No kernels were profiled": "no such kernel was launched",
}
"""What ncu says where it measures nothing, and what that means."""
DEVICE_LINE = re.compile(r"^\s+\S.*, Context \d+, Stream \d+", re.MULTILINE)
"""How the summary of a kernel begins."""


def call(shape: tuple[int, int, int]) -> None:
    """A policy loss with entropy bonus, forward and backward: once as a warm-up, and once to be looked at."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = Case(WITH_ENTROPY, *shape, torch.bfloat16)
    once = Ours(default_backend()).call(case, make_problem(case, device))
    once()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
    once()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def under_ncu(kernel: str, more: list[str]) -> list[str]:
    """What has ncu look at the first launch of a kernel in the second call; the clocks stay as they are."""
    sections = [word for section in SECTIONS for word in ("--section", section)]
    words = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--launch-count", "1", *sections]
    own = [sys.executable, "-m", "benchmarks.gpu_day.profile", kernel, "-", "--call", *more]
    return [*words, "--kernel-name", f"regex:{KERNELS[kernel]}", *own]


def problem_of(output: str, status: int) -> str:
    """Why what ncu printed is no summary; empty where it is one."""
    for sign, meaning in REFUSALS.items():
        if sign in output:
            return meaning
    if status:
        return f"ncu ended with exit status {status}"
    return "" if DEVICE_LINE.search(output) else "ncu printed no summary of a kernel"


def summary_of(output: str) -> str:
    """Of what ncu and the program printed, the summary alone."""
    found = DEVICE_LINE.search(output)
    return output[found.start() :].rstrip() + "\n" if found else ""


def main(argv: list[str]) -> int:
    """Run the program; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernel", choices=KERNELS)
    parser.add_argument("out", type=Path, help="file for the summary")
    parser.add_argument("--tiny", action="store_true", help="a small head, for a rehearsal")
    parser.add_argument("--call", action="store_true", help="be the program that is looked at")
    options = parser.parse_args(argv)
    if options.call:
        call(TINY if options.tiny else SHAPE)
        return 0
    words = under_ncu(options.kernel, ["--tiny"] if options.tiny else [])
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if problem := problem_of(done.stdout, done.returncode):
        print(f"{done.stdout}error: {problem}")
        return 1
    options.out.write_text(summary_of(done.stdout), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
