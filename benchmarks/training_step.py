"""On-policy and ExGRPO steps in turn, on one policy: `python -m benchmarks.training_step OUT.json [options]`.

Two trainers share a policy, a rollout engine and a grader. They take turns, so both see (nearly) the same weights,
answers of the same lengths and the same machine. The options of training may follow; the answer is a JSON file with
the metrics of every timed step.
"""

import argparse
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path

from exgrpo.train.config import Config
from exgrpo.train.distributed import start
from exgrpo.train.early import look
from exgrpo.train.inputs import read_inputs
from exgrpo.train.recipe import parse_args
from exgrpo.train.run import Run
from exgrpo.train.trainer import Trainer


def with_ratio(config: Config, ratio: float) -> Config:
    """The configuration with another share of replay, which begins at once."""
    experience = config.experience.model_copy(update={"ratio": ratio, "start_pass_rate": 0.0})
    return config.model_copy(update={"experience": experience})


def measure(config: Config, warmup: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """The metrics of `rounds` steps "on-policy" and as many "exgrpo", after `warmup` steps that fill the buffer."""
    with ExitStack() as resources:
        inputs = read_inputs(config, look(config, resources))
        run = Run(config, inputs, start(config.distributed.timeout_minutes), resources)
        trainers = {
            "on-policy": Trainer(with_ratio(config, 0.0), run.train_set, run.policy, run.answerer),
            "exgrpo": Trainer(with_ratio(config, 0.5), run.train_set, run.policy, run.answerer),
        }
        for step in range(warmup):
            trainers["exgrpo"].step(step + 1)
        metrics: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
        for step in range(warmup, warmup + rounds):
            for name in sorted(trainers, reverse=bool(step % 2)):
                result = trainers[name].step(step + 1)
                assert result is not None, "every question is retired: fewer rounds, or more questions"
                metrics[name].append(result.metrics)
        return metrics


def main(argv: list[str]) -> int:
    """Run the program; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    own, rest = parser.parse_known_args(argv)
    metrics = measure(parse_args(rest), own.warmup, own.rounds)
    if os.environ["RANK"] == "0":
        own.out.write_text(json.dumps(metrics), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
