"""The policy loss of a head on this machine, beside plain torch and the peers that are installed: `exgrpo bench`.

It takes at most two minutes on two processors that are otherwise idle, and one on a GPU, and leaves bench.json and a
picture. All rows take turns. "Floor / time" compares with the three bare matrix products of forward and backward in the
same dtype; higher is faster. Memory is what a call takes beside its inputs, and errors are those of the gradients
against float64, on 256 tokens; those of full logits are plain torch's.
"""

import argparse
import datetime
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import exgrpo
from exgrpo.extras import MissingExtraError, needs
from exgrpo.kernels.dispatch import BACKENDS
from exgrpo.kernels.timing import Call, Shape, interleave, paired_spread, peak_bytes, seconds_of
from exgrpo.tools.estimate.parts import MODELS
from exgrpo.tools.heads import (
    FLOOR,
    OURS,
    POLICY_LOSS,
    Case,
    Checkpointed,
    Floor,
    FullLogits,
    Implementation,
    Ours,
    default_backend,
    errors,
    exact,
    first_tokens,
    make_problem,
    products,
)
from exgrpo.tools.peers import PEERS

ROWS: tuple[Implementation, ...] = (
    Floor(),
    *(Ours(backend) for backend in BACKENDS),
    FullLogits(),
    Checkpointed(),
    *(peer() for peer in PEERS),
    FullLogits(compiled=True),
)
"""What is compared; what is compiled, and so takes longest to prepare, comes last."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEADS = {"cpu": Shape(512, 896, 32000), "cuda": Shape(8192, 1536, 151936)}
"""Where no size is given."""
FLOOR_SECONDS = {"cpu": 0.8, "cuda": 0.15}
"""Where no number of tokens is given, there are as many as the bare products take at most so long for."""
LEAST_TOKENS = 64
SECONDS = {"cpu": 90.0, "cuda": 40.0}
"""Until the last round; the memory of each row takes one call more."""
PREPARING = 0.6
"""The part of them after which no further row is prepared."""
OWN, OTHER = "#0b6e4f", "#b8b8b8"


@dataclass(frozen=True)
class Result:
    """What is known of one row.

    Attributes:
        seconds: of each round; empty where it did not run.
        reason: why it cannot run here.
        failure: what it raised.
        peak_bytes: see `exgrpo.kernels.timing.peak_bytes`; None: it is not known.
        facts: what else there is to report, by name.
    """

    seconds: tuple[float, ...] = ()
    reason: str = ""
    failure: str = ""
    peak_bytes: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)


Results = dict[str, Result]


def race(
    calls: dict[str, Call],
    device: torch.device,
    budget: float,
    facts: dict[str, dict[str, Any]],
    in_a_row: int = 1,
    end: float = math.inf,
) -> Results:
    """Time calls against each other, see `interleave`, then take the peak memory of each."""
    seconds, failed = interleave(calls, device, budget, in_a_row, end)
    results = {name: Result(failure=failure) for name, failure in failed.items()}
    for name, of_row in seconds.items():
        try:
            peak = peak_bytes(calls[name], device)
        except OSError:  # a system without such a mark
            peak = None
        results[name] = Result(tuple(of_row), peak_bytes=peak, facts=facts.get(name, {}))
    return results


def measure(
    case: Case,
    rows: Sequence[Implementation],
    device: torch.device,
    seconds: float,
    in_a_row: int = 1,
    end: float = math.inf,
) -> Results:
    """Errors, then times, then memory of all rows of a case.

    Args:
        case: the operation.
        rows: what computes it.
        device: where.
        seconds: of rounds.
        in_a_row: see `interleave`.
        end: see `interleave`; rows that are not prepared in a part of the time until then are left out.
    """
    begin = time.perf_counter()
    late = begin + PREPARING * (end - begin)
    problem = make_problem(case, device)
    some = first_tokens(problem)
    truth = exact(case, some)
    plain = errors(case, FullLogits(), some, truth)
    results, calls, facts = {}, {}, {}
    for row in rows:
        if reason := row.missing(device):
            results[row.name] = Result(reason=reason)
            continue
        if time.perf_counter() > late:
            results[row.name] = Result(reason="there was no time left for it")
            continue
        try:
            call = row.call(case, problem)
            if not isinstance(row, Floor):
                found = errors(case, row, some, truth)
                facts[row.name] = {
                    "log_prob_error": found.log_prob,
                    "gradient_error": found.gradient,
                    "wrong": found.wrong(plain),
                }
        except Exception as error:  # whatever a peer raises: its row is skipped, one of ours fails
            results[row.name] = Result(failure=f"{type(error).__name__}: {str(error)[:200]}")
        else:
            calls[row.name] = call
    return results | race(calls, device, seconds, facts, in_a_row, end)


def table(results: Results) -> str:
    """The rows that ran, the fastest first, and why others did not."""
    grid = [("", "time", "floor / time", "memory", "error")]
    floor = results[FLOOR].seconds
    ran = {name: result for name, result in results.items() if result.seconds}
    for name, result in sorted(ran.items(), key=lambda item: statistics.median(item[1].seconds)):
        of_floor = "{:.2f} ({:.2f} to {:.2f})".format(*paired_spread(floor, result.seconds)) if floor else ""
        error = result.facts.get("gradient_error")
        grid.append(
            (
                name,
                f"{statistics.median(result.seconds) * 1e3:,.1f} ms",
                "" if name == FLOOR else of_floor,
                "" if result.peak_bytes is None else f"{result.peak_bytes / 2**20:,.0f} MiB",
                ("" if error is None else f"{error:.1e}") + (" WRONG" if result.facts.get("wrong") else ""),
            )
        )
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    lines = [
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in grid
    ]
    lines += ["", *(f"no {name}: {r.reason or r.failure}" for name, r in results.items() if not r.seconds)]
    return "\n".join(line.rstrip() for line in lines)


def rows_of(results: Results) -> list[dict[str, Any]]:
    """The rows that ran, as plain values."""
    floor = results[FLOOR].seconds
    return [
        {
            "row": name,
            "median": statistics.median(result.seconds),
            "seconds": list(result.seconds),
            "peak_bytes": result.peak_bytes,
            **result.facts,
            **({"floor_over_time": paired_spread(floor, result.seconds)[0]} if floor else {}),
        }
        for name, result in results.items()
        if result.seconds
    ]


def bars(axes: Any, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Draw floor / time of rows by matplotlib."""
    rows = sorted((row for row in rows if row["row"] != FLOOR), key=lambda row: row["floor_over_time"])
    colours = [OWN if row["row"].startswith(OURS) else OTHER for row in rows]
    drawn = axes.barh([row["row"] for row in rows], [row["floor_over_time"] for row in rows], color=colours)
    axes.bar_label(drawn, fmt="%.2f", padding=3, fontsize=8)
    axes.set_title(f"{title}: floor / time", loc="left", fontsize=9)
    axes.set_xlim(0, 1.1 * max([1.0, *(row["floor_over_time"] for row in rows)]))
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def picture(case: Case, rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the rows into a file, without a display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    bars(figure.subplots(), str(case), rows)
    figure.savefig(path)


def head_of(model: str) -> tuple[int, int]:
    """Width and vocabulary of a model: a folder, its config.json, or a hub name.

    Raises:
        ValueError: the configuration has no such sizes.
        ExgrpoError: there is no such model.
        MissingExtraError: only transformers could look for it, and that is not installed.
    """
    path = Path(model)
    file = path if path.suffix == ".json" else path / "config.json"
    if file.is_file():
        values = json.loads(file.read_text(encoding="utf-8"))
    elif model in MODELS:
        values = MODELS[model]
    else:
        with needs(__name__, "exgrpo[train]"):
            from exgrpo.train.policy.source import find_model

        values = find_model(model).config.to_dict()
    values = values.get("text_config", values)
    try:
        return int(values["hidden_size"]), int(values["vocab_size"])
    except KeyError as error:
        raise ValueError(
            f"--model: the configuration of {model} has no {error}: give --hidden and --vocabulary"
        ) from None


def case_of(options: argparse.Namespace, device: torch.device) -> Case:
    """What is measured.

    Raises:
        ValueError: sizes that contradict each other, a model without them, or a dtype that would take hours here.
    """
    if options.model and (options.hidden or options.vocabulary):
        raise ValueError("--model says what --hidden and --vocabulary are: leave them out")
    if options.dtype == "fp16" and device.type == "cpu":
        raise ValueError("--dtype fp16: most CPUs multiply it by plain loops; take bf16 or fp32")
    usual = HEADS[device.type]
    width, vocabulary = head_of(options.model) if options.model else (options.hidden, options.vocabulary)
    case = Case(
        POLICY_LOSS,
        options.tokens or usual.tokens,
        width or usual.width,
        vocabulary or usual.vocabulary,
        DTYPES[options.dtype],
    )
    return case if options.tokens else affordable(case, device, FLOOR_SECONDS[device.type])


def affordable(case: Case, device: torch.device, seconds: float) -> Case:
    """The case with fewer tokens, where its bare products would take longer; not below LEAST_TOKENS."""
    tokens = min(case.tokens, 4 * LEAST_TOKENS)
    hidden, weight = (torch.rand(rows, case.width, device=device) for rows in (tokens, case.vocabulary))
    call = products(hidden.to(case.dtype), weight.to(case.dtype))
    call()
    of_token = min(seconds_of(call) for _ in range(3)) / tokens
    most = max(1, int(seconds / of_token) // LEAST_TOKENS) * LEAST_TOKENS
    return replace(case, tokens=min(case.tokens, most))


def machine(device: torch.device) -> dict[str, Any]:
    """Where it is measured, and what else the machine is doing."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "date": str(datetime.date.today()),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else _processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "processors": allowed,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "versions": {"exgrpo": exgrpo.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def _processor() -> str:
    """The name of the CPU as Linux tells it, else the architecture."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _count(words: str) -> int:
    if not words.isdecimal() or not int(words):
        raise argparse.ArgumentTypeError(f"{words!r} is no number above 0")
    return int(words)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        "exgrpo bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=_count, help="width of the hidden states (896; on a GPU 1536)")
    parser.add_argument("--vocabulary", type=_count, help="words of the head (32000; on a GPU 151936)")
    parser.add_argument("--model", help="take both from a model: its folder or its name, as Qwen/Qwen2.5-1.5B")
    parser.add_argument(
        "--tokens", type=_count, help="rows of the head (512; on a GPU 8192; fewer where these take long)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of hidden states and head (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="folder of the files (%(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run the program; returns its exit status: 1 where a row of ours fails or is wrong."""
    from exgrpo.train.common.errors import ExgrpoError

    options = parse(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        case = case_of(options, device)
        options.output.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError, MissingExtraError, ExgrpoError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    here = machine(device)
    print(
        f"{case}\n{here['device']} ({here['cpu_capability']}), {here['threads']} threads, torch {torch.__version__}\n"
        f"load {here['load']:.1f} on {here['processors']} processors before the start",
        flush=True,
    )
    rows = [row for row in ROWS if case.operation in row.operations]
    usual = f"{OURS} {default_backend()}"
    rows.sort(key=lambda row: row.name.startswith(OURS) and row.name != usual)  # our other backends are left out first
    results = measure(case, rows, device, math.inf, end=time.perf_counter() + SECONDS[device.type])
    print(f"\n{table(results)}\n")
    content = {**here, "case": str(case), "rows": rows_of(results)}
    content["left_out"] = {name: r.reason or r.failure for name, r in results.items() if not r.seconds}
    file = options.output / "bench.json"
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if not results[FLOOR].seconds:
        print(file)
    elif find_spec("matplotlib"):
        picture(case, content["rows"], options.output / "bench.svg")
        print(f"{file}, bench.svg")
    else:
        print(f"{file}; a picture needs matplotlib: pip install matplotlib")
    ours = [result for name, result in results.items() if name.startswith(OURS)]
    return int(any(result.failure or result.facts.get("wrong") for result in ours))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
