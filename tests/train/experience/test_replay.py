"""What a run remembers and decides, without a model."""

import copy

import pytest

from exgrpo.train.config import ExperienceConfig
from exgrpo.train.experience import MeanScore, PlannedGroup, Replay
from tests.train.experience.test_memory import group


def test_replay_starts_after_the_step_that_passes_the_threshold():
    replay = Replay(ExperienceConfig(start_pass_rate=0.35), questions=6, samples=2, seed=0)
    assert replay.take_in([group(0, [1.0, 0.0])], 1) == (0.5, None)
    assert replay.active
    assert len(replay.memory) == 0  # what was written before is not kept
    replay.take_in([group(0, [1.0, 0.0])], 2)
    assert len(replay.memory) == 1


def test_a_restored_state_goes_on_with_the_same_draws():
    replay, other = (Replay(ExperienceConfig(start_pass_rate=0.0), 20, 4, seed) for seed in (0, 1))
    replay.take_in([group(question, [1.0, 0.0, 0.0, 1.0]) for question in range(8)], 1)
    replay.plan(8, 2)
    other.restore(copy.deepcopy(replay.state()))
    for _ in range(4):
        expected, found = replay.plan(8, 2), other.plan(8, 2)
        assert found == expected
        assert sum(group.choose for group in found) == 4


def test_a_success_is_what_the_setting_says_and_a_misfit_is_told_once():
    config = ExperienceConfig(start_pass_rate=0.3)
    strict, fitting = (Replay(config, 300, 2, 0, success=s, success_option="the.option") for s in (1.0, 0.9))
    groups = [group(question, [0.9, 0.1]) for question in range(150)]
    assert fitting.take_in(groups, 1) == (0.5, None)
    assert fitting.active
    fitting.take_in([group(0, [0.9, 0.1]), group(1, [0.9, 0.9])], 2)
    assert len(fitting.memory) == 1
    assert fitting.memory.retired.tolist() == [False, True] + [False] * 298
    pass_rate, note = strict.take_in(groups, 1)
    assert pass_rate == 0
    assert note is not None
    assert "set the.option to it" in note
    resumed = Replay(config, 300, 2, 0, success=1.0)
    resumed.restore(strict.state())
    assert resumed.take_in(groups, 2) == strict.take_in(groups, 2) == (0, None)


@pytest.mark.parametrize("rule", ["lowest_nll", "lowest_entropy", "shortest", "random"])
def test_candidates_of_all_questions_are_scored_together_and_only_if_the_rule_compares_scores(rule):
    replay = Replay(ExperienceConfig(start_pass_rate=0.0, trajectory=rule), 6, 4, seed=0)
    replay.take_in([group(q, [1.0] * (1 + q % 3) + [0.0] * (3 - q % 3)) for q in range(6)], 1)
    asked = []

    def score(trajectories):
        asked.append(trajectories)
        # Distinct numbers; the lowest entropy is the first candidate, the lowest nll the last.
        return [MeanScore(row.question + row.response[0] / 10, -row.response[0]) for row in trajectories]

    drawn = [5, 1, 3]
    planned = [PlannedGroup(0, 4), *(PlannedGroup(question, 3, 1) for question in drawn)]
    nobody, *joined = replay.select(planned, score)
    assert nobody == []
    selected = [one for (one,) in joined]
    stored = {q: replay.memory.trajectories(q) for q in drawn}
    assert [one.trajectory.question for one in selected] == drawn
    if rule in ("shortest", "random"):
        assert not asked
        assert all(one.entropy is None and one.trajectory in stored[one.trajectory.question] for one in selected)
        return
    assert [list(of_call) for of_call in asked] == [[row for q in drawn for row in stored[q]]]
    best = 0 if rule == "lowest_entropy" else -1
    for one in selected:
        assert one.trajectory is stored[one.trajectory.question][best]
        assert one.entropy == one.trajectory.question + one.trajectory.response[0] / 10
