"""What is stored and what is forgotten, by each function `admit` and `expire`, against a plain model."""

import copy
import itertools
import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from exgrpo.train.config.objective import ObjectiveConfig
from exgrpo.train.config.replay import LIMITS
from exgrpo.train.replay import ExperienceConfig, ExperienceMemory, MethodOptions, table
from exgrpo.train.replay.memory import NEVER
from tests.train.batches import Row, make_batch, stored_rows

K = QUESTIONS = 4
COLUMNS = ("question", "step", "reward", "length", "key", "advantage", "accuracy", "replays")
NUMBERS = itertools.count(0, -1)
"""The log-probs of each answer, by which equal responses can be told apart."""


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """So that tables are tidied within a few rows, and in several pieces."""
    monkeypatch.setattr(table, "FEWEST", 4)
    monkeypatch.setattr(table, "PIECE", 3)


def group_of(
    question: int, answers: list[tuple[float, int]], step: int, *, mixed: bool = False
) -> tuple[int, list[Row]]:
    """A group of answers by reward and first token, the last one replayed; equal first tokens are equal responses."""
    rows = [
        Row(reward, (first,) * (1 + first % 3), next(NUMBERS), step=step, key=first % 3) for reward, first in answers
    ]
    return question, [*rows[:-1], replace(rows[-1], replayed=True)] if mixed else rows


@dataclass
class Model:
    """The rules, for one trajectory after the other."""

    options: dict
    success: float
    scale_by_std: bool
    rows: list[dict] = field(default_factory=list)
    retired: set[int] = field(default_factory=set)
    asked: dict[int, list[tuple[int, float]]] = field(default_factory=dict)

    def shown(self, rows: list[Row]) -> tuple[int, int]:
        """The successes among the rows that count, and how many count."""
        counted = [row for row in rows if self.options["count_replayed"] or not row.replayed]
        return sum(row.reward >= self.success for row in counted), len(counted)

    def admitted(self, rows: list[Row]) -> list[Row]:
        fresh = [row for row in rows if not row.replayed]
        right = [row for row in fresh if row.reward >= self.success]
        low, high = self.options.get("band", (0.25, 0.75))
        return {
            "all": fresh,
            "nothing": [],
            "successes": right,
            "solutions": right,
            "rare": right if len(right) == 1 else [],
            "with_advantage": fresh if len({row.reward for row in rows}) > 1 else [],
            "in_band": fresh if low <= len(right) / len(fresh) <= high else [],
        }[self.options["admit"]]

    def same(self, old: dict, question: int, new: Row) -> bool:
        if old["question"] != question or self.options["admit"] not in ("successes", "solutions", "rare"):
            return False
        by_key = self.options["admit"] == "solutions" and new.key != 0 and old["key"] == new.key
        return by_key or old["response"] == new.response

    def store(self, question: int, rows: list[Row]) -> None:
        rewards, (right, shown) = [row.reward for row in rows], self.shown(rows)
        mean = sum(rewards) / len(rewards)
        spread = np.std(rewards, ddof=1) + 1e-6 if self.scale_by_std else 1.0
        for row in self.admitted(rows):
            replays = sum(old["replays"] for old in self.rows if self.same(old, question, row))
            self.rows = [old for old in self.rows if not self.same(old, question, row)]
            known = {name: getattr(row, name) for name in ("response", "log_prob", "step", "reward", "key")}
            known |= {"question": question, "length": len(row.response), "accuracy": right / shown}
            self.rows.append({**known, "advantage": (row.reward - mean) / spread, "replays": replays})
        if most := self.options.get("max_per_question"):
            own = [row for row in self.rows if row["question"] == question]
            self.rows = [row for row in self.rows if row not in own[:-most]]

    def update(self, groups: list[tuple[int, list[Row]]], step: int, *, collect: bool) -> None:
        for question, rows in groups:
            right, shown = self.shown(rows)
            self.asked.setdefault(question, []).append((step, K * right / shown))
            if collect and question not in self.retired:
                self.store(question, rows)
        self.forget(groups, step)

    def forget(self, groups: list[tuple[int, list[Row]]], step: int) -> None:
        if "retirement" in self.options["expire"]:
            for question, rows in groups:
                right, shown = self.shown(rows)
                if right == shown:
                    self.retired.add(question)
            self.rows = [row for row in self.rows if row["question"] not in self.retired]
        if "above_band" in self.options["expire"]:
            most = K * self.options.get("band", (0.25, 0.75))[1]
            latest = {question: min(max(asked[-1][1], 1), K - 1) for question, asked in self.asked.items()}
            self.rows = [row for row in self.rows if latest[row["question"]] <= most]
        if age := self.options.get("max_age"):
            self.rows = [row for row in self.rows if step + 1 - row["step"] <= age]
        if uses := self.options.get("max_uses"):
            self.rows = [row for row in self.rows if row["replays"] < uses]
        if capacity := self.options.get("capacity"):
            self.rows = self.rows[-capacity:]


def check(memory: ExperienceMemory, model: Model, now: int) -> None:
    """That a memory holds what the model does, and says so."""
    stored = stored_rows(memory.table.stored())
    assert [tuple(one.response) for one in stored] == [row["response"] for row in model.rows]
    assert [one.log_prob[0] for one in stored] == [row["log_prob"] for row in model.rows]
    stored = memory.stored(now)
    for name in COLUMNS:
        np.testing.assert_allclose(getattr(stored, name), [row[name] for row in model.rows], rtol=1e-12, atol=1e-12)
    held = sorted({row["question"] for row in model.rows})
    latest = {question: asked[-1][1] for question, asked in model.asked.items()}
    counts = [min(max(latest[question], 1), K - 1) if question in held else 0 for question in range(QUESTIONS)]
    assert memory.count.tolist() == counts
    assert (len(memory), len(memory.table)) == (len(held), len(model.rows))
    sizes = np.bincount([math.floor(count + 0.5) for count in counts if count], minlength=K + 1)
    assert memory.bucket_sizes().tolist() == sizes.tolist()
    assert stored.count.tolist() == [counts[row["question"]] for row in model.rows]
    assert np.flatnonzero(memory.retired).tolist() == sorted(model.retired)
    buffered = memory.buffered(now)
    assert buffered.question.tolist() == held
    assert buffered.count.tolist() == [counts[question] for question in held]
    newest = {row["question"]: row for row in model.rows}
    for name in COLUMNS:
        np.testing.assert_allclose(getattr(buffered, name), [newest[question][name] for question in held], rtol=1e-12)
    prompts = memory.prompts(now)
    there = sorted(set(model.asked) - model.retired)
    assert prompts.question.tolist() == there
    assert prompts.count.tolist() == [latest[question] for question in there]
    assert prompts.step.tolist() == [model.asked[question][-1][0] for question in there]
    assert prompts.age.tolist() == [now - model.asked[question][-1][0] for question in there]
    assert prompts.replays.tolist() == [len(model.asked[question]) - 1 for question in there]
    before = [model.asked[q][-2][1] if len(model.asked.get(q, ())) > 1 else NEVER for q in range(QUESTIONS)]
    assert memory.earlier.tolist() == before


ANSWERS = st.lists(st.tuples(st.sampled_from([0.0, 0.25, 1.0]), st.integers(0, 6)), min_size=K, max_size=K)
ENTRY = st.tuples(st.integers(0, QUESTIONS - 1), ANSWERS, st.booleans())
STEP = st.lists(ENTRY, max_size=3, unique_by=lambda entry: entry[0])
MOST = {"max_age": 3, "max_uses": 2, "capacity": 9, "max_per_question": 3}
OPTIONS = st.fixed_dictionaries(
    {
        "admit": st.sampled_from(["all", "in_band", "nothing", "rare", "solutions", "successes", "with_advantage"]),
        "expire": st.sampled_from([(), ("retirement",), ("above_band",), ("retirement", "above_band")]),
        "count_replayed": st.booleans(),
    },
    optional={
        **{name: st.integers(1, most) for name, most in MOST.items()},
        "band": st.sampled_from([(0.25, 0.5), (0.0, 1.0), (0.75, 0.75)]),
    },
)


@given(
    st.lists(st.tuples(STEP, st.lists(st.floats(0, 1, exclude_max=True), max_size=3)), max_size=10),
    OPTIONS,
    st.sampled_from([0.25, 1.0]),
    st.booleans(),
    st.integers(0, 5),
)
def test_every_function_follows_its_rule_and_a_restored_memory_goes_on(history, options, success, scale_by_std, start):
    setting = MethodOptions(ExperienceConfig(**options), K, success, ObjectiveConfig(scale_by_std=scale_by_std))
    memory, model = ExperienceMemory(QUESTIONS, setting), Model(options, success, scale_by_std)
    for step, (entries, replayed) in enumerate(history, 1):
        places = [int(place * len(model.rows)) for place in replayed] if model.rows else []
        memory.table.replayed(memory.table.rows()[places])
        for place in places:
            model.rows[place]["replays"] += 1
        groups = [group_of(question, answers, step, mixed=mixed) for question, answers, mixed in entries]
        batch = make_batch(groups)
        memory.update(batch, step, memory.admitted(batch) & (step >= start))
        model.update(groups, step, collect=step >= start)
        check(memory, model, step + 1)
        restored = ExperienceMemory(QUESTIONS, setting)
        restored.restore(copy.deepcopy(memory.arrays()))
        check(restored, model, step + 1)
        for name, array in memory.arrays().items():
            found = restored.arrays()[name]
            assert (found.dtype, found.tolist()) == (array.dtype, array.tolist()), name
        if step % 2:
            memory = restored


def test_without_replay_nothing_is_forgotten_and_nobody_leaves():
    memory = ExperienceMemory(2, MethodOptions(ExperienceConfig(ratio=0.0, max_age=1), K))
    memory.update(make_batch([group_of(0, [(1.0, 1)] * K, 1)]), 1, np.zeros(K, bool))
    assert not memory.retired.any()


@pytest.mark.parametrize(("name", "limit"), LIMITS.items())
def test_a_limit_implies_its_function_which_needs_it(name, limit):
    assert ExperienceConfig(**{limit: 3}).forgets == ("retirement", name)
    assert ExperienceConfig(**{limit: 3}, expire=()).forgets == (name,)
    assert ExperienceConfig(**{limit: 3}, expire=(name, "retirement")).forgets == (name, "retirement")
    with pytest.raises(ValidationError, match=f"experience.expire {name} needs its limit, experience.{limit}"):
        ExperienceConfig(expire=(name,))
