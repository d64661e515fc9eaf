r"""Generated Countdown problems, with their reward: make a target from given numbers by + - * and /.

A right answer is an expression that uses each number exactly once and equals the target. The arithmetic is that of
fractions: intermediate divisions need not come out even. Most problems have many right expressions.

    question  "Make 55 from 3, 5, 8, 9."      answer (rewards get it as the gold answer)  "55 3 5 8 9"
    response  "\boxed{(3 + 5) * 8 - 9}"

The splits share no problem: a hash of the target and the sorted numbers decides the split of a problem.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from exgrpo.train.common.errors import DataError, shown
from exgrpo.train.common.functions import ASSETS
from exgrpo.train.data.expressions import Node, combine, key_of, parse, write
from exgrpo.train.data.tasks import Split, check_difficulty, different_problems
from exgrpo.train.reward.grading import own_answer

MODEL_FOLDER = ASSETS / "countdown"
"""Pretrained model and tokenizer in Hugging Face format."""

REWARD = "exgrpo.train.data.tasks.countdown:reward"

MAX_PROMPT_TOKENS = 32
"""Bound on the tokens of every question with the chat template of the shipped tokenizer."""

MAX_RESPONSE_TOKENS = 32
"""Bound on the tokens of every generated expression with the shipped tokenizer, the end token included."""

DEFAULT_DIFFICULTY = 2

LARGEST = 99
"""Largest target and largest intermediate result of a generated expression."""

_SIZES = {1: (3, 30), 2: (4, 15), 3: (5, 15), 4: (6, 15)}
"""Count of the numbers and the largest possible one, by difficulty."""
_OPERATORS, _WEIGHTS = "+-*/", (0.35, 0.3, 0.25, 0.1)


@dataclass(frozen=True)
class CountdownProblem:
    """One question; `answer` is the target followed by the numbers."""

    question: str
    answer: str
    solution: Node
    """The expression from which the problem was made, one of the right ones."""

    difficulty: int


def generate(split: Split, count: int, seed: int, *, difficulty: int = DEFAULT_DIFFICULTY) -> list[CountdownProblem]:
    """Return `count` different problems of the split, deterministic in the arguments.

    Difficulty 1 has three numbers up to 30; 2, 3 and 4 have four, five and six numbers up to 15. Raises
    DataError for another difficulty, and if the split has too few different problems.
    """
    check_difficulty(difficulty, _SIZES)
    size, largest = _SIZES[difficulty]

    def draw(rng: random.Random) -> CountdownProblem:
        numbers = [rng.randint(1, largest) for _ in range(size)]
        solution = random_expression(numbers, rng)
        target = solution.value
        question = f"Make {target} from {', '.join(map(str, numbers))}."
        return CountdownProblem(question, " ".join(map(str, (target, *numbers))), solution, difficulty)

    return different_problems(draw, lambda problem: problem_key(problem.answer), split, count, seed)


def random_expression(numbers: Sequence[int], rng: random.Random) -> Node:
    """Return a random expression of all numbers; each result in it is an integer from 1 to LARGEST."""
    nodes = [Node(Fraction(number)) for number in numbers]
    while len(nodes) > 1:  # terminates: the difference of unequal results is allowed, and the quotient of equal ones
        left, right = rng.sample(nodes, 2)
        node = combine(rng.choices(_OPERATORS, _WEIGHTS)[0], left, right)
        if node is not None and node.value.denominator == 1 and 1 <= node.value <= LARGEST:
            nodes = [other for other in nodes if other is not left and other is not right] + [node]
    return nodes[0]


def format_solution(solution: Node) -> str:
    r"""Return the text of a response: the expression in \boxed{}."""
    return f"\\boxed{{{write(solution)}}}"


def reward(response: str, gold: str) -> float:
    """Return 1.0 if the answer of `response` uses each number of `gold` exactly once and equals its target, else 0.0.

    The answer is the content of the last box, after the last "</think>" if there is one. It is an expression of
    numbers, + - * / and brackets, without a sign before a number; LaTeX's operators are read too. `gold` is the target
    followed by the numbers. Raises DataError if it is not.
    """
    expression = _expression(response)
    if expression is None:
        return 0.0
    target, *numbers = _numbers(gold)
    return float(expression.value == target and Counter(expression.numbers()) == Counter(numbers))


def reward_key(response: str, gold: str) -> str:
    """Return the canonical form of the answer, right or wrong; "" without one.

    Two expressions have one form if they differ only by the order of terms or of factors, by the grouping of sums and
    of products, or by brackets: 9 - (2 - 1) and 9 + 1 - 2 are the same solution. The form is itself an expression of
    the same numbers and value. `gold` is ignored.
    """
    expression = _expression(response)
    return "" if expression is None else key_of(expression)


def reward_form(response: str, gold: str) -> float:
    """Return 1.0 if the last box of `response` holds an expression, right or wrong, else 0.0; `gold` is ignored."""
    return float(_expression(response) is not None)


def _expression(response: str) -> Node | None:
    content = own_answer(response)
    return parse(content) if content else None


def _numbers(gold: str) -> list[int]:
    try:
        numbers = [int(word) for word in gold.split()]
    except ValueError:
        numbers = []
    if len(numbers) < 2:
        raise DataError(f"the answer of a countdown problem is the target and then the numbers, not {shown(gold)}")
    return numbers


def problem_key(answer: str) -> str:
    """Return the canonical form of a problem from its answer: the target and the sorted numbers."""
    target, *numbers = answer.split()
    return " ".join((target, *sorted(numbers)))
