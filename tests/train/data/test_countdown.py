"""The reward and the key of countdown against all expressions of small problems."""

from fractions import Fraction
from itertools import permutations
from random import Random

import pytest

from exgrpo.train.common.errors import DataError
from exgrpo.train.data.tasks import countdown
from tests.train.data.test_expressions import all_expressions, value_of

BOXED = (
    *("", "(" * 5000 + "1" + ")" * 5000, "1+" * 90 + "1", "9" * 5000, "9**9**9**9", "9^9^9", "1/0", "4/(3-3)", "-3+5"),
    *("3.0+5", "\u0663+\u0665", "\uff13 + \uff15", "3²+5", "3+5\x00"),
    *("3 5", "3+", "(3+5", "3+5)", ")3+5(", "3(5)", "()"),
)
HOSTILE = [f"\\boxed{{{text}}}" for text in (*BOXED, "__import__('os')", "\\frac{3}{5}")]
HOSTILE += ["", "\\boxed{", "</think>", "\\boxed{" + "(" * 5000, "\\boxed{" * 5000 + "}" * 5000, "x" * 100_000, "3 + 5"]
HOSTILE += ["\\boxed{3+5}</think>"]


@pytest.mark.parametrize(("numbers", "target"), [((3, 5, 8), 16), ((2, 2, 6), 6), ((1, 4, 6), 24), ((3, 9, 3), 9)])
def test_an_answer_is_right_if_it_uses_each_number_once_and_equals_the_target(numbers, target):
    gold = " ".join(map(str, (target, *numbers)))
    right = 0
    for size in (2, 3):
        for order in permutations(numbers, size):
            for text in all_expressions(order):
                expected = size == 3 and value_of(text) == target
                assert countdown.reward(f"<think>\\boxed{{1}}</think>so \\boxed{{{text}}}", gold) == expected
                right += expected
    assert right > 1
    assert countdown.reward(f"\\boxed{{{target}}}", gold) == 0.0
    assert countdown.reward(f"\\boxed{{{target} * ({numbers[0]} - {numbers[0]} + 1)}}", gold) == 0.0


def test_division_is_exact():
    assert countdown.reward("\\boxed{8 / (3 - 8 / 3)}", "24 3 3 8 8") == 1.0
    assert countdown.reward("\\boxed{7 / 2}", "3 2 7") == 0.0


@pytest.mark.parametrize("response", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_responses_are_worth_nothing(response):
    assert countdown.reward(response, "8 3 5") == 0.0
    assert isinstance(countdown.reward_key(response, "8 3 5"), str)
    assert countdown.reward_form(response, "8 3 5") == float(countdown.reward_key(response, "8 3 5") != "")


def test_the_key_is_a_right_answer_itself():
    for problem in countdown.generate("test", 100, seed=2):
        response = countdown.format_solution(problem.solution)
        key = countdown.reward_key(response, problem.answer)
        assert (
            countdown.reward(f"\\boxed{{{key}}}", problem.answer) == countdown.reward(response, problem.answer) == 1.0
        )
    assert (
        countdown.reward_key("\\boxed{9 - (2 - 1)}", "") == countdown.reward_key("\\boxed{1 + (9) - 2}", "") == "1+9-2"
    )
    assert countdown.reward_key("\\boxed{2 * 3}", "") != countdown.reward_key("\\boxed{2 + 4}", "")


@pytest.mark.parametrize("gold", ["", "8", "eight 3 5", "8 3.5", "3+5"])
def test_a_malformed_gold_answer_is_an_error(gold):
    with pytest.raises(DataError, match="the target and then the numbers"):
        countdown.reward("\\boxed{3 + 5}", gold)


def test_a_problem_can_be_solved_by_whole_numbers_within_the_limit():
    def results(node):
        return [node.value, *results(node.left), *results(node.right)] if node.operator else []

    for difficulty in (1, 2, 3, 4):
        for problem in countdown.generate("train", 50, seed=4, difficulty=difficulty):
            target, *numbers = map(int, problem.answer.split())
            assert problem.question == f"Make {target} from {', '.join(map(str, numbers))}."
            assert sorted(problem.solution.numbers()) == sorted(numbers)
            assert all(
                value.denominator == 1 and 1 <= value <= countdown.LARGEST for value in results(problem.solution)
            )
            text = countdown.format_solution(problem.solution)
            assert value_of(text.removeprefix("\\boxed{").removesuffix("}")) == target


def test_problems_get_harder():
    """A random expression reaches the target less and less often."""
    rng, rates = Random(0), []
    for difficulty in (1, 2, 3, 4):
        hits = 0
        for problem in countdown.generate("test", 100, seed=1, difficulty=difficulty):
            target, *numbers = map(int, problem.answer.split())
            hits += sum(countdown.random_expression(numbers, rng).value == Fraction(target) for _ in range(40))
        rates.append(hits)
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == 4
