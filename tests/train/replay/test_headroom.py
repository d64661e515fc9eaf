"""Drift and headroom of stored answers against a plain model, through whole steps; and the draw by them."""

import copy
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.tools.experience.export import export
from exgrpo.train.config.replay import ExperienceConfig
from exgrpo.train.replay import Candidates, MethodOptions, draw, rules, table
from exgrpo.train.run.traces import read_traces
from tests.tools.experience.runs import make_run, some
from tests.tools.experience.test_start import begin, trace, write
from tests.train.batches import rows_of, stored_rows
from tests.train.trainers import make

SKILL = {question: (0.25, 0.5, 0.75)[question % 3] for question in range(24)}
ALL = {"admit": "all", "expire": [], "prioritise": "headroom"}
BESIDE = {**ALL, "compose": "beside", "advantage": "stored", "prioritise": "headroom", "drift": 0.1, "ratio": 1.0}
AHEAD = {"behaviour": "engine", "ahead": True, "servers": ["http://unused:8000"]}
METHODS = {
    "updates": {"experience": {**BESIDE, "max_age": 2}},
    "a pass": {"experience": {**BESIDE, "max_age": 2}, "objective": {"weigh": "second_moment"}},
    "cut": {"experience": {**BESIDE, "max_age": 2}, "rollout": {"top_p": 0.9}},
    "candidates": {"experience": ALL},
    "candidates at another temperature": {"experience": ALL, "rollout": {"temperature": 0.5}},
    "candidates of cut answers": {"experience": ALL, "rollout": {"top_p": 0.9}},
    "ahead": {"experience": {**ALL, "max_age": 2}, "rollout": AHEAD},
}
"""Where stored answers are scored; with ages, rows move between the choice of an answer and its update."""


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(table, "FEWEST", 4)


def trainer_of(name: str):
    sections = copy.deepcopy(METHODS[name])
    rollout = {"samples": 4, "max_tokens": 8, **sections.pop("rollout", {})}
    return make(SKILL, rollout=rollout, optimizer={"minibatches": 2, "passes": 2}, **sections)


def key_of(row) -> tuple:
    return int(row.question), int(row.step), tuple(row.token.tolist())


class Watch:
    """What has been scored last of each replayed answer, at the temperature and over the tokens of its writing."""

    def __init__(self, trainer) -> None:
        self.latest: dict[tuple, int] = {}
        self.policy, self.rollout = trainer.policy, trainer.config.rollout
        self.score, self.update = self.policy.score, self.policy.update
        self.policy.score, self.policy.update = self._score, self._update

    def _note(self, batch) -> None:
        self.latest |= {key_of(row): self.policy.version for row in rows_of(batch) if row.replayed}

    def _score(self, batch, temperature):
        if temperature == self.rollout.temperature and batch.has("allowed_tokens") == (self.rollout.top_p < 1):
            self._note(batch)
        return self.score(batch, temperature)

    def _update(self, minibatch, **options):
        self._note(minibatch.batch)
        return self.update(minibatch, **options)


def log_probs(tokens, version: int, temperature: float) -> list[float]:
    """As `fake_score`, rounded to fp32 as it does."""
    ids = np.array(tokens, np.float32)
    return [float(one) for one in -(ids % 11 + 1 + version) / 10 / temperature]


def expected(old, now, advantage) -> tuple[float, float]:
    drift = math.fsum((b - a) ** 2 for a, b in zip(old, now, strict=True)) / len(old)
    likely = math.fsum(math.exp(one) for one in now) / len(old)
    return drift, 1 - likely if advantage > 0 else likely if advantage < 0 else 0.0


@pytest.mark.parametrize("name", METHODS)
def test_they_follow_a_plain_model_after_writing_and_after_each_score(name):
    trainer = trainer_of(name)
    watch, renewed = Watch(trainer), 0
    for step in range(1, 8):
        trainer.step(step)
        rows = rows_of(trainer.replay.memory.table.stored())
        twice = Counter(map(key_of, rows))
        for row in rows:
            if twice[key_of(row)] > 1:  # two equal answers of one step cannot be told apart here
                continue
            old, version = row.old_log_prob.astype(float).tolist(), watch.latest.get(key_of(row))
            now = old if version is None else log_probs(row.token, version, watch.rollout.temperature)
            # Of at most eight tokens, in fp64.
            np.testing.assert_allclose((row.drift, row.headroom), expected(old, now, row.advantage), rtol=1e-12)
            renewed += row.drift > 0
    assert renewed > 10
    assert len({round(row.headroom, 6) for row in rows}) > 10


def test_a_restored_trainer_draws_and_scores_to_the_bit():
    trainer, other = trainer_of("updates"), trainer_of("updates")
    for step in (1, 2, 3):
        trainer.step(step)
    assert (trainer.replay.memory.table.column("drift") > 0).any()
    other.restore(copy.deepcopy(trainer.state()))
    other.policy.version = trainer.policy.version
    for step in (4, 5, 6):
        batches = [one.step(step).batch for one in (trainer, other)]
        np.testing.assert_array_equal(batches[0].token, batches[1].token)
        for name in ("drift", "headroom", "replays"):
            ours, theirs = (one.replay.memory.table.column(name) for one in (trainer, other))
            np.testing.assert_array_equal(ours, theirs)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.sampled_from([0.0, 1e-4, 1e-3, 2e-3, math.inf, math.nan])), min_size=1),
    st.integers(0, 5),
    st.data(),
)
def test_the_highest_headroom_comes_first_and_what_has_drifted_only_if_nothing_else_is_left(rows, seed, data):
    headroom, drift = map(np.array, zip(*rows, strict=True))
    given_rows = Candidates.of(9, question=np.arange(len(rows)), headroom=headroom, drift=drift)
    priority = rules.find("prioritise", "headroom")(given_rows, MethodOptions(ExperienceConfig(), 4))
    wanted = data.draw(st.integers(1, len(rows)))
    drawn = draw(np.random.default_rng(seed), len(rows), wanted, priority)
    assert len(set(drawn.tolist())) == wanted
    near = sorted((h for h, d in rows if d <= 1e-3), reverse=True)
    assert headroom[drawn][: len(near)].tolist() == near[:wanted]
    assert all(drift[drawn][: len(near)] <= 1e-3)


def test_a_step_replays_what_has_drifted_only_if_nothing_else_is_left():
    trainer = make(SKILL, experience={**BESIDE, "ratio": 0.25, "drift": 0.015}, optimizer={"minibatches": 1})
    for step in range(1, 6):
        before = rows_of(trainer.replay.memory.table.stored())
        batch = trainer.step(step).batch
        drawn = [row for row in rows_of(batch) if row.replayed]
        near = sorted((row.headroom for row in before if row.drift <= 0.015), reverse=True)
        assert len(near) >= len(drawn) == (6 if step > 1 else 0)
        assert [row.headroom for row in drawn] == near[: len(drawn)]
    assert any(row.drift > 0.015 and row.headroom > drawn[-1].headroom for row in before)


def test_exports_have_both(tmp_path):
    count = len(some())
    further = {"drift": np.arange(count) / 8, "headroom": 1 - np.arange(count) / 16}
    export(make_run(tmp_path / "run", some(), further=further), tmp_path / "set")
    found = list(read_traces(tmp_path / "set"))
    assert {name: [one.more[name] for one in found] for name in further} == {n: v.tolist() for n, v in further.items()}


def test_what_a_run_starts_with_has_that_of_its_log_probs_whatever_the_file_says(tmp_path):
    source = write(tmp_path / "mine.jsonl", trace(0, "1 7 3", drift=0.5, headroom=0.5), trace(1, "1 7 4", reward=0.0))
    trainer, _ = begin(source)
    memory = trainer.replay.memory.table
    stored, advantage = stored_rows(memory.stored()), memory.column("advantage")
    assert advantage[0] > 0 > advantage[1]
    old = [one.log_prob.astype(float).tolist() for one in stored]
    model = [expected(one, one, a) for one, a in zip(old, advantage.tolist(), strict=True)]
    np.testing.assert_allclose(list(zip(memory.column("drift"), memory.column("headroom"), strict=True)), model)
