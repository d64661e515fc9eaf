"""What experience costs a step: planning, taking in a step's groups, counting and saving, by size of the buffer."""

import gc
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from exgrpo.train.checkpoint.store import ExperienceStore
from exgrpo.train.experience import ExperienceMemory, FreshQuestions, plan_questions, question_law
from exgrpo.train.records import Group, Trajectory

SIZES = (1_000, 10_000, 100_000, 1_000_000)
PER_QUESTION = 4
TOKENS = 32
"""Short responses: what is timed does not read them, and a million of the paper's length would take 8 GB and more."""
SAMPLES, QUESTIONS_PER_STEP, RATIO = 8, 128, 0.5
ROUNDS = 20


def trajectory(question: int, rng: np.random.Generator, reward: float = 1.0, tokens: int = TOKENS) -> Trajectory:
    """A trajectory with arrays of its own."""
    response, log_prob = rng.integers(0, 1 << 17, tokens, dtype=np.int32), rng.random(tokens, dtype=np.float32)
    return Trajectory(question, response, log_prob, True, reward, 0)


class Experience:
    """A filled memory and what plans with it."""

    def __init__(self, size: int) -> None:
        self.rng = np.random.default_rng(0)
        questions = size // PER_QUESTION
        # What whole and mixed groups show: m of K and m of K-1.
        rows = self.rng.integers(SAMPLES - 1, SAMPLES + 1, questions)
        count = SAMPLES * self.rng.integers(1, rows) / rows
        self.memory = ExperienceMemory(questions, SAMPLES)
        stored = [trajectory(i // PER_QUESTION, self.rng) for i in range(size)]
        self.memory.restore(count, np.zeros(questions, bool), stored, np.zeros(size, np.int64))
        self.law = question_law("gaussian", SAMPLES)
        self.pool = FreshQuestions(questions, np.random.default_rng(1))

    def plan(self) -> object:
        """The questions of a step."""
        options = {"batch": QUESTIONS_PER_STEP, "ratio": RATIO, "law": self.law}
        return plan_questions(self.memory, self.pool, self.rng, **options)

    def groups(self) -> list[Group]:
        """A step's graded groups, half of the answers right."""
        questions = self.rng.choice(len(self.memory.count), min(QUESTIONS_PER_STEP, len(self.memory.count)), False)
        rewards = [1.0, 0.0] * (SAMPLES // 2)
        return [Group(int(q), tuple(trajectory(int(q), self.rng, reward) for reward in rewards)) for q in questions]


@pytest.fixture(scope="module")
def experiences():
    """The memory of the latest size; a million trajectories are not kept beside the others."""
    made: dict[int, Experience] = {}

    def of_size(size: int) -> Experience:
        if size not in made:
            made.clear()
            gc.collect()
            made[size] = Experience(size)
        return made[size]

    return of_size


def timed(benchmark, experience: Experience, what: str, folder) -> Callable[[], object]:
    """The call to time and, where every round needs its own input, what makes that."""
    if what == "plan":
        return lambda: benchmark.pedantic(experience.plan, rounds=ROUNDS, warmup_rounds=1)
    if what == "count":
        memory = experience.memory
        return lambda: benchmark.pedantic(lambda: (memory.trajectory_count, memory.bucket_sizes()), rounds=ROUNDS)

    def take(groups: list[Group]) -> None:
        experience.memory.update(groups, 0, collect=True)

    if what == "update":
        return lambda: benchmark.pedantic(take, setup=lambda: ((experience.groups(),), {}), rounds=ROUNDS)
    store = ExperienceStore(folder)
    store.save(experience.memory.all_trajectories())

    def save() -> None:
        store.save(experience.memory.all_trajectories())

    return lambda: benchmark.pedantic(save, setup=lambda: take(experience.groups()), rounds=5)


@pytest.mark.parametrize("what", ["plan", "update", "count", "save a step's"])
@pytest.mark.parametrize("size", SIZES)
def test_experience(benchmark, races, experiences, tmp_path, size, what):
    if benchmark.disabled:
        size = SIZES[0]
    benchmark.group = f"experience: {what}"
    row = f"{size:,} trajectories"
    benchmark.extra_info |= {"row": row, "trajectories": size}
    timed(benchmark, experiences(size), what, tmp_path)()
    report(races, benchmark)


def report(races, benchmark) -> None:
    """Put a row into the tables at the end."""
    if not benchmark.disabled:
        races.rows.append({"group": benchmark.group, "median": benchmark.stats.stats.median, **benchmark.extra_info})


@pytest.mark.parametrize("tokens", [100, 1_000, 10_000])
def test_memory(benchmark, races, tokens):
    """Bytes per token by what is allocated: 8 for its id and log-prob, and a trajectory's objects."""
    rng, count = np.random.default_rng(0), 1_000
    memory = ExperienceMemory(count, SAMPLES)

    def fill() -> None:
        stored = [trajectory(question, rng, tokens=tokens) for question in range(count)]
        memory.restore(np.ones(count), np.zeros(count, bool), stored, np.zeros(count, np.int64))

    benchmark.group = "experience: memory"
    tracemalloc.start()
    try:
        benchmark.pedantic(fill)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    benchmark.extra_info |= {"row": f"{tokens:,} tokens a trajectory", "bytes_per_token": held / (count * tokens)}
    report(races, benchmark)
