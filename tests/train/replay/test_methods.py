"""Steps of every method of replay, watched from outside with a scripted engine and a recording policy."""

import copy
import dataclasses
import json
import math
from contextlib import nullcontext

import numpy as np
import pytest

from exgrpo.train.common.columns import columns_of
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.common.step_batch import ENGINE
from exgrpo.train.config.options import ExperienceConfig
from exgrpo.train.config.replay import KINDS
from exgrpo.train.replay import MethodOptions, PlannedGroup, Replay
from exgrpo.train.run import startup_checks
from tests.train.batches import Row, lists, make_batch, rows_of, sets
from tests.train.configs import configured
from tests.train.replay.test_memory import group
from tests.train.trainers import K, make, updated

QUESTIONS = 24
SKILL = {question: (0.0, 0.25, 0.5, 1.0)[question % 4] for question in range(QUESTIONS)}
SHARED = {"admit": "all", "expire": []}


def of(weigh=None, **experience):
    """Sections of a method."""
    return {"experience": experience, **({"objective": {"weigh": weigh}} if weigh else {})}


METHODS = {
    "mixed": of(replayed=2),
    "appended": of(**SHARED, replayed=2),
    "beside": of(**SHARED, prioritise="advantage", advantage="stored", max_age=3),
    "buffer": of(**SHARED, prioritise="random", advantage="stored", capacity=60, repeat=0.5, cooldown=1),
    "in_place": of("decoupled", expire=[], prioritise="newest", admit="with_advantage", max_uses=2),
    "traced": of(replayed=2),
    "stale": of("second_moment", **SHARED, lag=1),
    "rehearsal": of("likelihood", expire=[], prioritise="least_used", admit="solutions"),
    "bapo": of("clipped", expire=[], prioritise="random", admit="in_band"),
}


def method(compose: str, **sections):
    """A trainer with a method's functions."""
    values = copy.deepcopy(METHODS[compose])
    values["experience"] |= {"compose": compose, **sections.pop("experience", {})}
    return make(SKILL, **{**values, **sections})


def untimed(result) -> dict:
    return {name: value for name, value in result.metrics.items() if "second" not in name}


def same(a: dict, b: dict) -> bool:
    """Whether two steps have the same numbers, to the bit."""
    return list(a) == list(b) and all(a[name] == b[name] or (math.isnan(a[name]) and math.isnan(b[name])) for name in a)


def test_every_way_to_make_a_batch_is_among_them():
    assert sorted(METHODS) == KINDS["compose"].names


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("compose", METHODS)
def test_a_restored_trainer_goes_on_to_the_bit(compose, minibatches):
    cut = {"top_p": 0.9} if minibatches == 1 else {}
    sections = {"optimizer": {"minibatches": minibatches}, "rollout": {"samples": K, "max_tokens": 8, **cut}}
    trainer, other = (method(compose, **sections) for _ in range(2))
    found = [trainer.step(step) for step in (1, 2)]
    state = trainer.state()
    values = json.loads(json.dumps(state.values))
    other.restore(dataclasses.replace(copy.deepcopy(state), values=values))
    other.policy.version = trainer.policy.version
    trainer.policy.updates.clear()
    for step in (3, 4, 5):
        expected, again = trainer.step(step), other.step(step)
        assert same(untimed(expected), untimed(again))
        # The buffer numbers its answers anew.
        for name in (*(columns_of("row", "token").keys() - {"number"}), "question", "group", "trained"):
            ours, theirs = (getattr(one.batch, name, None) for one in (expected, again))
            if name == "allowed_tokens":
                assert lists(ours) == lists(theirs) == (sets(expected.batch.token) if cut else None)
            else:
                np.testing.assert_array_equal(ours, theirs)
        for ours, theirs in zip(trainer.policy.updates, other.policy.updates, strict=True):
            np.testing.assert_array_equal(ours[0].rows, theirs[0].rows)
        found.append(expected)
    assert sum(one.metrics["replayed"] for one in found[2:]) > 0


SINGLE = ("beside", "buffer")
"""Single answers have no group; what is rehearsed has no advantage."""


@pytest.mark.parametrize(
    ("compose", "advantage"),
    [(one, "stored") for one in METHODS if one != "rehearsal"]
    + [(one, "group") for one in METHODS if one not in (*SINGLE, "rehearsal")],
)
def test_the_advantage_of_a_replayed_answer_is_that_of_its_group_now_or_then(compose, advantage):
    trainer = method(compose, experience={"advantage": advantage})
    written: dict = {}
    for step in range(1, 6):
        batch = trainer.step(step).batch
        rows = rows_of(batch)
        for number in batch.trained:
            of_group = [rows[row] for row in batch.rows_of([number])]
            stored = advantage == "stored" and any(row.replayed for row in of_group)
            counted = [row.reward for row in of_group if not (stored and row.replayed)]
            for row in of_group:
                if row.replayed and row.step < step and stored:
                    expected = written[row.question, row.step, row.token.tobytes()]
                elif row.replayed and stored:  # of this step, and drawn at once
                    continue
                else:
                    expected = row.reward - np.mean(counted)
                assert row.replayed or row.step == step
                assert row.advantage == pytest.approx(expected, abs=1e-6)
        table = trainer.replay.memory.table
        successes, answers = table.column("successes"), table.column("answers")
        assert ((successes >= 0) & (successes <= answers) & (answers <= K)).all()
        written = {(one.question, one.step, one.token.tobytes()): one.advantage for one in rows_of(table.stored())}


@pytest.mark.parametrize("compose", SINGLE)
def test_single_answers_need_stored_advantages(compose):
    config = configured({"experience": {"compose": compose}})
    with pytest.raises(ConfigError, match=f"{compose} trains on single stored answers.*needs experience.advantage=sto"):
        startup_checks.check_method(config)
    startup_checks.check_method(configured({"experience": {"compose": compose, "advantage": "stored"}}))


@pytest.mark.parametrize("compose", METHODS)
def test_only_one_of_refills_and_stored_groups_fills_the_places_of_groups_without_a_gradient(compose):
    values = {"experience": {"compose": compose, "advantage": "stored"}, "rollout": {"refills": 1}}
    if compose not in ("bapo", "in_place", "buffer", "stale"):
        startup_checks.check_method(configured(values))
        return
    with pytest.raises(ConfigError, match=f"experience.compose {compose} puts stored groups there: leave one of them"):
        startup_checks.check_method(configured(values))


@pytest.mark.parametrize("compose", METHODS)
def test_answers_that_are_generated_ahead_meet_the_same_plans(compose):
    """Only plans and answers: stored answers have other log-probs where the policy is a step behind."""
    ahead = {"behaviour": "engine", "ahead": True, "servers": ["http://unused:8000"]}
    alone = method(compose, rollout={"behaviour": "engine"}, steps=5)
    early_bird = method(compose, rollout=ahead, steps=5)
    for step in range(1, 6):
        expected, found = alone.step(step), early_bird.step(step)
        np.testing.assert_array_equal(found.batch.question, expected.batch.question)
        assert found.metrics["replayed"] == expected.metrics["replayed"]


@pytest.mark.parametrize("refills", [0, 1, 10])
def test_refills_ask_until_every_group_of_the_batch_has_a_gradient(refills):
    """Dynamic sampling: half of the questions are all right or all wrong."""
    trainer = make(SKILL, rollout={"refills": refills}, experience={"ratio": 0.0}, optimizer={"minibatches": 1})
    result = trainer.step(1)
    calls = trainer.rollout_worker.engine.calls
    assert len(calls) <= 1 + refills
    asked = [question for call in calls for question in call]
    assert result.batch.question.tolist() == asked
    assert len(asked) == len(set(asked)) == result.metrics["groups"]
    with_signal = [question for question in asked if 0 < SKILL[question] < 1]
    assert len(calls[0]) == 6
    for number, call in enumerate(calls[1:], 1):
        before = [question for earlier in calls[:number] for question in earlier]
        assert len(call) == 6 - sum(0 < SKILL[question] < 1 for question in before), "as many as are missing"
    assert (len(with_signal) >= 6) == (refills == 10)
    trained = {row.question for row in updated(trainer)}
    assert trained == set(with_signal[:6] if refills else asked)
    if refills == 10:
        assert result.metrics["idle_group_fraction"] == 0
    np.testing.assert_array_equal(np.flatnonzero(trainer.replay.memory.times), np.sort(asked))
    assert result.metrics["generated_tokens"] == result.batch.length.sum()


def test_all_that_was_asked_is_taken_in_even_what_is_not_trained_on():
    trainer = make(SKILL, rollout={"refills": 10}, experience={"admit": "all", "expire": []})
    result = trainer.step(1)
    assert set(trainer.replay.memory.table.column("question").tolist()) == set(result.batch.question)
    assert result.metrics["buffer_trajectories"] == K * len(result.batch.question) > 6 * K


@pytest.mark.parametrize("skill", [0.0, 1.0])
def test_refills_end_with_the_questions_and_groups_without_a_gradient_stay_if_there_are_no_others(skill):
    trainer = make(dict.fromkeys(range(10), skill), rollout={"refills": 10}, experience={"ratio": 0.0})
    result = trainer.step(1)
    assert [len(call) for call in trainer.rollout_worker.engine.calls] == [6, 4]
    assert len(result.batch.question) == 10
    assert result.metrics["idle_group_fraction"] == 1
    assert trainer.policy.updates == []


def test_replayed_groups_are_filled_up_beside_refills():
    trainer = make(SKILL, rollout={"refills": 10}, experience={"expire": []})
    for step in range(1, 4):
        result = trainer.step(step)
    assert result.metrics["replayed"] == 3
    assert len(set(result.batch.group[result.batch.replayed])) == 3
    assert len({row.question for row in updated(trainer)}) >= 6


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"surrogate": "coupled"}, "surrogate coupled compares the answers of a group, and experience.compose buffer"),
        ({"surrogate": "topr", "anchor": "start"}, "anchor start is for regressions, and objective.surrogate is topr"),
        ({"surrogate": "oapl", "anchor": "start"}, None),
        ({"surrogate": "oapl", "anchor": "start", "kl_coef": 0.1}, "take kl_corrected false, or leave kl_coef out"),
        ({"surrogate": "oapl", "anchor": "start", "kl_coef": 0.1, "kl_corrected": False}, None),
    ],
)
def test_a_surrogate_that_does_not_go_with_the_other_options_is_named(objective, message):
    config = configured({"objective": objective, "experience": {"compose": "buffer", "advantage": "stored"}})
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        startup_checks.check_surrogate(config)


def test_what_is_replayed_is_as_it_was_stored():
    options = ExperienceConfig(start_pass_rate=0.0, trajectory="random", advantage="stored")
    replay = Replay(MethodOptions(options, 2), 3, seed=0)
    more = {"response_mask": (True, False, True), "key": 8, "step": 4, "penalty": 0.25, "old_log_probs_from": ENGINE}
    row = Row(1.0, (5, 6, 7), (-0.1, 0.0, -0.3), **more)
    replay.store(make_batch([(2, [row, Row(0.0)])]), 4)
    for times in (1, 2):
        selected = replay.select([PlannedGroup(1, 2), PlannedGroup(2, 1, 1)], lambda _: pytest.fail("no rule asks"))
        assert (selected.question.tolist(), selected.group.tolist()) == ([1, 2], [1])
        assert selected.token.tolist() == [5, 6, 7]
        assert selected.response_mask.tolist() == [True, False, True]
        np.testing.assert_array_equal(selected.old_log_prob, np.array([-0.1, 0.0, -0.3], np.float32))
        names = ("reward", "penalty", "key", "step", "old_log_probs_from", "finished", "replays", "stored_advantage")
        assert [getattr(selected, name).item() for name in names] == [1.0, 0.25, 8, 4, ENGINE, True, times, 0.375]


def test_the_groups_that_are_settled_on_are_numbers_of_the_whole_batch():
    """Some groups may be trained on; stored answers come behind all of them."""
    options = ExperienceConfig(start_pass_rate=0.0, compose="in_place", admit="all", expire=(), ratio=1.0)
    replay = Replay(MethodOptions(options, 2), 9, seed=0)
    replay.store(make_batch([group(8, [1.0, 0.0], step=1)]), 1)
    batch = make_batch([group(q, [1.0, q % 2], step=2) for q in range(5)])
    replay.store(batch, 2)
    settled = replay.settle(batch, 5, 2, among=np.array([1, 4, 3, 2]))
    assert settled.question.tolist() == [0, 1, 2, 3, 4, 8]
    assert settled.trained.tolist() == [4, 2, 3, 5]
    assert settled.token[: len(batch.token)].tolist() == batch.token.tolist()


@pytest.mark.parametrize(("multiple", "expected"), [(1, 2), (3, 3), (5, 5), (7, 0)])
def test_refills_ask_as_many_questions_as_groups_lack_a_gradient(multiple, expected):
    """Up to a multiple, and down where only 5 questions are left."""
    replay = Replay(MethodOptions(ExperienceConfig(), 2), 9, seed=0)
    batch = make_batch([group(q, [1.0, q % 2], step=1) for q in range(4)])
    more = replay.refill(batch, 4, 1, multiple)
    assert len({one.question for one in more} - set(range(4))) == len(more) == expected
    assert replay.refill(batch, 2, 1) == []
    for refilled, trained in ((True, [0, 2]), (False, [0, 1, 2, 3])):
        assert replay.settle(batch, 4, 1, refilled=refilled).trained.tolist() == trained
