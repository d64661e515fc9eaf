"""Folders of runs with an untrained checkpoint, and trajectories of the default task's tokens."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from exgrpo.train.checkpoint.listing import EXPERIENCE, FOLDER, Manifest, write_manifest
from exgrpo.train.common.durable import SUFFIX, write_checked
from exgrpo.train.common.step_batch import ENGINE
from exgrpo.train.config.objective import MethodOptions
from exgrpo.train.config.options import Config
from exgrpo.train.data.files import read_rows
from exgrpo.train.data.prompts import PromptFormat
from exgrpo.train.data.questions import QuestionSet, question_set
from exgrpo.train.policy.tokenizer import Pretrained, load_pretrained
from exgrpo.train.replay.memory import ExperienceMemory
from exgrpo.train.run.traces import read_traces
from tests.train.batches import Row, each, sets
from tests.train.configs import configured

QUESTIONS = 6
K = 4


def config(*layers: dict[str, Any], **values: Any) -> Config:
    """The default run's, of few questions; nothing delays its replay."""
    few = {"data.train_limit": QUESTIONS, "rollout.samples": K, "experience.start_pass_rate": 0.0, "questions": 3}
    return configured({**few, "optimizer.minibatches": 1}, *layers, **values)


@cache
def pretrained() -> Pretrained:
    return load_pretrained("builtin:arithmetic")


@cache
def questions(prompts: PromptFormat | None = None) -> QuestionSet:
    rows = read_rows("builtin:arithmetic", split="train", limit=QUESTIONS, seed=0)
    return question_set(
        "builtin:arithmetic", rows, pretrained().tokenizer, prompts or PromptFormat.from_options(config().data)
    )


def ids(text: str, *, eos: bool = True) -> np.ndarray:
    tokenizer = pretrained().tokenizer
    found = tokenizer(text, add_special_tokens=False)["input_ids"]
    return np.array([*found, tokenizer.eos_token_id] if eos else found, np.int32)


def trajectory(question: int, text: str, *, seed: int = 0, **changes: Any) -> Row:
    """An answer with this text and log-probs that no model gives."""
    response = ids(text, eos=changes.get("finished", True))
    log_prob = -np.random.default_rng([question, seed]).random(len(response), np.float32)
    values = {"finished": True, "reward": 1.0, "step": 3, **changes}
    values["allowed_tokens"] = sets(response) if values.pop("cut", False) else None
    return Row(question=question, response=response, log_prob=log_prob, **values)


def some(count: int = 3) -> list[Row]:
    """Answers of all kinds to the first questions."""
    made = []
    for question in range(count):
        gold = questions()[question].gold
        made += [
            trajectory(question, f"<think>{question}</think>\\boxed{{{gold}}}", key=7 + question),
            trajectory(question, f"\\boxed{{{gold}}}", seed=1, old_log_probs_from=ENGINE, step=1, cut=question == 1),
        ]
    return [*made, trajectory(0, "\\boxed{no", finished=False, reward=0.0, seed=2)]


def with_reply() -> Row:
    """An answer of which an environment has written some tokens."""
    told = trajectory(1, "7 + 8 = 15\\boxed{15}", seed=3)
    written = ~np.isin(np.arange(len(told.response)), (4, 5))
    return dataclasses.replace(told, response_mask=written, log_prob=np.where(written, told.log_prob, np.float32(0)))


def make_run(
    folder: Path,
    trajectories: Sequence[Row],
    *,
    step: int = 5,
    asked: QuestionSet | None = None,
    further: Mapping[str, Any] | None = None,
    **values: Any,
) -> Path:
    """Make a run's folder with one checkpoint as `Checkpoints` writes it, without weights, for `questions`."""
    of_run = config(values)
    memory = ExperienceMemory(QUESTIONS, MethodOptions(of_run.experience, K))
    place = np.arange(len(trajectories))
    columns = {"advantage": 0.25 + place, "successes": 1 + place % 2, "replays": place}
    answers = each(trajectories)
    answers.fill(**{**columns, "answers": np.full_like(place, 3), **(further or {})})
    memory.fill(answers, {one.question: 2.0 for one in trajectories})
    memory.retired[QUESTIONS - 1] = True
    (folder / EXPERIENCE).mkdir(parents=True, exist_ok=True)
    arrays = write_checked(folder / EXPERIENCE, memory.arrays())
    checkpoint = folder / FOLDER / f"step_{step:08d}"
    checkpoint.mkdir(parents=True)
    size = (folder / EXPERIENCE / f"{arrays}{SUFFIX}").stat().st_size
    of_data = (asked or questions(PromptFormat.from_options(of_run.data))).fingerprint
    known = {"fingerprint": of_data, "config": of_run.model_dump(mode="json"), "experience": {arrays: size}}
    write_manifest(checkpoint, Manifest(step=step, files={}, arrays=arrays, values={}, progress={}, **known))
    return folder


def rows_of(source: Path) -> list[Any]:
    return list(read_traces(source))
