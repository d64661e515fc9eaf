"""Times the backends on the machine at hand and writes the table by which ``auto`` chooses:

    python -m exgrpo.kernels.measure --output FILE

EXGRPO_BACKEND_TABLE=FILE has it used; its sections may also replace the shipped ones. Training never runs this.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from exgrpo.kernels import backend_choice, dispatch
from exgrpo.kernels.tables import DTYPES, Sections, architecture, origin, text
from exgrpo.kernels.timing import Clock, Shape, make_workload, off, seconds_of, shape_of

SHAPES = {
    "cpu": ((64, 32, 64), (512, 96, 512), (1024, 896, 32000), (512, 1536, 151936)),
    "cuda": ((512, 96, 512), (8192, 1536, 151936), (8192, 3584, 152064)),
}
ROUNDS = 7


def times_of(shape: Shape, dtype: str, device: torch.device, clock: Clock) -> dict[str, float]:
    """Seconds of a forward and of a policy loss with its gradients, together, by backend, medians of turns taken.

    Raises:
        RuntimeError: a backend's results are not those of the first one.
    """
    names = [name for name in dispatch.BACKENDS if not dispatch.unavailable(name, device)]
    calls = {}
    results = None
    for name in names:
        work = make_workload(shape, dtype, device, name)
        calls[name] = work.forward, work.loss
        found = work.loss()  # and warm
        results = results or found
        if off(found, results):
            raise RuntimeError(f"{name}, {dtype}, {shape}: its results are not those of {names[0]}")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        for name in names:
            seconds[name].append(sum(clock(call) for call in calls[name]))
    return {name: statistics.median(times) for name, times in seconds.items()}


def section(measured: dict[Shape, dict[str, float]]) -> tuple[dict[str, list[str]], list[str]]:
    """Backends by the geometric mean of their times, the fastest first; and the times, as notes."""
    names = next(iter(measured.values()))
    mean = {name: math.exp(statistics.fmean(math.log(times[name]) for times in measured.values())) for name in names}
    notes = [
        f"{shape}: {', '.join(f'{name} {seconds * 1e3:.2f} ms' for name, seconds in times.items())}"
        for shape, times in measured.items()
    ]
    return {"backends": sorted(mean, key=mean.__getitem__)}, notes


def tabulate(dtypes: Sequence[str], shapes: Sequence[Shape], device: torch.device, clock: Clock, output: Path) -> None:
    """Writes the table into ``output``, after each dtype anew."""
    name = architecture(device)
    sections: Sections = {}
    for dtype in dtypes:
        of_class: dict[str, dict[Shape, dict[str, float]]] = {}
        for shape in shapes:
            times = times_of(shape, dtype, device, clock)
            of_class.setdefault(backend_choice.size_class(shape.tokens * shape.vocabulary), {})[shape] = times
            print(f"{dtype} {shape}: {', '.join(f'{k} {v * 1e3:.2f} ms' for k, v in times.items())}", flush=True)
        for size, measured in of_class.items():
            sections[name, dtype, size] = section(measured)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text(sections, origin(device, name)), encoding="utf-8")


def main(argv: list[str]) -> int:
    """Run the program; returns its exit status."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("choice.toml"), help="the table (%(default)s)")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16", "float32"], help="of the operands")
    shapes = [Shape(*numbers) for numbers in SHAPES[device.type]]
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=shapes, metavar="T,D,V")
    options = parser.parse_args(argv)
    try:
        tabulate(options.dtype, options.shapes, device, seconds_of, options.output)
    except (RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
