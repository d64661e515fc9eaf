"""Training steps of TRL's GRPOTrainer: `python -m benchmarks.trl_step OUT.json [options]`.

A training step is one generation with its optimiser steps. OUT.json gets the measurements of each.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.memory import program_peak
from benchmarks.programs import coin
from exgrpo.train.metrics.utilisation import PhaseClock


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer with a clock around its phases."""

    def begin_step(self) -> None:
        self.begin, self.clock, self.tokens = time.perf_counter(), PhaseClock(), 0

    def facts(self) -> dict[str, Any]:
        """Return the measurements of the step so far; all but generation, rewards and scores is the update."""
        seconds = time.perf_counter() - self.begin
        answers, generate, grade = (self.clock.seconds[name] for name in ("answers", "generate", "grade"))
        phases = {"generate": generate, "grade": grade, "score": answers - generate - grade}
        phases["update"] = seconds - answers
        return {"seconds": seconds, "phases": phases, "generated_tokens": self.tokens, **program_peak()}

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with self.clock("answers"):
            output = super()._generate_and_score_completions(inputs)
        self.tokens = int(output["completion_mask"].sum())
        return output

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock("generate"):
            return super()._generate(*args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock("grade"):
            return super()._calculate_rewards(*args, **kwargs)


class Steps(TrainerCallback):
    """Collect the measurements of each training step, which ends with the last of its optimiser steps."""

    def __init__(self, updates: int) -> None:
        self.updates = updates
        self.facts: list[dict[str, Any]] = []
        self.trainer: TimedTrainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.updates == 0:
            self.facts.append(self.trainer.facts())
            self.trainer.begin_step()


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Return `coin` of each completion, with the signature of TRL's rewards."""
    return [coin(message[0]["content"], gold) for message, gold in zip(completions, answer, strict=True)]


def config_of(own: argparse.Namespace) -> GRPOConfig:
    """Return a configuration of the same step as ours; all else is TRL's default."""
    accumulation = own.groups * own.samples // own.updates // own.pass_rows
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
        max_steps=own.steps * own.updates,
        learning_rate=own.lr,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        loss_type="dr_grpo",
        scale_rewards="none",
        entropy_coef=0.001,
        use_vllm=own.vllm,
        vllm_max_model_length=own.max_prompt_tokens + own.max_tokens,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    for name in ("model", "questions", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("steps", "groups", "samples", "max_prompt_tokens", "max_tokens", "updates", "pass_rows"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the passes; weights are fp32")
    parser.add_argument("--vllm", action="store_true", help="generate with vLLM in the process")
    own = parser.parse_args(argv)
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # as exgrpo does
    rows = [json.loads(line) for line in own.questions.read_text(encoding="utf-8").splitlines()]
    questions = [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]
    steps = Steps(own.updates)
    trainer = TimedTrainer(str(own.model), reward, config_of(own), Dataset.from_list(questions), callbacks=[steps])
    steps.trainer = trainer
    trainer.train()
    own.out.write_text(json.dumps(steps.facts), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
