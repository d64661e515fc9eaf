"""How a batch is made, by each function `compose`: what is asked, and what is trained on once it is graded."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.train.common.functions import Needs
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.config.replay import KINDS
from exgrpo.train.replay import ExperienceConfig, MeanScores, MethodOptions, Replay, rules
from tests.train.batches import Row, make_batch, stored_rows
from tests.train.trainers import half, make

K = 4
COMPOSES = ("appended", "bapo", "beside", "buffer", "in_place", "mixed")


def rewards(right: int) -> list[float]:
    return [1.0] * right + [0.0] * (K - right)


def graded(of_step: dict[int, int], step: int) -> StepBatch:
    """Groups of K answers, of which as many are right as it says; no two answers are equal."""
    return make_batch(
        [
            (question, [Row(reward, (step, i, question), step=step) for i, reward in enumerate(rewards(right))])
            for question, right in of_step.items()
        ]
    )


def replaying(compose: str, questions: int, *steps: dict[int, int], **options) -> Replay:
    """A replay that has seen some steps: of each question how many answers were right."""
    values = {"start_pass_rate": 0.0, "ratio": 0.5, "admit": "all", "prioritise": "random", "expire": ()}
    replay = Replay(MethodOptions(ExperienceConfig(**{**values, "compose": compose, **options}), K), questions, 0)
    for step, of_step in enumerate(filter(None, steps), 1):
        replay.store(graded(of_step, step), step)
    return replay


def settled(replay: Replay, of_step: dict[int, int], size: int, step: int) -> tuple[list[StepBatch], list[StepBatch]]:
    """What is trained on of a graded step: groups with fresh answers, and those of stored ones alone."""
    batch = graded(of_step, step)
    replay.store(batch, step)
    return split(replay.settle(batch, size, step), len(of_step))


def split(batch: StepBatch, asked: int) -> tuple[list[StepBatch], list[StepBatch]]:
    """The trained groups of a batch, each by itself: those that were asked, and the late ones, all of them."""
    groups = {int(group): batch.take(batch.rows_of([group])) for group in batch.trained}
    assert set(range(asked, batch.groups)) <= set(groups)
    alone = [group for number, group in groups.items() if number >= asked]
    assert all(group.replayed.all() and group.num_tokens.tolist() == group.length.tolist() for group in alone)
    return [group for number, group in groups.items() if number < asked], alone


def question_of(group: StepBatch) -> int:
    """Of one group."""
    return int(group.question[group.group[0]])


def tokens(batch: StepBatch) -> list[tuple[int, ...]]:
    """The answers: step, place and question of each."""
    return [tuple(batch.answer(row).response.tolist()) for row in range(len(batch))]


@pytest.mark.parametrize("compose", COMPOSES)
@given(
    st.integers(1, 9), st.integers(0, 9), st.integers(0, 4), st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.integers(2, 3)
)
def test_a_plan_asks_no_question_twice_and_no_retired_one(compose, batch, seen, retired, ratio, step):
    questions = max(1, seen + retired + 2)
    first = dict.fromkeys(range(seen), 2) | {seen + i: K for i in range(retired)}
    replay = replaying(compose, questions, first, ratio=ratio, expire=("retirement",), cooldown=1)
    groups = replay.plan(batch, step)
    chosen = [group.question for group in groups]
    assert len(chosen) == len(set(chosen))
    assert not replay.memory.retired[chosen].any()
    left = questions - int(replay.memory.retired.sum())
    share = int(ratio * batch + 1e-9)
    most = max(1, batch - share) if compose == "buffer" else batch
    assert len(chosen) == min(left, most)  # bapo finds no hard prompts here
    for group in groups:
        assert group.fresh >= 1
        assert group.rows == ()
        assert group.fresh + group.choose <= K + (compose == "appended")
        assert group.choose <= replay.memory.table.held[group.question]


@pytest.mark.parametrize("right", [2, K])
@pytest.mark.parametrize("compose", COMPOSES)
def test_before_replay_begins_a_batch_is_fresh_and_that_of_the_step_that_opens_it_is_too(compose, right):
    replay = replaying(compose, 12, {question: question % 5 for question in range(8)}, start_pass_rate=0.9)
    assert not replay.active
    groups = replay.plan(6, 2)
    assert [(group.fresh, group.choose) for group in groups] == [(K, 0)] * 6
    fresh, alone = settled(replay, {group.question: right for group in groups}, 6, 2)
    assert replay.active == (right == K)
    assert [question_of(group) for group in fresh] == [group.question for group in groups]
    assert alone == []


@pytest.mark.parametrize("compose", COMPOSES)
def test_with_nothing_stored_and_nothing_won_there_is_a_batch_all_the_same(compose):
    replay = replaying(compose, 8, admit="successes")
    fresh, alone = settled(replay, {group.question: 0 for group in replay.plan(4, 1)}, 4, 1)
    assert bool(fresh) == (compose != "buffer"), "these train on stored answers alone"
    assert alone == []


@given(st.integers(1, K + 2), st.lists(st.integers(1, 4), min_size=6, max_size=6), st.sampled_from([0.5, 1.0]))
def test_mixed_groups_replay_as_many_as_are_held_and_keep_a_fresh_answer(replayed, held, ratio):
    replayed = min(replayed, K)  # the option goes no further than any K
    replay = replaying("mixed", 20, dict(enumerate(held)), admit="successes", replayed=replayed, ratio=ratio)
    groups = replay.plan(8, 2)
    mixed = [group for group in groups if group.choose]
    assert groups[len(groups) - len(mixed) :] == mixed, "groups that replay come last"
    assert len(mixed) == min(int(8 * ratio), 6)
    assert len(groups) == 8
    for group in mixed:
        assert group.choose == min(replayed, K - 1, held[group.question])
        assert group.fresh == K - group.choose
    selected = replay.select(groups, scores)
    assert selected.question.tolist() == [group.question for group in groups]
    assert np.bincount(selected.group, minlength=8).tolist() == [group.choose for group in groups]
    answers = tokens(selected)
    assert len(set(answers)) == len(answers)
    assert [question for _, _, question in answers] == selected.question[selected.group].tolist()


def test_floor_of_the_ratio_is_not_lost_to_rounding():
    groups = replaying("mixed", 200, dict.fromkeys(range(100), 2), ratio=0.29).plan(100, 2)
    assert sum(group.choose for group in groups) == 29


def scores(candidates: StepBatch) -> MeanScores:
    """Of any answers: entropies by their second token, all different within a question."""
    return MeanScores(candidates.token[candidates.start[:-1] + 1].astype(float), np.zeros(len(candidates)))


def test_several_replayed_answers_are_those_of_lowest_entropy():
    replay = replaying("mixed", 1, {0: K}, admit="all", replayed=2, ratio=1.0)
    selected = replay.select(replay.plan(1, 2), scores)
    assert tokens(selected) == [(1, 0, 0), (1, 1, 0)]
    assert selected.chosen_entropy.tolist() == [0, 1]


@pytest.mark.parametrize("replayed", [1, 3])
def test_appended_answers_join_whole_groups_of_their_questions(replayed):
    replay = replaying("appended", 6, {0: 1, 1: 2, 2: 4}, admit="successes", replayed=replayed, ratio=0.5)
    seen = Counter()
    for step in range(2, 40):
        groups = replay.plan(6, step)
        assert sorted(group.question for group in groups) == list(range(6))
        assert {group.fresh for group in groups} == {K}
        joined = [group for group in groups if group.choose]
        assert groups[len(groups) - len(joined) :] == joined, "groups that replay come last"
        assert len(joined) <= 3
        for group in joined:
            assert group.choose == min(replayed, {0: 1, 1: 2, 2: 4}[group.question])
        seen.update(group.question for group in joined)
    assert set(seen) == {0, 1, 2}


@given(st.dictionaries(st.integers(0, 7), st.integers(0, K), min_size=1), st.sampled_from([0.25, 0.5, 1.0]))
def test_beside_the_groups_that_teach_stand_single_stored_answers(of_step, ratio):
    replay = replaying("beside", 8, dict.fromkeys(range(4), 2), advantage="stored", ratio=ratio)
    before = {tuple(one.response.tolist()) for one in stored_rows(replay.memory.table.stored())}
    fresh, alone = settled(replay, of_step, 8, 2)
    with_signal = [question for question, right in of_step.items() if 0 < right < K] or list(of_step)
    assert [question_of(group) for group in fresh] == with_signal
    assert len(alone) == min(int(ratio * K * len(with_signal) + 1e-9), len(before))
    rows = [row for group in alone for row in tokens(group)]
    assert len(set(rows)) == len(rows) == len(alone)
    assert [question_of(group) for group in alone] == [question for _, _, question in rows]
    assert set(rows) <= before, "nothing of this step is replayed in it"
    for group in alone:
        # Of groups that were half right: the stored advantage is that of the group then.
        assert group.stored_advantage.tolist() == (group.reward - 0.5).tolist()
        assert group.replays.tolist() == [1]


@pytest.mark.parametrize(("stored", "expected"), [(40, 16), (2, 12)])
def test_a_batch_of_the_buffer_is_drawn_whole_and_this_steps_answers_are_in_it_by_chance(stored, expected):
    """B = 4, K = 4 and rho = 1/2: two questions are asked, sixteen answers trained on, as far as there are."""
    first = dict.fromkeys(range(10), 2) if stored == 40 else {0: 2}
    replay = replaying("buffer", 20, first, advantage="stored")
    assert len(replay.plan(4, 2)) == 2
    fresh, alone = settled(replay, {10: 1, 11: 3}, 4, 2)
    assert fresh == []
    assert len(alone) == expected
    assert len({row for group in alone for row in tokens(group)}) == expected
    steps = Counter(step for group in alone for step in group.step.tolist())
    assert set(steps) == {1, 2} if stored == 2 else steps[1] > 0


@given(st.lists(st.integers(0, K), min_size=1, max_size=6), st.sampled_from([0.25, 0.5, 1.0]), st.integers(0, 4))
def test_stored_groups_take_the_places_of_groups_without_a_gradient(rights, ratio, stored):
    replay = replaying("in_place", 20, {10 + q: 1 + q % 3 for q in range(stored)}, prioritise="newest", ratio=ratio)
    fresh, replayed = settled(replay, dict(enumerate(rights)), 6, 2)
    alive = [question for question, right in enumerate(rights) if 0 < right < K]
    dead = [question for question, right in enumerate(rights) if right in (0, K)]
    changed = min(len(dead), int(ratio * 6), stored)
    assert len(fresh) + len(replayed) == len(rights)
    assert [question_of(group) for group in fresh] == [*alive, *dead[changed:]]
    assert len(replayed) == changed
    for group in replayed:
        assert group.step.tolist() == [1] * K, "a whole group of an earlier step"
        assert {question for _, _, question in tokens(group)} == {question_of(group)}
        assert group.reward.sum() == 1 + (question_of(group) - 10) % 3
    assert len({question_of(group) for group in replayed}) == changed


def test_the_newest_stored_groups_come_first_and_two_of_one_question_are_two_groups():
    replay = replaying("in_place", 9, {0: 1, 1: 2}, {0: 3, 2: 1}, {0: 2}, prioritise="newest", ratio=1.0)
    _, alone = settled(replay, {5: 0, 6: 0, 7: K}, 3, 4)
    found = [(question_of(group), group.step[0], len(group)) for group in alone]
    assert len(found) == 3
    assert (0, 3, K) in found
    assert {one for one in found if one[1] == 2} == {(0, 2, K), (2, 2, K)}


def test_of_a_group_that_has_partly_left_the_rest_is_replayed():
    replay = replaying("in_place", 9, {0: 1}, admit="all", capacity=3, ratio=1.0)
    fresh, alone = settled(replay, {5: 0}, 2, 2)  # the capacity leaves 3 of this step's answers and no earlier one
    assert [question_of(group) for group in fresh] == [5]
    assert alone == []
    replay = replaying("in_place", 9, {0: 1}, admit="successes", ratio=1.0)
    fresh, alone = settled(replay, {5: 0}, 2, 2)
    assert fresh == []
    assert [(question_of(group), len(group)) for group in alone] == [(0, 1)]


@pytest.mark.parametrize("band", [(0.25, 0.75), (0.5, 0.5), (0.0, 1.0)])
@pytest.mark.parametrize("cooldown", [1, 2, 3])
@pytest.mark.parametrize("max_uses", [None, 1])
def test_prompts_come_back_from_the_band_after_their_cooldown(band, cooldown, max_uses):
    first, second = {question: question for question in range(5)}, {question: question - 5 for question in range(5, 10)}
    options = {"band": band, "cooldown": cooldown, "max_uses": max_uses, "repeat": 1.0, "prioritise": "middle"}
    replay = replaying("mixed", 40, first, second, {2: 2}, ratio=0.0, **options)
    asked = {**dict.fromkeys(range(5), 1), **dict.fromkeys(range(5, 10), 2), 2: 3}
    rates = {question: question % 5 / K for question in range(10)}
    may = {
        question
        for question, step in asked.items()
        if band[0] <= rates[question] <= band[1] and 4 - step >= cooldown and not (max_uses == 1 and question == 2)
    }
    seen = {group.question for group in replay.plan(40, 4)[-len(may) :]} if may else set()
    assert seen == may
    for wanted in range(1, 4):
        groups = replay.plan(wanted, 4)
        assert {(group.fresh, group.choose) for group in groups} == {(K, 0)}
        back = [group.question for group in groups if group.question in may][:wanted]
        nearest = sorted(abs(rates[question] - 0.5) for question in may)[:wanted]
        assert sorted(abs(rates[question] - 0.5) for question in back) == nearest


@pytest.mark.parametrize("band", [(0.25, 0.5), (0.0, 1.0)])
def test_half_of_what_fills_the_buffer_comes_back_the_least_asked_first(band):
    first, second = {question: question % 5 for question in range(20)}, dict.fromkeys(range(5), 1)
    options = {"band": band, "cooldown": 1, "prioritise": "least_used", "advantage": "stored", "max_uses": 2}
    replay = replaying("buffer", 60, first, second, repeat=0.5, **options)
    rates = {question: question % 5 / K for question in range(20)} | dict.fromkeys(range(5), 1 / K)
    may = {question for question, rate in rates.items() if band[0] <= rate <= band[1]}
    asked = [group.question for group in replay.plan(12, 3)]
    assert len(asked) == 6
    assert set(asked[3:]) <= may - set(range(5)), "what was asked once comes before what was asked twice"
    plans = [replaying("buffer", 60, first, first, first, repeat=share, **options).plan(12, 4) for share in (0.5, 0)]
    assert plans[0] == plans[1], "twice is enough"


@pytest.mark.parametrize("compose", COMPOSES)
def test_with_each_composition_the_share_of_fresh_questions_comes_back_but_not_as_refills(compose):
    replay = replaying(compose, 400, dict.fromkeys(range(20), 2), cooldown=1, ratio=0.0, repeat=0.3)
    questions = [group.question for group in replay.plan(10, 3)]
    assert len(set(questions)) == 10
    assert [question < 20 for question in questions[7:]] == [True] * 3
    assert sum(group.question < 20 for group in replay.more(20, 3, questions)) < 6, "by chance: 1 of 20"


@pytest.mark.parametrize("step", [2, 3])
def test_in_every_second_step_hard_prompts_are_asked_again(step):
    replay = replaying("bapo", 30, {question: question % 3 for question in range(12)}, hard=0.25, ratio=0.5)
    groups = replay.plan(6, step)
    assert {(group.fresh, group.choose) for group in groups} == {(K, 0)}
    assert len(groups) == (9 if step == 2 else 6)
    assert all(group.question % 3 < 2 and group.question < 12 for group in groups[6:])


def test_groups_that_teach_are_joined_by_prompts_that_went_better_and_by_stored_groups():
    first = {0: 0, 1: 0, 2: 1, 3: 2, 4: 2, 5: 2}
    options = {"hard": 0.25, "admit": "in_band", "band": (0.5, 0.75)}
    replay = replaying("bapo", 30, first, ratio=0.5, **options)
    # Six fresh groups, of which 10 and 11 teach; of three hard prompts 0 and 2 went better.
    of_step = {10: 1, 11: 3, 12: 0, 13: K, 14: 0, 15: K, 0: 2, 1: 0, 2: K}
    fresh, stored = settled(replay, of_step, 6, 2)
    assert [question_of(group) for group in fresh] == [10, 11, 0, 2]
    assert len(stored) == 2
    assert {question_of(group) for group in stored} <= {3, 4, 5}
    assert all(group.step.tolist() == [1] * K for group in stored)


def test_if_no_fresh_group_has_a_signal_all_stay_and_surplus_goes():
    replay = replaying("bapo", 30, {0: 0}, hard=0.25, admit="in_band")
    fresh, _ = settled(replay, {10: 0, 11: K, 0: 2}, 2, 2)
    assert [question_of(group) for group in fresh] == [10, 11]


@pytest.mark.parametrize("compose", KINDS["compose"].names)
def test_a_composition_plans_what_it_declares(compose):
    options = {"compose": compose, "advantage": "stored", "cooldown": 1, "lag": 1, "band": (0.0, 1.0)}
    trainer = make({**half(12), **dict.fromkeys(range(12, 16), 0.0)}, experience=options)
    mixed, whole = False, True
    for step in range(1, 7):
        batch = trainer.step(step).batch
        rows, fresh = (np.bincount(batch.group[of], minlength=batch.groups) for of in (slice(None), batch.fresh))
        mixed |= bool(((fresh > 0) & (fresh < K)).any())
        whole &= bool((rows == K).all()) and sorted(batch.trained) == list(range(batch.groups))
    declared = Needs.of(rules.find("compose", compose))
    assert declared.in_place == mixed
    assert whole or not declared.keeps_groups
