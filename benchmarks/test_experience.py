"""Cost of the experience per step with a million stored answers, by method; `benchmarks.scale` has other sizes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from exgrpo.train.common.step_batch import TRAINER, Ints, StepBatch
from exgrpo.train.replay import ExperienceConfig, MethodOptions, Replay
from exgrpo.train.replay.table import packed

SIZE = 1_000_000
TOKENS = 32
"""Short responses: the timed code does not read them, and a million of the paper's length would take over 8 GB."""
SAMPLES, QUESTIONS_PER_STEP = 8, 128
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
    """Return the arrays of a memory of this many questions."""
    # Success counts of whole and mixed groups: m of K and m of K-1.
    rows = rng.integers(SAMPLES - 1, SAMPLES + 1, questions)
    counts = dict.fromkeys(("count", "shown", "earlier"), SAMPLES * rng.integers(1, rows) / rows)
    asked, times = rng.integers(0, STEPS, questions), rng.integers(1, 4, questions)
    return {**counts, "asked": asked, "times": times, "retired": np.zeros(questions, np.uint8)}


def filled_columns(stored: int, rng: np.random.Generator) -> dict[str, Any]:
    """Return the columns of this many stored answers that describe their groups."""
    successes = rng.integers(1, SAMPLES, stored)
    return {"advantage": rng.normal(size=stored), "successes": successes, "answers": np.full(stored, SAMPLES)}


class Experience:
    """A replay filled with stored answers, in groups of K."""

    def __init__(self, method: str) -> None:
        self.name = method
        self.rng = np.random.default_rng(0)
        self.step = STEPS
        questions, answers = SIZE // SAMPLES, np.arange(SIZE)
        stored = graded(answers // SAMPLES, (answers[:, None] % 2.0).tolist(), self.rng, TOKENS, 0)
        stored.fill(**filled_columns(SIZE, self.rng), step=answers * STEPS // SIZE)
        config = ExperienceConfig(**{"start_pass_rate": 0.0, "ratio": 0.5, **METHODS[method]})
        self.replay = Replay(MethodOptions(config, SAMPLES), questions, seed=1)
        self.memory = self.replay.memory
        self.memory.restore({**filled_arrays(questions, self.rng), **packed(stored)})

    def plan(self) -> object:
        self.step += 1
        return self.replay.plan(QUESTIONS_PER_STEP, self.step)

    def store(self, batch: StepBatch) -> StepBatch:
        self.replay.store(batch, self.step)
        return batch

    def settle(self, batch: StepBatch) -> StepBatch:
        return self.replay.settle(batch, QUESTIONS_PER_STEP, self.step)

    def batch(self) -> StepBatch:
        """Return a step's graded groups: half of the answers are right, and none in every fourth group."""
        questions = self.rng.choice(len(self.memory.count), min(QUESTIONS_PER_STEP, len(self.memory.count)), False)
        kinds = [[1.0, 0.0] * (SAMPLES // 2)] * 3 + [[0.0] * SAMPLES]
        return graded(questions, [kinds[number % 4] for number in range(len(questions))], self.rng, TOKENS, self.step)


ALL = {"admit": "all", "expire": ()}
METHODS: dict[str, dict[str, Any]] = {
    "gaussian, mixed": {},
    "random, appended": {**ALL, "prioritise": "random", "compose": "appended", "replayed": 2},
    "advantage, beside": {**ALL, "prioritise": "advantage", "compose": "beside", "advantage": "stored"},
    "freshness, beside": {**ALL, "prioritise": "freshness", "compose": "beside", "advantage": "stored"},
    "random, buffer": {**ALL, "prioritise": "random", "compose": "buffer", "advantage": "stored", "capacity": SIZE},
    "newest, in place": {**ALL, "prioritise": "newest", "compose": "in_place", "admit": "with_advantage"},
    "middle, repeat": {**ALL, "prioritise": "middle", "ratio": 0, "repeat": 0.5},
    "random, traced": {**ALL, "prioritise": "random", "compose": "traced", "admit": "nothing"},
    "oldest, stale": {**ALL, "prioritise": "oldest", "compose": "stale", "lag": 2, "max_uses": 1},
    "least used, rehearsal": {**ALL, "prioritise": "least_used", "compose": "rehearsal", "admit": "solutions"},
    "random, bapo": {**ALL, "prioritise": "random", "compose": "bapo", "admit": "in_band"},
}


@pytest.fixture(scope="module", params=METHODS)
def experience(request: pytest.FixtureRequest) -> Experience:
    return Experience(request.param)


@pytest.mark.parametrize("what", ["plan", "take in", "settle"])
def test_method(benchmark, groups, experience, what):
    """Time a step of each method, with a million stored answers in groups of K."""
    benchmark.group = f"experience: {what}, by method"
    benchmark.extra_info |= {"row": experience.name, "trajectories": SIZE}
    if what == "plan":
        benchmark.pedantic(experience.plan, rounds=ROUNDS, warmup_rounds=1)
    elif what == "take in":
        benchmark.pedantic(experience.store, setup=lambda: ([experience.batch()], {}), rounds=ROUNDS)
    else:
        benchmark.pedantic(experience.settle, setup=lambda: ([experience.store(experience.batch())], {}), rounds=ROUNDS)
    groups.rows.append({"group": benchmark.group, "median": benchmark.stats.stats.median, **benchmark.extra_info})
