"""Generated arithmetic problems of mixed difficulty, with answers and column-by-column solutions.

Levels: 1 is one operation on small numbers, 2 on numbers of up to three digits, 3 on longer ones, 4 is two operations.
A difficulty is a mixture of levels. The splits share no problem: a hash of the expression, with the operands of a
commutative operation in order, decides its split.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from exgrpo.train.common.functions import ASSETS
from exgrpo.train.data.tasks import Split, check_difficulty, different_problems

REWARD = "math"
"""Reward of the task's answers: it grades what follows the thinking."""

MODEL_FOLDER = ASSETS / "arithmetic"
"""Pretrained model and tokenizer in Hugging Face format."""

MAX_PROMPT_TOKENS = 24
"""Bound on the tokens of every question with the chat template of the shipped tokenizer."""

MAX_RESPONSE_TOKENS = 80
"""Bound on the tokens of every correct worked solution with the shipped tokenizer, the end token included."""

LEVELS = (1, 2, 3, 4)

DEFAULT_DIFFICULTY = 2

_LEVEL_WEIGHTS = {
    1: (0.7, 0.3, 0.0, 0.0),
    2: (0.4, 0.3, 0.1, 0.2),
    3: (0.1, 0.3, 0.3, 0.3),
    4: (0.0, 0.0, 0.5, 0.5),
}
"""Probabilities of the levels, by difficulty."""
_PHRASES = ("What is {}?", "Compute {}.")


@dataclass(frozen=True)
class ArithmeticProblem:
    """One question with its answer, a non-negative integer in decimal digits."""

    question: str
    answer: str
    expression: str
    """The expression to compute, `number operator number` with at most two operators."""

    level: int


def generate(split: Split, count: int, seed: int, *, difficulty: int = DEFAULT_DIFFICULTY) -> list[ArithmeticProblem]:
    """Return `count` different problems of the split, deterministic in the arguments.

    `difficulty`, 1 to 4, sets the probabilities of the levels: 1 has only levels 1 and 2, 4 only levels 3 and 4. Raises
    DataError for another difficulty, and if the split has too few different problems.
    """
    check_difficulty(difficulty, _LEVEL_WEIGHTS)
    weights = _LEVEL_WEIGHTS[difficulty]

    def draw(rng: random.Random) -> ArithmeticProblem:
        level = rng.choices(LEVELS, weights)[0]
        expression = _EXPRESSIONS[level](rng)
        question = rng.choice(_PHRASES).format(expression)
        return ArithmeticProblem(question, str(evaluate(expression)), expression, level)

    return different_problems(draw, lambda problem: _canonical(problem.expression), split, count, seed)


def evaluate(expression: str) -> int:
    """Return the value of an expression of at most two operations."""
    result = 0
    for step in _steps(expression):
        a, operator, b = step(result)
        result = _OPERATIONS[operator](a, b)
    return result


def worked_solution(expression: str, slips: Callable[[], bool] = lambda: False) -> str:
    r"""Return a solution in columns, units first, between <think> and </think>, then the result in \boxed{}.

    `slips` is called once per column; if it returns True the column gets a mistake, a carry forgotten or a result off
    by one, and the rest of the solution follows from the mistake.
    """
    lines: list[str] = []
    result = 0
    for index, step in enumerate(_steps(expression)):
        a, operator, b = step(result)
        columns, result = _columns(a, operator, b, slips)
        heading = f"{a} {operator} {b}: " if index else ""
        lines.append(heading + ", ".join(columns))
    return format_solution("; ".join(lines), str(result))


def format_solution(thoughts: str, answer: str) -> str:
    r"""Return the text of a response: the thoughts in <think> tags, then the answer in \boxed{}."""
    return f"<think>{thoughts}</think>\\boxed{{{answer}}}"


_Step = Callable[[int], tuple[int, str, int]]

_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}


def _steps(expression: str) -> list[_Step]:
    """Return the operations in order of evaluation, each as a function of the previous result."""
    match expression.split():
        case [a, op, b]:
            return [lambda _: (int(a), op, int(b))]
        case [a, op, b, "*", c] if op != "*":
            return [lambda _: (int(b), "*", int(c)), lambda result: (int(a), op, result)]
        case [a, op, b, last, c]:
            return [lambda _: (int(a), op, int(b)), lambda result: (result, last, int(c))]
    raise ValueError(f"not an expression of one or two operations: {expression!r}")


def _canonical(expression: str) -> str:
    """Return the expression with its first two operands sorted if their order does not change the value."""
    match expression.split():
        case [a, "+" | "*" as op, b]:
            return f"{max(int(a), int(b))} {op} {min(int(a), int(b))}"
        case [a, "+" as op, b, "+" | "-" as last, c]:
            return f"{max(int(a), int(b))} {op} {min(int(a), int(b))} {last} {c}"
    return expression


def _columns(a: int, operator: str, b: int, slips: Callable[[], bool]) -> tuple[list[str], int]:
    """Return the text of each column, units first, and the number that the columns form."""
    if operator == "*":
        upper, lower = _digits(a), [b] * len(str(a))
    else:
        width = max(len(str(a)), len(str(b)))
        upper, lower = _digits(a, width), _digits(b, width)
    texts: list[str] = []
    written: list[str] = []
    carry = 0
    for place, (x, y) in enumerate(zip(upper, lower, strict=True)):
        slip = slips()
        if slip and carry:
            carry, slip = 0, False
        value, text, borrow = _column(x, operator, y, carry)
        if slip:
            value += 1 if value % 10 < 5 else -1
        texts.append(f"{text} = {value}")
        last = place + 1 == len(upper)
        written.append(str(value) if last else str(value % 10))
        carry = borrow if operator == "-" else value // 10
    return texts, int("".join(reversed(written)))


def _column(x: int, operator: str, y: int, carry: int) -> tuple[int, str, int]:
    """Return the value of one column, its text, and 1 if a subtraction borrows from the next column, else 0."""
    borrow = int(operator == "-" and x - carry < y)
    x += 10 * borrow
    value = _OPERATIONS[operator](x, y) + (-carry if operator == "-" else carry)
    sign = "-" if operator == "-" else "+"
    carried = f" {sign} {carry}" if carry else ""
    return value, f"{x} {operator} {y}{carried}", borrow


def _digits(number: int, width: int = 0) -> list[int]:
    """Return the digits, units first, zero-padded to the width."""
    return [int(digit) for digit in reversed(str(number).zfill(width))]


def _number(rng: random.Random, *lengths: int) -> int:
    length = rng.choice(lengths)
    return rng.randrange(10 ** (length - 1), 10**length)


def _sum_or_difference(rng: random.Random, a: int, b: int) -> str:
    if rng.random() < 0.5:
        return f"{a} + {b}"
    return f"{max(a, b)} - {min(a, b)}"


def _small(rng: random.Random) -> str:
    if rng.random() < 0.1:
        return f"{rng.randrange(2, 10)} * {rng.randrange(2, 10)}"
    return _sum_or_difference(rng, _number(rng, 1, 2, 2), _number(rng, 2))


def _medium(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return f"{_number(rng, 2)} * {rng.randrange(2, 10)}"
    return _sum_or_difference(rng, _number(rng, 3), _number(rng, 2, 3))


def _long(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return f"{_number(rng, 3)} * {rng.randrange(2, 10)}"
    return _sum_or_difference(rng, _number(rng, 4), _number(rng, 3, 4))


def _two_steps(rng: random.Random) -> str:
    a, b, c = _number(rng, 2), _number(rng, 2), _number(rng, 2)
    digit = rng.randrange(2, 10)
    match rng.randrange(4):
        case 0:
            return f"{a} + {b} - {min(c, a + b)}"
        case 1:
            return f"{a} + {b} + {c}"
        case 2:
            return f"{b} * {digit} + {c}"
        case _:
            return f"{c} + {b} * {digit}"


_EXPRESSIONS: dict[int, Callable[[random.Random], str]] = {1: _small, 2: _medium, 3: _long, 4: _two_steps}
