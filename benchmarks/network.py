"""What a slow network costs a training step: `python -m benchmarks.network OUT.json [--rounds 3] [--steps 3]`.

Four hosts on this machine (see tests/train/hosts.py): the trainer on two of them, a vLLM server on each of the others.
The cables change while the run goes on, in turns; the first step on other cables does not count. Only root can do it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.growth import BASE, PROMPT, config_of, options, parameters, write_model, write_questions
from benchmarks.network_model import Network, Ring, Traffic
from benchmarks.programs import QUIET
from tests.train.hosts import Hosts, missing
from tests.train.rollout.server.servers import Server

WIDTH = 256
TRAINERS, SERVERS = 2, 2
UNLIMITED = 1e12
"""Mbit/s of a cable without a limit, for the model."""
USE = 0.7
"""Share of the bandwidth that gloo reaches, whose messages go both ways at once: by itself, at 100 Mbit/s, 0.65 in a
gather of 22 MB, 0.85 in a reduction of as many."""
TENSORS = 39
"""Weights of the model."""
CALLS = {"select": TENSORS + 2, "update": TENSORS + 5, "replicate": 8}
"""Collectives of a phase one after another, counted in a run of this model: the weights are gathered one by one for a
forward, together for the backward; the gradients are reduced together, then their norm is; objects take two gathers."""
PHASES = ("select", "update", "push", "replicate", "step")
Row = dict[str, Any]


@dataclass(frozen=True)
class Cables:
    """All cables of the hosts.

    Attributes:
        milliseconds: from host to host, one way.
        megabits: per second; None: no limit.
    """

    milliseconds: float = 0.0
    megabits: float | None = None

    @property
    def network(self) -> Network:
        """As the model takes it."""
        return Network((self.megabits or UNLIMITED) * 1e6 / 8, self.milliseconds / 1e3)

    def put_in(self, hosts: Hosts) -> None:
        """Each path has two cables."""
        for host in range(len(hosts.addresses)):
            hosts.limit(host, seconds=self.milliseconds / 2e3, megabits=self.megabits)


TRIED = (Cables(), Cables(1.0), Cables(megabits=100), Cables(1.0, 1000), Cables(10.0, 100))


class Course:
    """The steps of a run as it goes on.

    Args:
        process: the run.
        metrics: its file.
    """

    def __init__(self, process: "subprocess.Popen[str]", metrics: Path) -> None:
        self._process, self._metrics, self._seen = process, metrics, 0

    def steps(self) -> list[Row]:
        """The records of the steps that were finished since the last call."""
        lines = self._metrics.read_text().splitlines() if self._metrics.exists() else []
        records = [record for record in map(json.loads, lines) if "reward" in record]
        new, self._seen = records[self._seen :], len(records)
        return new

    def wait(self, count: int) -> list[Row]:
        """The next steps, so many.

        Raises:
            RuntimeError: the run has ended before.
        """
        found: list[Row] = []
        while len(found) < count:
            if self._process.poll() is not None:
                raise RuntimeError(f"the run has ended: {self._process.communicate()[0]}")
            time.sleep(0.01)
            found += self.steps()
        return found


def phases(record: Row) -> dict[str, float]:
    """Seconds of a step and of the phases that the network is in."""
    of = {name.removeprefix("seconds/"): value for name, value in record.items() if name.startswith("seconds")}
    return {
        "select": of["select"],
        "update": of["update"],
        "push": of["push"],
        "replicate": of["rollout"] - of["generate"] - of["grade"],
        "step": of["seconds"],
    }


def measure(hosts: Hosts, course: Course, rounds: int, steps: int) -> Iterator[tuple[Cables, Row]]:
    """Cables, and the phases of a step on them with the bytes into the second and the third host per step."""
    for turn in range(rounds):
        for cables in (*TRIED[turn:], *TRIED[:turn]):
            cables.put_in(hosts)
            course.steps()
            course.wait(1)
            before = [hosts.counted(host)[0] for host in (1, TRAINERS)]
            found = course.wait(steps)
            after = [hosts.counted(host)[0] for host in (1, TRAINERS)]
            into = [(b - a) / len(found) for a, b in zip(before, after, strict=True)]
            for record in found:
                yield cables, {**phases(record), "into_trainer": into[0], "into_server": into[1]}


def predicted(generated: int) -> dict[str, Traffic]:
    """What the model says of each phase."""
    weights, ring = 4 * parameters(WIDTH), Ring(TRAINERS, TRAINERS, USE)
    return {
        "select": ring.collective(weights, CALLS["select"]),
        "update": ring.update(weights, 2, 2 * weights, CALLS["update"]),
        "push": ring.push(weights, TENSORS, SERVERS),
        "replicate": ring.collective(8 * generated, CALLS["replicate"]),
    }


def summary(measured: dict[Cables, list[Row]]) -> list[Row]:
    """A row for each kind of cables: medians, quartiles, and the prediction from the times without a limit."""
    traffic = predicted(BASE.questions * BASE.samples * BASE.max_tokens)
    medians = {
        cables: {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        for cables, rows in measured.items()
    }
    base = medians[TRIED[0]]
    return [
        {
            **vars(cables),
            **of_cables,
            "quartiles": {name: statistics.quantiles([row[name] for row in measured[cables]])[::2] for name in PHASES},
            "predicted": {name: base[name] + one.seconds(cables.network) for name, one in traffic.items()},
            "steps": len(measured[cables]),
        }
        for cables, of_cables in medians.items()
    ]


def table(rows: list[Row]) -> str:
    """The rows in Markdown; predictions stand in brackets."""
    lines = ["| one way | bandwidth | select | update | push | replication | step | MB into trainer | MB into server |"]
    lines.append("|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        times = [f"{row[name]:.2f} s ({row['predicted'][name]:.2f})" for name in row["predicted"]]
        rate = f"{row['megabits']} Mbit/s" if row["megabits"] else "no limit"
        sizes = [f"{row[name] / 1e6:.1f}" for name in ("into_trainer", "into_server")]
        cells = [f"{row['milliseconds']:g} ms", rate, *times, f"{row['step']:.2f} s", *sizes]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Run the program; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="of each kind of cables in a round")
    own = parser.parse_args(argv)
    if reason := missing():
        sys.exit(f"error: {reason}")
    measured: dict[Cables, list[Row]] = defaultdict(list)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        model, questions = folder / "model", folder / "questions.jsonl"
        write_model(config_of(WIDTH), model)
        write_questions(questions)
        hosts = stack.enter_context(Hosts(TRAINERS + SERVERS, trainers=TRAINERS))
        limits = f"--max-tokens={PROMPT + BASE.max_tokens}", "--kv-cache-gib=0.2"
        servers = [
            Server(model, folder / f"{host}.log", *limits, on=hosts.on(host), address=hosts.addresses[host])
            for host in range(TRAINERS, TRAINERS + SERVERS)
        ]
        for server in servers:
            stack.callback(server.kill)
            server.start()
        urls = [server.ready() for server in servers]
        changed = ("--experience.ratio=0.5", "--optimizer.minibatches=1", "--distributed.persistence_threshold=0")
        sized = (f"--rollout.max_tokens={BASE.max_tokens}", "--rollout.engine=server", "--rollout.servers", *urls)
        runs = hosts.torchrun(*options(model, questions, folder), *QUIET, *changed, *sized, "--steps=10000")
        for run in runs:
            stack.callback(run.kill)
        course = Course(runs[0], folder / "run" / "metrics.jsonl")
        course.wait(3)  # replay begins, and DeepSpeed knows the order of the modules
        for cables, row in measure(hosts, course, own.rounds, own.steps):
            print(cables, {name: round(value, 3) for name, value in row.items()}, flush=True)
            measured[cables].append(row)
    rows = summary(measured)
    own.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
