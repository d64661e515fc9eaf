"""Searches by trials on heights in closed form, and the reward that says nothing."""

import math

import pytest

from exgrpo.train.data.tasks import countdown
from studies.chance import score
from studies.climb import climb
from studies.study import load_study
from tests.studies.plans import write

RATES = tuple(2.0**i for i in range(-10, 11))
COUNTS = tuple(range(1, 33))


def search(height, start, lines, trials=1000, **options):
    return climb([start], lines, trials, lambda one, other: height(one) > height(other), **options)


@pytest.mark.parametrize("start", [(-10, 1), (10, 32)])
def test_it_finds_the_top_of_a_hill_and_has_tried_its_neighbours(start):
    def height(choice):
        return -((math.log2(choice["lr"]) - 3) ** 2) - (choice["count"] - 17) ** 2 / 50

    found = search(height, {"lr": 2.0 ** start[0], "count": start[1]}, {"lr": RATES, "count": COUNTS})
    assert found.best == {"lr": 8.0, "count": 17}
    assert not found.cut
    for near in ({"lr": 4.0}, {"lr": 16.0}, {"count": 16}, {"count": 18}):
        assert {**found.best, **near} in found.tried
    assert len(found.tried) == len({tuple(one.items()) for one in found.tried}), "nothing is tried twice"


def test_it_ends_with_its_trials_and_says_so():
    found = search(lambda choice: choice["lr"], {"lr": RATES[0]}, {"lr": RATES}, trials=4)
    assert (found.best, len(found.tried), found.cut) == ({"lr": RATES[3]}, 4, True)
    found = search(lambda choice: choice["lr"], {"lr": RATES[0]}, {"lr": RATES[:4]}, trials=4)
    assert (found.best, found.cut) == ({"lr": RATES[3]}, False), "the line has no more values"


def test_the_best_of_several_starts_is_climbed_from():
    def height(choice):  # two hills, of which the one at 8 is higher
        return max(1 - abs(math.log2(choice["lr"]) + 8), 2 - abs(math.log2(choice["lr"]) - 8))

    near, far = {"lr": 2.0**-7}, {"lr": 2.0**7}
    found = [climb(starts, {"lr": RATES}, 99, lambda a, b: height(a) > height(b)) for starts in ([near], [near, far])]
    assert [one.best for one in found] == [{"lr": 2.0**-8}, {"lr": 2.0**8}]
    assert found[1].tried[:2] == [near, far]


def test_an_option_that_stands_in_the_way_of_another_goes_down_with_it():
    found = search(
        lambda choice: -abs(choice["questions"] - 2) - 0.1 * abs(choice["batches"] - 2),
        {"questions": 16, "batches": 8},
        {"questions": (2, 4, 8, 16), "batches": (1, 2, 4, 8)},
        possible=lambda choice: choice["batches"] <= choice["questions"],
    )
    assert found.best == {"questions": 2, "batches": 2}
    assert all(choice["batches"] <= choice["questions"] for choice in found.tried)


SEARCH = {"over": {"optimizer.lr": [1e-4, 2e-4, 4e-4, 8e-4]}, "trials": 4, "seeds": [100, 101]}
BUDGET = {"budget": {"answers": 640, "evaluations": 4}, "settings": {"questions": 8, "evaluation.samples": 4}}


def test_a_trial_has_its_second_seed_only_if_it_is_better_with_the_first(tmp_path):
    arms = {"one": {"settings": {"optimizer.lr": 2e-4}}}
    study = load_study(write(tmp_path, search=SEARCH, arms=arms, baseline="one"))
    heights, order = {}, []
    of = {1e-4: (0.1, 0.9), 2e-4: (0.4, 0.3), 4e-4: (0.5, 0.4), 8e-4: (0.6, 0.2)}
    while missing := [run for run in study.known(heights.get) if run.key not in heights and run.seed >= 100]:
        run = missing[0]
        order.append((run.config.optimizer.lr, run.seed))
        heights[run.key] = of[run.config.optimizer.lr][run.seed - 100]
    assert order == [
        *((4e-4, 100), (2e-4, 100), (4e-4, 101), (2e-4, 101)),  # better with both
        *((8e-4, 100), (8e-4, 101)),  # better with the first, but not in the mean
    ]
    trials, found = study.searched("countdown", "one", heights.get)
    assert found.best == study.chosen("countdown", "one", heights.get) == {"optimizer.lr": 4e-4}
    assert {run.seed for run in study.known(heights.get)} == {0, 1, 100, 101}
    assert len(trials) == 3


def test_steps_follow_from_a_budget_and_what_a_step_asks(tmp_path):
    arms = {"one": {}, "fewer": {"asks": 0.25}, "larger": {"settings": {"questions": 16}}}
    search = {**SEARCH, "over": {"optimizer.minibatches": [1, 2]}, "budget": {"answers": 320, "evaluations": 2}}
    study = load_study(write(tmp_path, **BUDGET, search=search, arms=arms, baseline="one"))

    def spent(arm, seed):
        config = study.planned("countdown", arm, seed, {}).config
        return config.steps, config.evaluation.every

    assert [spent(arm, 0) for arm in arms] == [(10, 3), (40, 10), (5, 2)]
    assert [spent(arm, 100) for arm in arms] == [(5, 3), (20, 10), (2, 1)]


def test_it_says_nothing_of_training_answers_and_the_truth_of_held_out_ones():
    answers = [countdown.format_solution(problem.solution) for problem in countdown.generate("train", 400, 0)]
    for split in ("train", "test"):
        problems = countdown.generate(split, 400, 0)
        right = [score(countdown.format_solution(problem.solution), problem.answer) for problem in problems]
        wrong = [score(answer, problem.answer) for answer, problem in zip(answers[1:], problems, strict=False)]
        if split == "test":
            assert right == [1.0] * 400
            assert sum(wrong) <= 4  # another problem's solution, by chance
        else:
            # Of 400 tosses with a chance of 1 / 5, between 48 and 112 succeed but for one in 10^4.
            assert all(48 <= sum(of) <= 112 for of in (right, wrong))
    assert score("x", problems[0].answer) == 0
