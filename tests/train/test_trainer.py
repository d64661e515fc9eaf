"""The loop, watched from outside with a scripted engine and a recording policy."""

import dataclasses
import json

import numpy as np
import pytest

from exgrpo.train.common.step_batch import ENGINE, TRAINER
from tests.train.batches import lists, rows_of, sets, trajectories
from tests.train.fakes import ScriptedGrader, engine_log_prob, fake_score, marked
from tests.train.trainers import K, half, make, updated


def test_replayed_groups_get_one_fresh_answer_less_and_no_question_comes_twice():
    trainer = make(half(20))
    first, second = trainer.step(1), trainer.step(2)
    calls = trainer.rollout_worker.engine.calls
    assert sorted(calls[0].values()) == [K] * 6
    assert sorted(calls[1].values()) == [K - 1] * 3 + [K] * 3
    assert first.metrics["replayed"] == 0
    assert second.metrics["replayed"] == 3
    assert len(set(second.batch.question)) == 6
    replayed = {row.question for row in rows_of(second.batch) if row.replayed}
    assert replayed <= set(first.batch.question)


@pytest.mark.parametrize("correct", [True, False])
def test_ratios_are_at_the_rollout_temperature_and_the_selection_at_1(correct):
    weigh = "shaped" if correct else "uncorrected"
    trainer = make(half(20), rollout={"temperature": 0.5}, objective={"weigh": weigh})
    trainer.step(1)
    for stored in (t for q in range(20) for t in trajectories(trainer.replay.memory, q)):
        np.testing.assert_array_equal(stored.log_prob, fake_score(stored.response, 0, 0.5).log_prob)
    candidates = {q: trajectories(trainer.replay.memory, q) for q in range(20)}
    version = trainer.policy.version
    trainer.policy.updates.clear()
    replayed = [row for row in rows_of(trainer.step(2).batch) if row.replayed]
    assert len(replayed) == 3
    for chosen in replayed:
        entropies = [fake_score(c.response, version).entropy.mean() for c in candidates[chosen.question]]
        best = candidates[chosen.question][int(np.argmin(entropies))]
        np.testing.assert_array_equal(chosen.token, best.response)
    for number, (minibatch, _) in enumerate(trainer.policy.updates):
        for row in rows_of(minibatch.batch):
            written = 0 if row.replayed and correct else version
            expected = fake_score(row.token, written, 0.5).log_prob
            told = number == 0 and not row.replayed  # by this optimiser step itself
            np.testing.assert_array_equal(row.ratio_log_prob, np.full_like(expected, np.inf) if told else expected)


@pytest.mark.parametrize("behaviour", ["trainer", "engine"])
def test_allowed_tokens_go_with_the_answer_to_every_score_but_that_of_the_selection(behaviour):
    trainer = make(half(20), rollout={"top_p": 0.9, "temperature": 0.5, "behaviour": behaviour})
    trainer.step(1)
    stored = [t for q in range(20) for t in trajectories(trainer.replay.memory, q)]
    assert stored
    assert all(t.allowed_tokens == sets(t.response) for t in stored)
    trainer.policy.updates.clear()
    trainer.policy.scored.clear()
    trainer.step(2)
    rows = updated(trainer)
    assert sum(row.replayed for row in rows) == 3
    assert all(lists(row.allowed_tokens) == sets(row.token) for row in rows)
    scored = [(batch.has("allowed_tokens"), temperature) for batch, temperature in trainer.policy.scored]
    assert set(scored) == {(False, 1.0), (True, 0.5)}
    assert sum(not kept for kept, _ in scored) == 1


def test_with_the_engines_log_probs_fresh_rows_are_weighed_and_replayed_ones_refer_to_them():
    cap = 1.05
    trainer = make(half(20), rollout={"behaviour": "engine", "correction_bounds": (0, cap)})
    trainer.step(1)
    stored = [t for q in range(20) for t in trajectories(trainer.replay.memory, q)]
    assert stored
    for trajectory in stored:
        assert trajectory.old_log_probs_from == ENGINE
        np.testing.assert_array_equal(trajectory.log_prob, engine_log_prob(trajectory.response))
    version = trainer.policy.version
    trainer.policy.updates.clear()
    metrics = trainer.step(2).metrics
    rows = updated(trainer)
    assert sum(row.replayed for row in rows) == 3
    weights = []
    for row in rows:
        own, engine = fake_score(row.token, version).log_prob, engine_log_prob(row.token)
        np.testing.assert_array_equal(row.ratio_log_prob, engine if row.replayed else own)
        if not row.replayed:
            np.testing.assert_allclose(row.factor, np.minimum(np.exp(own - engine), cap), rtol=1e-6)
            weights += row.factor.tolist()
        else:
            assert (row.factor == 1).all()
    assert max(weights) == pytest.approx(cap)
    assert min(weights) < 1
    assert 0 < metrics["correction/outside_tokens"] < 1


def test_by_default_the_trainers_log_probs_are_stored_whatever_the_engine_says():
    trainer = make(half(20), free_log_prob=True)
    metrics = trainer.step(1).metrics
    for trajectory in (t for q in range(20) for t in trajectories(trainer.replay.memory, q)):
        assert trajectory.old_log_probs_from == TRAINER
        np.testing.assert_array_equal(trajectory.log_prob, fake_score(trajectory.response, 0).log_prob)
    assert not any(minibatch.batch.has("factor") for minibatch, _ in trainer.policy.updates)
    assert 0 < metrics["mismatch/mean"] < metrics["mismatch/max"] <= 0.3 + 1e-6
    assert "mismatch/mean" not in make(half(20)).step(1).metrics, "this engine would have to work for them"


AHEAD = {"rollout": {"behaviour": "engine", "ahead": True, "servers": ["http://unused:8000"]}, "steps": 4}


def test_ahead_the_next_answers_come_from_the_policy_before_the_update():
    trainer = make(half(20), **AHEAD)
    engine, seen = trainer.rollout_worker.engine, []
    generate = engine.generate

    def watched(*arguments):
        seen.append(engine.log.count("push"))
        return generate(*arguments)

    engine.generate = watched
    metrics = [trainer.step(step).metrics for step in range(1, 5)]
    assert seen == [0, 0, 1, 2], "pushes before each step's answers"
    assert [m["staleness"] for m in metrics] == [0, 1, 1, 1]
    assert len(engine.calls) == 4, "nothing is generated for a step that never comes"
    assert engine.log.count("push") == 4


def test_a_checkpoint_keeps_the_questions_that_are_ahead():
    trainer = make(half(20), **AHEAD)
    trainer.step(1)
    state = trainer.state()
    again = make(half(20), **AHEAD)
    again.restore(dataclasses.replace(state, values=json.loads(json.dumps(state.values))))
    assert again.step(2).metrics["staleness"] == 0, "they are answered anew, by the policy of the checkpoint"
    theirs = [trainer.step(2), trainer.step(3)][1].batch.question
    np.testing.assert_array_equal(again.step(3).batch.question, theirs)


@pytest.mark.parametrize(
    ("rule", "key"),
    [
        ("lowest_entropy", lambda t, v: fake_score(t.response, v).entropy.mean()),
        ("highest_entropy", lambda t, v: -fake_score(t.response, v).entropy.mean()),
        ("lowest_nll", lambda t, v: -fake_score(t.response, v).log_prob.mean()),
        ("shortest", lambda t, v: len(t.response)),
    ],
)
def test_the_replayed_trajectory_is_the_best_under_the_current_policy(rule, key):
    trainer = make(half(12), experience={"trajectory": rule, "ratio": 0.75})
    for step in range(1, 5):
        stored = {q: trajectories(trainer.replay.memory, q) for q in range(12)}
        version = trainer.policy.version
        result = trainer.step(step)
        for row in (row for row in rows_of(result.batch) if row.replayed):
            best = min(stored[row.question], key=lambda t: key(t, version))
            np.testing.assert_array_equal(row.token, best.response)
    assert result.metrics["replayed"] == 4
    assert any(len(candidates) > 1 for candidates in stored.values())
    compared = [batch for batch, _ in trainer.policy.scored if len(batch) and batch.replayed.all()]
    assert len(compared) == (0 if rule == "shortest" else 3), "one pass over the candidates of all questions"


def test_replay_and_collection_begin_one_step_after_the_threshold_is_passed():
    skill = half(40)
    trainer = make(skill, experience={"start_pass_rate": 0.5})
    trainer.step(1)  # Pass@1 is 0.5, which does not exceed 0.5
    assert not trainer.replay.open
    skill.update(dict.fromkeys(skill, 0.75))
    trainer.step(2)
    assert trainer.replay.open
    assert len(trainer.replay.memory) == 0
    third, fourth = trainer.step(3), trainer.step(4)
    assert third.metrics["replayed"] == 0
    assert len(trainer.replay.memory) > 0
    assert fourth.metrics["replayed"] == 3


@pytest.mark.parametrize("start", [0.0, 0.3])
@pytest.mark.parametrize("keep", [False, True])
def test_clipping_is_off_in_steps_that_replay_and_only_there_unless_it_is_kept(keep, start):
    trainer = make(half(40), experience={"start_pass_rate": start}, objective={"clip_with_replay": keep})
    replayed = []
    for step in range(1, 4):
        trainer.policy.updates.clear()
        replayed.append(trainer.step(step).metrics["replayed"])
        assert [clip for _, clip in trainer.policy.updates] == [keep or not replayed[-1]] * 2
    # Before anything is stored nothing can be replayed, however early replay may begin.
    assert replayed == ([0, 3, 3] if start == 0 else [0, 0, 3])


def test_solved_questions_are_never_seen_again_and_the_run_ends_when_all_are():
    trainer = make(dict.fromkeys(range(10), 1.0))
    first, second = trainer.step(1), trainer.step(2)
    assert len(first.batch.question) == 6
    assert len(second.batch.question) == 4
    assert not set(first.batch.question) & set(second.batch.question)
    assert second.metrics["retired"] == 10
    assert trainer.step(3) is None


BANDS = {"easy": {0.75}, "medium": {0.5, 0.75}, "hard": {0.25}, "all": {0.0, 0.25, 0.5, 0.75, 1.0}}


@pytest.mark.parametrize(
    ("band", "normalize"), [*dict.fromkeys(BANDS, "constant").items(), ("easy", "token"), ("hard", "sequence")]
)
def test_training_on_one_band_masks_the_other_groups(band, normalize):
    skill = {q: q % 5 / 4 for q in range(10)}

    def updates(band: str) -> list:
        objective = {"train_on": band, "normalize": normalize}
        trainer = make(skill, questions=10, experience={"ratio": 0.0}, objective=objective)
        trainer.step(1)
        assert sum(map(len, trainer.rollout_worker.engine.calls)) == 10, "all of them are generated"
        return [minibatch for minibatch, _ in trainer.policy.updates]

    def in_the_band(minibatch) -> list:
        return [row for row in rows_of(minibatch.batch) if skill[row.question] in BANDS[band]]

    # A mini-batch of which the band leaves nothing takes no optimiser step.
    contributing = [minibatch for minibatch in updates("all") if in_the_band(minibatch)]
    for ours, whole in zip(updates(band), contributing, strict=True):
        assert [(row.token.tolist(), row.advantage) for row in rows_of(ours.batch)] == [
            (row.token.tolist(), row.advantage) for row in in_the_band(whole)
        ]
        assert (ours.normalizer, ours.tokens) == (whole.normalizer, whole.tokens)


def test_a_band_counts_the_fresh_rows_of_mixed_groups():
    # round(0.5 * 3) = 2 of 3 fresh rows are right, 67 %: medium. With the replayed row it is 3 of 4: easy, too.
    for count_replayed, kept in ((False, False), (True, True)):
        trainer = make(half(20), experience={"count_replayed": count_replayed}, objective={"train_on": "easy"})
        trainer.step(1)
        trainer.policy.updates.clear()
        trainer.step(2)
        rows = updated(trainer)
        assert any(row.replayed for row in rows) == kept
        assert len(rows) == (3 * K if kept else 0)


def test_continuous_rewards_are_stored_replayed_and_start_replay_by_their_mean():
    trainer = make(half(20), experience={"bucket_by": "reward_deviation", "start_pass_rate": 0.3})
    # Never a full reward: the third token in hundredths.
    trainer.rollout_worker.grader = ScriptedGrader(lambda text: int(text.split()[2]) / 100)
    first = trainer.step(1)
    assert first.metrics["pass_rate"] == 0
    assert first.metrics["reward"] > 0.3
    assert trainer.replay.open
    second = trainer.step(2)
    assert len(trainer.replay.memory) == 6
    for question in second.batch.question:
        answers = [row for row in rows_of(second.batch) if row.question == question]
        mean = np.mean([row.reward for row in answers])
        better = [row.token.tolist() for row in answers if row.reward > mean]
        assert [t.response.tolist() for t in trajectories(trainer.replay.memory, question)] == better
    assert len(set(trainer.replay.memory.count[trainer.replay.memory.count > 0].tolist())) > 1
    third = trainer.step(3)
    assert third.metrics["replayed"] == 3
    assert all(0 < row.reward < 1 for row in rows_of(third.batch) if row.replayed)


def peak(top: float):
    """A reward that peaks at `top`."""
    return ScriptedGrader(lambda text: top * marked(text) or 0.1)


@pytest.mark.parametrize(("success", "counts"), [(0.9, True), (1.0, False)])
def test_a_success_is_what_the_configuration_says(success, counts):
    trainer = make({**half(10), 3: 1.0}, reward={"success": success}, questions=10, experience={"start_pass_rate": 0.3})
    trainer.rollout_worker.grader = peak(0.9)
    first = trainer.step(1)
    assert first.metrics["pass_rate"] == (0.55 if counts else 0)
    assert trainer.replay.open == counts
    assert trainer.replay.memory.retired.tolist() == [counts and q == 3 for q in range(10)]
    trainer.step(2)
    assert len(trainer.replay.memory.table) == (18 if counts else 0)
    masked = make(half(10), reward={"success": success}, questions=10, objective={"train_on": "medium"})
    masked.rollout_worker.grader = peak(0.9)
    masked.step(1)
    assert any(len(minibatch.batch) for minibatch, _ in masked.policy.updates) == counts


def test_it_is_said_once_that_no_reward_is_a_success_and_not_again_after_a_resume():
    def begin():
        trainer = make(half(80), questions=40)
        trainer.rollout_worker.grader = peak(0.9)
        return trainer

    trainer = begin()
    notes = [trainer.step(step).notes for step in range(1, 5)]
    assert notes[0] == notes[2] == notes[3] == ()
    (said,) = notes[1]
    assert "no answer is a success" in said
    assert "between 0.1 and 0.9" in said
    assert "set reward.success to it" in said
    resumed = begin()
    state = trainer.state()
    resumed.restore(dataclasses.replace(state, values=json.loads(json.dumps(state.values))))
    assert resumed.replay.watch == trainer.replay.watch
    assert resumed.step(5).notes == ()


def test_the_engine_wakes_generates_sleeps_and_then_takes_the_new_weights():
    trainer = make(half(20))
    trainer.step(1)
    assert list(trainer.rollout_worker.engine.log) == ["wake", "generate", "sleep", "push"]


def test_metrics_describe_the_step():
    trainer = make(half(20))
    trainer.step(1)
    result = trainer.step(2)
    metrics = result.metrics
    lengths = result.batch.length[result.batch.fresh]
    assert metrics["reward"] == pytest.approx((3 * 2 + 3 * round(0.5 * (K - 1))) / (3 * K + 3 * (K - 1)))
    assert metrics["response_tokens"] == pytest.approx(np.mean(lengths))
    assert metrics["replayed_age"] == 1
    assert metrics["buffer_questions"] == len(trainer.replay.memory)
    assert metrics["buffer_trajectories"] == len(trainer.replay.memory.table)
    assert metrics["generated_tokens"] > sum(lengths)
    assert metrics["tokens_per_second/generate"] == pytest.approx(sum(lengths) / metrics["seconds/generate"])
    assert metrics["prefix_cache_hits"] == pytest.approx(0.4)
    assert metrics["seconds/asleep"] == 3.0
    assert metrics["staleness"] == 0
