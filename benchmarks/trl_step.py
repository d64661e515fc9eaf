"""Training steps of TRL's GRPOTrainer in turns: `python -m benchmarks.trl_step [options]`.

A turn is one generation with its optimiser steps, which is what exgrpo calls a training step.
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.memory import device_peak
from benchmarks.turns import Facts, Turns
from exgrpo.train.common.distributed import World
from exgrpo.train.metrics.utilisation import PhaseClock, Utilisation, matrix_rate
from exgrpo.train.policy.flops import Reading, forward_flops

ENDLESS = 10**6
"""Optimiser steps; the driver ends the program."""


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer with a clock around its phases."""

    def start_turn(self) -> None:
        """Begin to count."""
        self.clock, self.reward = PhaseClock(), 0.0
        self.readings: list[Reading] = []

    def facts(self) -> Facts:
        """What is known of the turn. What is no generation is the update."""
        seconds = self.clock.seconds
        score = seconds["answers"] - seconds["generate"] - seconds["grade"]
        update = seconds["turn"] - seconds["answers"]
        phases = {"generate": seconds["generate"], "grade": seconds["grade"], "score": score, "update": update}
        tokens = sum(reading.written for reading in self.readings)
        return {
            "phases": phases,
            "generated_tokens": tokens,
            "reward": self.reward,
            "mfu": self._shares(phases),
            **device_peak(),
        }

    def _shares(self, phases: Mapping[str, float]) -> dict[str, float]:
        """The share of the matrix rate that each phase reaches; it scores where a batch has several optimiser steps."""
        model = self.accelerator.unwrap_model(self.model)
        world = World(0, 1, model.device, control=None)
        if not hasattr(self, "rate"):
            self.rate = matrix_rate(world, torch.bfloat16 if self.args.bf16 else torch.float32)
        scored = self.readings if self.args.steps_per_generation > self.args.gradient_accumulation_steps else []
        work = {"select": [], "generate": self.readings, "score": scored, "update": self.readings}
        numbers = {**{f"seconds/{phase}": value for phase, value in phases.items()}, "seconds": sum(phases.values())}
        used = Utilisation(forward_flops(model), self.rate).metrics(work, numbers)
        return {phase: used[f"mfu/{phase}"] for phase in ("generate", "score", "update") if work[phase]}

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with self.clock("answers"):
            output = super()._generate_and_score_completions(inputs)
        lengths = zip(output["prompt_mask"].sum(1).tolist(), output["completion_mask"].sum(1).tolist(), strict=True)
        rows, each = list(lengths), self.num_generations
        groups = (rows[start : start + each] for start in range(0, len(rows), each))
        self.readings = [Reading(group[0][0], tuple(length for _, length in group)) for group in groups]
        return output

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock("generate"):
            return super()._generate(*args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock("grade"):
            rewards = super()._calculate_rewards(*args, **kwargs)
        self.reward = float(rewards.mean())
        return rewards


class TakeTurns(TrainerCallback):
    """Waits for its turn before every generation, and answers after its last optimiser step."""

    def __init__(self, turns: Turns, updates: int) -> None:
        self.turns = turns
        self.updates = updates
        self.trainer: TimedTrainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ready."""
        self.turns.answer({})
        self._wait()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After an optimiser step."""
        if state.global_step % self.updates == 0:
            self._turn.__exit__(None, None, None)
            self.turns.answer(self.trainer.facts())
            self._wait()

    def _wait(self) -> None:
        if self.turns.wait() is None:
            sys.exit()
        self.trainer.start_turn()
        self._turn = self.trainer.clock("turn")
        self._turn.__enter__()


def reward_of(name: str) -> Callable[..., list[float]]:
    """A reward of exgrpo, module:function, as one of TRL."""
    module, function = name.split(":")
    score = getattr(importlib.import_module(module), function)

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [score(message[0]["content"], gold) for message, gold in zip(completions, answer, strict=True)]

    return reward


def config_of(own: argparse.Namespace) -> GRPOConfig:
    """The same step as ours; what is not named is TRL's default."""
    rows = own.groups * own.samples
    accumulation = rows // own.updates // own.pass_rows
    return GRPOConfig(
        output_dir=str(own.output),
        model_init_kwargs={"dtype": "float32"},
        bf16=own.dtype == "bf16",
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        num_generations=own.samples,
        max_completion_length=own.max_tokens,
        per_device_train_batch_size=own.pass_rows,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=own.updates * accumulation,
        max_steps=ENDLESS,
        learning_rate=own.lr,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        loss_type="dr_grpo",
        scale_rewards="none",
        entropy_coef=0.001,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )


def main(argv: list[str]) -> int:
    """Run the program; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "questions", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("groups", "samples", "max-tokens", "updates", "pass-rows"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--reward", required=True)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the passes; weights are fp32")
    own = parser.parse_args(argv)
    turns = Turns()
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # as exgrpo does
    rows = [json.loads(line) for line in own.questions.read_text(encoding="utf-8").splitlines()]
    questions = [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]
    take_turns = TakeTurns(turns, own.updates)
    trainer = TimedTrainer(
        str(own.model),
        reward_of(own.reward),
        config_of(own),
        Dataset.from_list(questions),
        callbacks=[take_turns],
    )
    take_turns.trainer = trainer
    trainer.train()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
