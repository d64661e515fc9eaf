"""Cost of questions and stored answers by their number: memory, disk, and time to plan a step.

    python -m benchmarks.scale --questions 1000000 --trajectories 10000000 --tokens 64 --folder DIR

A replay with the default options is filled with synthetic answers, makes steps of 128 questions with 8 answers each,
and is saved and loaded. The figures are printed, and written to DIR/scale.json.
"""

import argparse
import datetime
import gc
import json
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from benchmarks import test_experience as experience
from benchmarks.memory import status
from exgrpo.train.common.durable import read_checked, write_checked
from exgrpo.train.data.prompts import PromptFormat
from exgrpo.train.data.questions import QuestionSet, question_set
from exgrpo.train.data.rows import Row
from exgrpo.train.replay import ExperienceConfig, MeanScores, MethodOptions, Replay
from exgrpo.train.replay.replay import ReplayState

PROMPT = 64  # tokens
MEASURED_STEPS = 10
CHUNK = 1 << 16
T = TypeVar("T")
WHAT = {
    "question_bytes": "memory of a question with its prompt and texts",
    "trajectory_bytes": "memory of a stored trajectory",
    "plan": "plan a step",
    "select": "select stored answers",
    "store": "store a step's answers",
    "save": "save",
    "tidy": "move the answers together, half of which have left",
    "load": "load",
    "disk_bytes": "saved files",
}
"""Measured quantities: bytes, and CPU seconds; medians for those of a step."""


class Sizes(NamedTuple):
    """Numbers of questions and stored trajectories, and tokens per response."""

    questions: int
    trajectories: int
    tokens: int


def resident() -> int:
    """Return the bytes of resident memory, without mapped files."""
    gc.collect()
    return status("RssAnon")


def timed(action: Callable[[], T]) -> tuple[float, T]:
    """Return the CPU seconds of a call, and its result."""
    start = time.process_time()
    result = action()
    return time.process_time() - start, result


def questions_of(count: int) -> QuestionSet:
    """Return synthetic questions of PROMPT random tokens, as in the memory of a run."""
    rng = np.random.default_rng(0)

    def tokenize(texts: Sequence[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": rng.integers(0, experience.VOCABULARY, (len(texts), PROMPT)).tolist()}

    class Rows(Sequence[Row]):
        """Rows made on access, so that they are not measured."""

        def __len__(self) -> int:
            return count

        def __getitem__(self, place: Any) -> Any:
            if isinstance(place, slice):
                return [self[i] for i in range(*place.indices(count))]
            return Row(f"What is {place} + {place}? Answer step by step.", str(2 * place), None, "synthetic")

    prompts = PromptFormat(chat=False, prompt_format="{question}", max_prompt_tokens=PROMPT)
    return question_set("synthetic", Rows(), tokenize, prompts)


def fill(replay: Replay, sizes: Sizes, rng: np.random.Generator) -> None:
    """Store successes, question by question in turn."""
    for first in range(0, sizes.trajectories, CHUNK):
        answers = np.arange(first, min(first + CHUNK, sizes.trajectories))
        rewards = np.ones((len(answers), 1)).tolist()
        batch = experience.graded(answers % sizes.questions, rewards, rng, sizes.tokens, 0)
        batch.fill(step=answers * experience.STEPS // sizes.trajectories)
        replay.memory.table.add(batch, **experience.filled_columns(len(answers), rng))
    arrays = experience.filled_arrays(sizes.questions, rng)
    vars(replay.memory).update(arrays, retired=arrays["retired"] != 0)


def empty(sizes: Sizes) -> Replay:
    """Return an empty replay, which selects without a model's scores."""
    config = ExperienceConfig(start_pass_rate=0.0, trajectory="random")
    return Replay(MethodOptions(config, experience.SAMPLES), sizes.questions, seed=1)


def make_step(replay: Replay, sizes: Sizes, rng: np.random.Generator, step: int) -> tuple[float, float, float]:
    """Return the seconds of `plan`, `select` and `store` of a step; half of the answers are right."""
    plan, planned = timed(lambda: replay.plan(experience.QUESTIONS_PER_STEP, step))
    select, stored = timed(lambda: replay.select(planned, lambda _: MeanScores(np.empty(0), np.empty(0))))
    rewards = [[float(i % 2) for i in range(group.fresh)] for group in planned]
    batch = experience.graded(stored.question, rewards, rng, sizes.tokens, step).append_rows(stored)
    store, _ = timed(lambda: replay.store(batch, step))
    return plan, select, store


def measure(sizes: Sizes, folder: Path) -> dict[str, float]:
    """Return all figures of WHAT."""
    shutil.rmtree(folder, ignore_errors=True)
    rng, before = np.random.default_rng(0), resident()
    questions = questions_of(sizes.questions)
    found = {"question_bytes": (resident() - before) / len(questions)}
    del questions

    before, replay = resident(), empty(sizes)
    fill(replay, sizes, rng)
    found["trajectory_bytes"] = (resident() - before) / sizes.trajectories
    steps = [make_step(replay, sizes, rng, experience.STEPS + number) for number in range(1, MEASURED_STEPS + 1)]
    found |= zip(("plan", "select", "store"), map(statistics.median, zip(*steps, strict=True)), strict=True)

    def save() -> tuple[str, dict[str, Any]]:
        """Write the experience as a checkpoint does; return the name of its arrays, and its values."""
        state = replay.state()
        return write_checked(folder, state.arrays), state.values

    folder.mkdir()
    found["save"], (name, values) = timed(save)
    found["disk_bytes"] = sum(path.stat().st_size for path in folder.iterdir())
    table = replay.memory.table
    table.remove(table.rows()[rng.permutation(len(table))[: len(table) // 2 + 1]])
    found["tidy"], _ = timed(table.tidy)

    replay = empty(sizes)
    found["load"], _ = timed(lambda: replay.restore(ReplayState(values, read_checked(folder, name))))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=10_000)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=64, help="of each response")
    parser.add_argument("--folder", type=Path, required=True, help="folder for saved files and scale.json")
    options = parser.parse_args(arguments)
    sizes = Sizes(options.questions, options.trajectories, options.tokens)
    options.folder.mkdir(parents=True, exist_ok=True)
    found = measure(sizes, options.folder / "experience")
    for name, what in WHAT.items():
        print(f"{what:75}", f"{found[name]:,.0f} bytes" if name.endswith("bytes") else f"{found[name]:.4f} s")
    record = {"date": datetime.date.today().isoformat(), **sizes._asdict(), **found}
    (options.folder / "scale.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
