"""Training steps of exgrpo in turns: `python -m benchmarks.training_step [options of training]`.

A turn is one training step; its answer has the seconds of its phases. A turn may ask for other sizes than the options
say: `questions`, `samples`, `max_tokens`.
"""

import math
import os
import sys
from contextlib import ExitStack

from benchmarks.memory import device_peak
from benchmarks.turns import Facts, Turns
from exgrpo.train.common.distributed import start
from exgrpo.train.config.options import Config
from exgrpo.train.config.recipe import parse_args
from exgrpo.train.metrics.utilisation import FORWARD, Utilisation
from exgrpo.train.run.build import read_inputs
from exgrpo.train.run.loop import Run
from exgrpo.train.run.startup_checks import look
from exgrpo.train.trainer import StepResult, Trainer

PHASES = ("select", "generate", "grade", "score", "update", "push")


def resized(config: Config, sizes: Facts) -> Config:
    """The configuration with the sizes that a turn asks for."""
    of_rollout: Facts = {name: sizes[name] for name in ("samples", "max_tokens") if name in sizes}
    changes = {"rollout": config.rollout.model_copy(update=of_rollout)}
    return config.model_copy(update={**changes, "questions": sizes.get("questions", config.questions)})


def facts_of(result: StepResult | None, utilisation: Utilisation) -> Facts:
    """What is reported of a step, with the share of the matrix rate that each phase of the model reaches."""
    assert result is not None, "every question is retired: fewer rounds, or more questions"
    metrics = result.metrics
    used = utilisation.metrics(result.work, metrics)
    shares = {phase: used[f"mfu/{phase}"] for phase in (*FORWARD, "update")}
    return {
        **device_peak(),
        "mfu": {phase: share for phase, share in shares.items() if not math.isnan(share)},
        "phases": {phase: metrics[f"seconds/{phase}"] for phase in PHASES},
        "generated_tokens": int(result.batch.length[result.batch.fresh].sum()),
        "replayed": metrics["replayed"],
        "reward": metrics["reward"],
        **({"mismatch": metrics["mismatch/mean"]} if "mismatch/mean" in metrics else {}),
    }


def main(argv: list[str]) -> int:
    """Run the program; returns its exit status."""
    turns, config = Turns(), parse_args(argv)
    with ExitStack() as resources:
        inputs = read_inputs(config, look(config, resources))
        run = Run(config, inputs, start(config.distributed.timeout_minutes, len(os.sched_getaffinity(0))), resources)
        trainers: dict[str, Trainer] = {}
        turns.answer({})
        step = 0
        while (sizes := turns.wait()) is not None:
            step += 1
            if str(sizes) not in trainers:
                trainers[str(sizes)] = Trainer(resized(config, sizes), inputs.train_set, run.policy, run.answerer)
            turns.answer(facts_of(trainers[str(sizes)].step(step), run.utilisation))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
