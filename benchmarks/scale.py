"""What questions and stored answers cost by their number: memory, disk, and the seconds of a step's decisions.

    python -m benchmarks.scale --questions 1000000 --trajectories 10000000 --tokens 64 --folder DIR

A replay with the default options is filled with synthetic answers, makes steps of 128 questions with 8 answers each,
and is saved, saved again and loaded. A table goes to the terminal, and a record to DIR/scale.json.
"""

import argparse
import datetime
import gc
import json
import resource
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from benchmarks.test_experience import QUESTIONS_PER_STEP, SAMPLES, STEPS, VOCABULARY, filled_arrays, graded
from exgrpo.train.checkpoint.store import ExperienceStore, read_checked, write_checked
from exgrpo.train.data.prompts import PromptFormat
from exgrpo.train.data.questions import QuestionSet, question_set
from exgrpo.train.data.rows import Row
from exgrpo.train.replay import ExperienceConfig, MeanScores, Replay, Setting
from exgrpo.train.replay.replay import ReplayState
from exgrpo.train.replay.stored import OF_TRAJECTORY, Places, Stored, TokenBlocks, Tokens, serials

PROMPT = 64
"""Tokens of a prompt."""
MEASURED_STEPS = 10
CHUNK = 1 << 16
T = TypeVar("T")


@dataclass(frozen=True)
class Sizes:
    """What is measured: the number of questions and of stored trajectories, and the tokens of each response."""

    questions: int
    trajectories: int
    tokens: int


WHAT = {
    "question_bytes": "memory of a question with its prompt and texts",
    "trajectory_bytes": "memory of a stored trajectory",
    "mapped_bytes": "mapped files beside it, of which the system takes back what it needs",
    "loaded_bytes": "memory of a trajectory after a load",
    "peak_bytes": "largest resident memory of the process, mapped files included",
    "plan": "plan a step",
    "select": "select what is replayed",
    "take_in": "take in a step",
    "first_save": "first save",
    "later_save": "save after a further step",
    "load": "load",
    "disk_bytes": "files after the first save",
}
"""What is measured: bytes, and seconds of the processor; those of a step are medians."""


def resident(kind: str) -> int:
    """Bytes of resident memory now: RssAnon, or RssFile of mapped files."""
    gc.collect()
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")) * 1024


def timed(action: Callable[[], T]) -> tuple[float, T]:
    """The seconds that a call takes of the processor, and what it returns; what else runs there does not count."""
    start = time.process_time()
    result = action()
    return time.process_time() - start, result


class RandomTokens:
    """Stands for a tokenizer: every text is PROMPT random tokens, with ids as Python makes them from Rust."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, texts: Sequence[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": self.rng.integers(0, VOCABULARY, (len(texts), PROMPT)).tolist()}


class Rows(Sequence[Row]):
    """Rows that are made when they are read, so that they are not measured."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(self._count))]
        return Row(f"What is {place} + {place}? Answer step by step.", str(2 * place), None, "synthetic")


def questions_of(count: int) -> QuestionSet:
    """Synthetic questions, as a run has them in memory."""
    prompts = PromptFormat(chat=False, prompt_format="{question}", max_prompt_tokens=PROMPT)
    return question_set("synthetic", Rows(count), RandomTokens(), prompts)


def stored_answers(sizes: Sizes, rng: np.random.Generator, folder: Path | None) -> Stored:
    """Successes, in turn of all questions."""
    blocks, places = TokenBlocks(folder), []
    for first in range(0, sizes.trajectories, CHUNK):
        length = np.full(min(CHUNK, sizes.trajectories - first), sizes.tokens)
        count = int(length.sum())
        response, log_prob = rng.integers(0, VOCABULARY, count, dtype=np.int32), -rng.random(count, dtype=np.float32)
        places.append(blocks.extend(Tokens(response, log_prob, np.zeros(count, bool)), length))
    answers = np.arange(sizes.trajectories)
    columns: dict[str, npt.NDArray] = {
        **{name: np.zeros(sizes.trajectories, dtype) for name, dtype in OF_TRAJECTORY.items()},
        **{name: np.concatenate(parts) for name, parts in zip(Places._fields, zip(*places, strict=True), strict=True)},
        "serial": np.array(serials(sizes.trajectories)),
        "question": answers % sizes.questions,
        "step": answers * STEPS // sizes.trajectories,
    }
    columns["reward"][:], columns["finished"][:] = 1.0, True
    return Stored(columns, blocks.contents)


def empty(sizes: Sizes, folder: Path | None) -> Replay:
    """A replay of as many questions; it selects without scores, for there is no model."""
    config = ExperienceConfig(start_pass_rate=0.0, trajectory="random", folder=folder)
    return Replay(Setting(config, SAMPLES), sizes.questions, seed=1)


class Filled:
    """A replay that has stored what the sizes say."""

    def __init__(self, sizes: Sizes, folder: Path | None) -> None:
        self.sizes, self.rng, self.step = sizes, np.random.default_rng(0), STEPS
        self.replay = empty(sizes, folder)
        stored = stored_answers(sizes, self.rng, folder)
        self.replay.memory.restore(filled_arrays(sizes.questions, sizes.trajectories, self.rng), stored)

    def make_step(self) -> tuple[float, float, float]:
        """The seconds of `plan`, `select` and `take_in` of a step; half of the answers are right."""
        self.step += 1
        plan, planned = timed(lambda: self.replay.plan(QUESTIONS_PER_STEP, self.step))
        select, stored = timed(lambda: self.replay.select(planned, lambda _: MeanScores(np.empty(0), np.empty(0))))
        rewards = [[float(i % 2) for i in range(group.fresh)] for group in planned]
        batch = graded(stored.question, rewards, self.rng, self.sizes.tokens, self.step).beside(stored)
        take_in, _ = timed(lambda: self.replay.take_in(batch, self.step))
        return plan, select, take_in


def save(replay: Replay, store: ExperienceStore) -> tuple[str, dict[str, Any]]:
    """What a checkpoint writes of the experience; returns the name of its arrays, and its values."""
    state = replay.state()
    return write_checked(store.folder, {**state.arrays, **store.save(state.trajectories)}), state.values


def load(replay: Replay, folder: Path, name: str, values: dict[str, Any]) -> None:
    """What a run that continues reads of it."""
    arrays = read_checked(folder, name)
    replay.restore(ReplayState(values, arrays, ExperienceStore(folder, replay.config.folder).load(arrays)))


def measured_questions(count: int) -> dict[str, float]:
    """Makes the questions, and lets them go."""
    before = resident("RssAnon")
    questions = questions_of(count)
    return {"question_bytes": (resident("RssAnon") - before) / len(questions)}


def measured_steps(sizes: Sizes, folder: Path, tokens: Path | None) -> tuple[dict[str, float], str, dict[str, Any]]:
    """Fills a replay, makes steps and saves; also returns what `load` needs."""
    before, mapped = resident("RssAnon"), resident("RssFile")
    filled = Filled(sizes, tokens)
    found = {
        "trajectory_bytes": (resident("RssAnon") - before) / sizes.trajectories,
        "mapped_bytes": (resident("RssFile") - mapped) / sizes.trajectories,
    }
    steps = zip(*(filled.make_step() for _ in range(MEASURED_STEPS)), strict=True)
    found |= dict(zip(("plan", "select", "take_in"), map(statistics.median, steps), strict=True))
    store = ExperienceStore(folder)
    found["first_save"], _ = timed(lambda: save(filled.replay, store))
    found["disk_bytes"] = sum(path.stat().st_size for path in store.folder.iterdir())
    filled.make_step()
    found["later_save"], (name, values) = timed(lambda: save(filled.replay, store))
    return found, name, values


def measured_load(
    sizes: Sizes, folder: Path, tokens: Path | None, name: str, values: dict[str, Any]
) -> dict[str, float]:
    """Goes on from what was saved."""
    replay, before = empty(sizes, tokens), resident("RssAnon")
    seconds, _ = timed(lambda: load(replay, folder, name, values))
    return {"load": seconds, "loaded_bytes": (resident("RssAnon") - before) / replay.memory.trajectory_count}


def measure(sizes: Sizes, folder: Path, tokens: Path | None) -> dict[str, float]:
    """Everything, one after the other, with tokens in RAM or in files of a folder; see `WHAT`."""
    shutil.rmtree(folder / "experience", ignore_errors=True)
    found = measured_questions(sizes.questions)
    of_steps, name, values = measured_steps(sizes, folder / "experience", tokens)
    found |= of_steps | measured_load(sizes, folder / "experience", tokens, name, values)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found | {"peak_bytes": peak}


def show(sizes: Sizes, found: dict[str, float]) -> None:
    """Print the table."""
    title = f"{sizes.questions:,} questions, {sizes.trajectories:,} trajectories of {sizes.tokens} tokens"
    table = Table("what", "measured", title=title)
    for name, what in WHAT.items():
        table.add_row(what, f"{found[name]:,.0f} bytes" if name.endswith("bytes") else f"{found[name]:.4f} s")
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=10_000)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=64, help="of each response")
    parser.add_argument("--mapped", action="store_true", help="keep tokens in files of the folder (experience.folder)")
    parser.add_argument("--folder", type=Path, required=True, help="what is saved goes there, and scale.json")
    options = parser.parse_args(arguments)
    sizes = Sizes(options.questions, options.trajectories, options.tokens)
    options.folder.mkdir(parents=True, exist_ok=True)
    found = measure(sizes, options.folder, options.folder if options.mapped else None)
    show(sizes, found)
    record = {"date": datetime.date.today().isoformat(), **asdict(sizes), "mapped": options.mapped, **found}
    (options.folder / "scale.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
