"""Times how calls can be launched on the GPU at hand and writes a launch table:

    python -m exgrpo.kernels.tune --output FILE

EXGRPO_LAUNCH_TABLE=FILE has it used; its sections may also replace those of launch.toml. Training never runs this.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exgrpo.kernels.dispatch import unavailable
from exgrpo.kernels.tables import DTYPES, Sections, origin, text, toml
from exgrpo.kernels.timing import Call, Clock, Shape, make_workload, off, seconds_of, shape_of
from exgrpo.kernels.triton_chunks import launch

Entry = dict[str, Any]

SHAPES = ((8192, 1536, 151936), (8192, 3584, 152064))
ROWS = [{"block": block, "warps": warps} for block, warps in product((1024, 2048, 4096, 8192, 16384), (4, 8, 16))]
TILES = [
    dict(zip(("rows", "columns", "depth", "warps", "stages"), numbers, strict=True))
    for numbers in (
        (128, 128, 64, 8, 3),
        (128, 256, 64, 8, 3),
        (128, 256, 64, 8, 4),
        (128, 128, 64, 8, 4),
        (256, 128, 64, 8, 3),
        (256, 128, 64, 8, 4),
        (128, 128, 64, 4, 3),
        (64, 256, 64, 4, 3),
        (128, 128, 32, 8, 3),
        (128, 256, 32, 8, 3),
        (256, 128, 32, 8, 3),
        (64, 256, 64, 8, 4),
        (64, 128, 64, 4, 4),
        (128, 64, 64, 4, 4),
        (128, 128, 64, 8, 2),
        (64, 64, 32, 4, 2),
    )
]
"""The most promising ones first: each takes a while to compile, and the time may not do for all."""
THIN, ROW_TOKENS = 64, 4096
"""Width and most tokens of the head that row kernels are timed on: its products take little beside them."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 9
NOISE = 0.01
"""A gain below this part of the time does not replace the present value."""


@dataclass
class Tuner:
    """Chooses by the time that calls take.

    Attributes:
        device: whose section of the table it is about.
        clock: that times a call.
        deadline: of `time.monotonic`; what is not decided by then stays as it is.
        decisions: that are still to be made; each gets an equal part of the time left.
        notes: what was decided, and why; cleared by the caller.
    """

    device: torch.device
    clock: Clock
    deadline: float
    decisions: int = 1
    notes: list[str] = field(default_factory=list)

    def choose(self, key: str, values: Sequence[Any], calls: Sequence[Call], dtype: str, entry: Entry) -> Any:
        """The value of a setting with which the calls take the least time together; None where none runs.

        Candidates take turns: a round times each once, and medians over rounds are compared.

        Args:
            key: name of the setting.
            values: to try besides the present one.
            calls: on operands of ``dtype``; what they return is compared with what the first value gave.
            dtype: of the operands.
            entry: every setting; that of ``key`` is the present value, which comes first.
        """
        now = time.monotonic()
        end = now + (self.deadline - now) / max(1, self.decisions)
        self.decisions -= 1
        values = [entry[key], *(value for value in values if value != entry[key])]
        if now >= self.deadline:
            self._note(f"{key}: no time left, {toml(entry[key])} stays untimed")
            return entry[key]
        with tempfile.TemporaryDirectory() as folder:
            paths = [
                self._candidate(Path(folder) / f"{i}.toml", dtype, {**entry, key: v}) for i, v in enumerate(values)
            ]
            ready = self._that_run(key, list(zip(values, paths, strict=True)), calls, end)
            seconds: list[list[float]] = [[] for _ in ready]
            for done in range(MOST_ROUNDS):
                if done >= LEAST_ROUNDS and time.monotonic() >= end:
                    break
                for (_, path), of_candidate in zip(ready, seconds, strict=True):
                    with laid_over(path):
                        of_candidate.append(sum(self.clock(call) for call in calls))
        if not ready:
            self._note(f"{key}: no candidate runs")
            return None
        medians = [statistics.median(of_candidate) for of_candidate in seconds]
        for (value, _), median in zip(ready, medians, strict=True):
            print(f"  {key} = {toml(value)}: {median * 1e3:.3f} ms", flush=True)
        best = min(range(len(ready)), key=medians.__getitem__)
        if medians[best] > (1 - NOISE) * medians[0]:
            best = 0
        first = f", {toml(ready[0][0])} took {medians[0] * 1e3:.3f} ms" if best else ""
        self._note(f"{key} = {toml(ready[best][0])}: {medians[best] * 1e3:.3f} ms, best of {len(ready)}{first}")
        return ready[best][0]

    def _that_run(
        self, key: str, candidates: list[tuple[Any, Path]], calls: Sequence[Call], end: float
    ) -> list[tuple[Any, Path]]:
        """Those candidates that compile, run and compute what the first of them does."""
        ready: list[tuple[Any, Path]] = []
        results: list[tuple[Tensor, ...]] = []
        for i, (value, path) in enumerate(candidates):
            if ready and time.monotonic() >= end:
                print(f"  {key}: no time for {len(candidates) - i} more candidates", flush=True)
                break
            try:
                with laid_over(path):
                    found = [call() for call in calls]
                    wrong = any(off(a, b) for a, b in zip(found, results, strict=False))
            except Exception as error:  # compilers and devices refuse in many ways; each only rules a candidate out
                print(f"  {key} = {toml(value)}: skipped, {_first_line(error)}", flush=True)
                continue
            if wrong:
                print(f"  {key} = {toml(value)}: skipped, its results are wrong", flush=True)
                continue
            results = results or found
            ready.append((value, path))
        return ready

    def _candidate(self, path: Path, dtype: str, entry: Entry) -> Path:
        """A table that says this for heads of any width: row kernels are timed on a narrow one."""
        name = launch.architecture(self.device)
        sections: Sections = {(name, dtype, of_width): (entry, []) for of_width in launch.CLASSES}
        path.write_text(text(sections, []), encoding="utf-8")
        return path

    def _note(self, line: str) -> None:
        self.notes.append(line)
        print(f"  {line}", flush=True)


def tune_class(tuner: Tuner, dtype: str, shapes: Sequence[Shape]) -> Entry:
    """The best entry for operands of a dtype and shapes of one class.

    Raises:
        RuntimeError: the row kernels cannot be run at all.
    """
    entry = launch.setting(launch.architecture(tuner.device), dtype, launch.shape_class(shapes[0].width))
    block = max(launch.fitting_block(shape.vocabulary) for shape in shapes)

    thin = [
        make_workload(Shape(min(shape.tokens, ROW_TOKENS), THIN, shape.vocabulary), dtype, tuner.device, "triton")
        for shape in shapes
    ]
    calls = [call for work in thin for call in (work.loss, work.loss_with_entropy)]
    rows = [value for value in ROWS if value["block"] <= block]
    entry["rows"] = tuner.choose("rows", rows, calls, dtype, {**entry, "logits": "library"})
    if entry["rows"] is None:
        raise RuntimeError(f"no launch of the row kernels runs for {dtype}; the lines above say why")

    whole = [make_workload(shape, dtype, tuner.device, "triton") for shape in shapes]
    calls = [call for work in whole for call in (work.forward, work.loss)]
    if dtype in launch.FUSABLE:
        tile = tuner.choose("tile", TILES, calls, dtype, {**entry, "logits": "fused"})
        if tile is None:
            entry["logits"] = "library"
        else:
            entry["tile"] = tile
            entry["logits"] = tuner.choose("logits", ("library", "fused"), calls, dtype, entry) or "library"
    return entry


def tune(tuner: Tuner, dtypes: Sequence[str], shapes: Sequence[Shape], output: Path) -> None:
    """Writes the best entries for dtypes and classes of shapes into ``output``, after each anew."""
    of_class: dict[str, list[Shape]] = {}
    for shape in shapes:
        of_class.setdefault(launch.shape_class(shape.width), []).append(shape)
    tuner.decisions = sum(len(of_class) * (3 if dtype in launch.FUSABLE else 1) for dtype in dtypes)
    header = [
        *origin(tuner.device, launch.architecture(tuner.device)),
        f"Shapes (T, D, V): {', '.join(map(str, shapes))}",
    ]
    sections: Sections = {}
    for dtype, (name, members) in product(dtypes, of_class.items()):
        print(f"{dtype}, {name}: {', '.join(map(str, members))}", flush=True)
        tuner.notes.clear()
        entry = tune_class(tuner, dtype, members)
        sections[launch.architecture(tuner.device), dtype, name] = (entry, list(tuner.notes))
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text(sections, header))


@contextmanager
def laid_over(path: Path) -> Iterator[None]:
    """While entered, calls are launched as this table says."""
    before = os.environ.get(launch.ENVIRONMENT)
    os.environ[launch.ENVIRONMENT] = str(path)
    launch.forget()
    launch.TABLE.sections()  # read now: the clock shall not see it
    try:
        yield
    finally:
        os.environ.pop(launch.ENVIRONMENT)
        if before is not None:
            os.environ[launch.ENVIRONMENT] = before
        launch.forget()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:200]}"


def main(argv: list[str]) -> int:
    """Run the program; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("launch.toml"), help="the table (%(default)s)")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16"], help="of the operands")
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=[Shape(*s) for s in SHAPES], metavar="T,D,V")
    parser.add_argument("--minutes", type=float, default=15.0, help="what has no time then stays (%(default)s)")
    options = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if reason := unavailable("triton", device):
        print(f"error: nothing to tune here: {reason}", file=sys.stderr)
        return 2
    tuner = Tuner(device, seconds_of, time.monotonic() + 60 * options.minutes)
    try:
        tune(tuner, options.dtype, options.shapes, options.output)
    except (RuntimeError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
