"""Cost of the experience per step: planning, storing a step's groups, counting and saving, by size of the buffer."""

import gc
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from exgrpo.train.checkpoint.store import write_checked
from exgrpo.train.common.step_batch import TRAINER, Ints, StepBatch
from exgrpo.train.replay import ExperienceConfig, MethodOptions, Replay
from exgrpo.train.replay.table import packed

SIZES = (1_000, 10_000, 100_000, 1_000_000)
PER_QUESTION = 4
TOKENS = 32
"""Short responses: the timed code does not read them, and a million of the paper's length would take over 8 GB."""
SAMPLES, QUESTIONS_PER_STEP, RATIO = 8, 128, 0.5
VOCABULARY = 1 << 17
ROUNDS = 20
STEPS = 1000  # of the run whose answers fill the memory


def graded(
    questions: Ints, rewards: Sequence[Sequence[float]], rng: np.random.Generator, tokens: int, step: int
) -> StepBatch:
    """Return fresh answers of a step, given the rewards of each question's group."""
    counts = [len(of_group) for of_group in rewards]
    rows, size = sum(counts), sum(counts) * tokens
    return StepBatch(
        questions,
        np.repeat(np.arange(len(counts)), counts),
        np.full(rows, tokens),
        reward=[reward for of_group in rewards for reward in of_group],
        step=np.full(rows, step),
        finished=np.ones(rows, bool),
        old_log_probs_from=np.full(rows, TRAINER),
        token=rng.integers(0, VOCABULARY, size, dtype=np.int32),
        response_mask=np.ones(size, bool),
        old_log_prob=-rng.random(size, dtype=np.float32),
        **{name: np.zeros(rows) for name in ("replayed", "replays", "penalty", "key")},
    )


def filled_arrays(questions: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The arrays of a memory that holds so many."""
    # What whole and mixed groups show: m of K and m of K-1.
    rows = rng.integers(SAMPLES - 1, SAMPLES + 1, questions)
    count = SAMPLES * rng.integers(1, rows) / rows
    return {
        "count": count,
        "asked": rng.integers(0, STEPS, questions),
        "times": rng.integers(1, 4, questions),
        "shown": count,
        "earlier": count,
        "retired": np.zeros(questions, np.uint8),
    }


def filled_columns(stored: int, rng: np.random.Generator) -> dict[str, Any]:
    """What so many stored answers have of their groups."""
    return {
        "advantage": rng.normal(size=stored),
        "successes": rng.integers(1, SAMPLES, stored),
        "answers": np.full(stored, SAMPLES),
    }


class Experience:
    """A filled replay: the default one, or that of another method."""

    def __init__(self, size: int, *, per_question: int = PER_QUESTION, **options) -> None:
        self.rng = np.random.default_rng(0)
        self.step = STEPS
        questions = size // per_question
        answers = np.arange(size)
        rewards = (answers[:, None] % 2.0 if options else np.ones((size, 1))).tolist()
        stored = graded(answers // per_question, rewards, self.rng, TOKENS, 0)
        stored.fill(**filled_columns(size, self.rng), **({"step": answers * STEPS // size} if options else {}))
        config = ExperienceConfig(**{"start_pass_rate": 0.0, "ratio": RATIO, **options})
        self.replay = Replay(MethodOptions(config, SAMPLES), questions, seed=1)
        self.memory = self.replay.memory
        self.memory.restore({**filled_arrays(questions, self.rng), **packed(stored)})

    def plan(self) -> object:
        self.step += 1
        return self.replay.plan(QUESTIONS_PER_STEP, self.step)

    def batch(self) -> StepBatch:
        """Return a step's graded groups: half of the answers are right, and none in every fourth group."""
        questions = self.rng.choice(len(self.memory.count), min(QUESTIONS_PER_STEP, len(self.memory.count)), False)
        kinds = [[1.0, 0.0] * (SAMPLES // 2)] * 3 + [[0.0] * SAMPLES]
        return graded(questions, [kinds[number % 4] for number in range(len(questions))], self.rng, TOKENS, self.step)


@pytest.fixture(scope="module")
def experiences():
    """Return a factory that keeps the latest size only, since a million trajectories take much memory."""
    made: dict[int, Experience] = {}

    def of_size(size: int) -> Experience:
        if size not in made:
            made.clear()
            gc.collect()
            made[size] = Experience(size)
        return made[size]

    return of_size


def timed(benchmark, experience: Experience, what: str, folder) -> Callable[[], object]:
    """Return the call to time, with a set-up if every round needs its own input."""
    if what == "plan":
        return lambda: benchmark.pedantic(experience.plan, rounds=ROUNDS, warmup_rounds=1)
    if what == "count":
        memory = experience.memory
        return lambda: benchmark.pedantic(lambda: (len(memory.table), memory.bucket_sizes()), rounds=ROUNDS)

    def take(batch: StepBatch) -> None:
        experience.memory.update(batch, STEPS, experience.memory.admitted(batch))

    if what == "update":
        return lambda: benchmark.pedantic(take, setup=lambda: ((experience.batch(),), {}), rounds=ROUNDS)
    return lambda: benchmark.pedantic(
        lambda: write_checked(folder, experience.memory.arrays()), setup=lambda: take(experience.batch()), rounds=5
    )


@pytest.mark.parametrize("what", ["plan", "update", "count", "save"])
@pytest.mark.parametrize("size", SIZES)
def test_experience(benchmark, groups, experiences, tmp_path, size, what):
    if benchmark.disabled:
        size = SIZES[0]
    benchmark.group = f"experience: {what}"
    row = f"{size:,} trajectories"
    benchmark.extra_info |= {"row": row, "trajectories": size}
    timed(benchmark, experiences(size), what, tmp_path)()
    report(groups, benchmark)


def report(groups, benchmark) -> None:
    if not benchmark.disabled:
        groups.rows.append({"group": benchmark.group, "median": benchmark.stats.stats.median, **benchmark.extra_info})


ALL = {"admit": "all", "expire": ()}
METHODS: dict[str, dict[str, Any]] = {
    "gaussian, mixed": {},
    "random, appended": {**ALL, "prioritise": "random", "compose": "appended", "replayed": 2},
    "advantage, beside": {**ALL, "prioritise": "advantage", "compose": "beside", "advantage": "stored"},
    "freshness, beside": {**ALL, "prioritise": "freshness", "compose": "beside", "advantage": "stored"},
    "random, buffer": {
        **ALL,
        "prioritise": "random",
        "compose": "buffer",
        "advantage": "stored",
        "capacity": SIZES[-1],
    },
    "newest, in place": {**ALL, "prioritise": "newest", "compose": "in_place", "admit": "with_advantage"},
    "middle, again": {**ALL, "prioritise": "middle", "compose": "again", "admit": "nothing"},
    "random, traced": {**ALL, "prioritise": "random", "compose": "traced", "admit": "nothing"},
    "oldest, stale": {**ALL, "prioritise": "oldest", "compose": "stale", "lag": 2, "max_uses": 1},
    "least used, rehearsal": {**ALL, "prioritise": "least_used", "compose": "rehearsal", "admit": "solutions"},
    "random, bapo": {**ALL, "prioritise": "random", "compose": "bapo", "admit": "in_band"},
}


@pytest.fixture(scope="module")
def filled_by():
    """Return a factory that keeps the latest method only, since a million trajectories take much memory."""
    made: dict[str, Experience] = {}

    def of_method(name: str, size: int) -> Experience:
        if name not in made:
            made.clear()
            gc.collect()
            made[name] = Experience(size, per_question=SAMPLES, **METHODS[name])
        return made[name]

    return of_method


@pytest.mark.parametrize("what", ["plan", "take in", "settle"])
@pytest.mark.parametrize("name", METHODS)
def test_method(benchmark, groups, filled_by, name, what):
    """Time a step of each method, with a million stored answers in groups of K."""
    size = SIZES[0] if benchmark.disabled else SIZES[-1]
    experience = filled_by(name, size)
    replay = experience.replay

    def asked():
        return (experience.batch(), experience.step), {}

    def graded():
        batch = experience.batch()
        replay.store(batch, experience.step)
        return (batch, np.arange(batch.groups), QUESTIONS_PER_STEP, experience.step), {}

    benchmark.group = f"experience: {what}, by method"
    benchmark.extra_info |= {"row": name, "trajectories": size}
    if what == "plan":
        benchmark.pedantic(experience.plan, rounds=ROUNDS, warmup_rounds=1)
    elif what == "take in":
        benchmark.pedantic(replay.store, setup=asked, rounds=ROUNDS)
    else:
        benchmark.pedantic(replay.settle, setup=graded, rounds=ROUNDS)
    report(groups, benchmark)


@pytest.mark.parametrize("tokens", [100, 1_000, 10_000])
def test_memory(benchmark, groups, tokens):
    """Report allocated bytes per token: 8 for its id and log-prob, and a trajectory's objects."""
    rng, count = np.random.default_rng(0), 1_000
    memory = Replay(MethodOptions(ExperienceConfig(), SAMPLES), count, seed=0).memory

    def fill() -> None:
        stored = graded(np.arange(count), np.ones((count, 1)).tolist(), rng, tokens, 0)
        memory.restore({**filled_arrays(count, rng), **packed(stored)})

    benchmark.group = "experience: memory"
    tracemalloc.start()
    try:
        benchmark.pedantic(fill)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    benchmark.extra_info |= {"row": f"{tokens:,} tokens a trajectory", "bytes_per_token": held / (count * tokens)}
    report(groups, benchmark)
