r"""Pretrain the tiny model of the default run and save it, with its tokenizer, in Hugging Face format.

The corpus is synthetic and, like real corpora, of mixed quality. Each problem is answered in one of two manners:

- careful: the columns one by one, units first, then the result. A column is wrong at a small rate (a forgotten carry,
  or off by one), and the rest of the solution follows from the mistake.
- hasty: the result is stated at once, and more often than not it is wrong: some of its digits are random.

Training stops early, so that the model knows both manners and is sure of neither. It is a base model: sampled at
temperature 1 it answers some of the problems right, and reinforcement learning has something to select from. The
problems are those of the `pretrain` split, which shares none with the `train` and `test` splits.

Run it from the repository: `python -m recipes.arithmetic.pretrain`. The result depends only on the seed and
on the arithmetic of the machine.
"""

import random
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro

from exgrpo.train.data.tasks.arithmetic import (
    MAX_RESPONSE_TOKENS,
    MODEL_FOLDER,
    ArithmeticProblem,
    format_solution,
    generate,
    worked_solution,
)
from recipes import pretraining

PIECES = r" ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]+ ?|\s+"
"""Digits, words and operators with their spaces."""
TEXT = "What is 1 + 2 * 3 - 4? Compute 5: 6, 7; 8 = 9. The answer is 0."
MARKS = ("<think>", "</think>", "\\boxed{")
VOCABULARY = 320


@dataclass(frozen=True)
class Options(pretraining.Options):
    """What the pretraining does; the defaults make the shipped model."""

    output: Path = MODEL_FOLDER
    """Folder for the model and the tokenizer."""
    careful: tuple[float, float, float, float] = (0.6, 0.6, 0.6, 0.6)
    """Share of careful solutions at levels 1 to 4; the others are hasty."""
    slip: float = 0.05
    """Rate of mistakes in a column of a careful solution."""
    hasty_wrong: float = 0.7
    """Share of wrong results among hasty solutions."""


def hasty_solution(problem: ArithmeticProblem, wrong: float, rng: random.Random) -> str:
    """Return a solution that states its result at once; at the rate `wrong` one or two of the digits are random."""
    digits = list(problem.answer)
    if rng.random() < wrong:
        while "".join(digits) == problem.answer:
            for place in rng.choices(range(len(digits)), k=2):
                digits[place] = rng.choice("0123456789")
    result = str(int("".join(digits)))
    return format_solution(f"{problem.expression} = {result}", result)


def solution(problem: ArithmeticProblem, rng: random.Random, options: Options) -> str:
    """Return one solution of the corpus."""
    if rng.random() < options.careful[problem.level - 1]:
        return worked_solution(problem.expression, lambda: rng.random() < options.slip)
    return hasty_solution(problem, options.hasty_wrong, rng)


def score(response: str, answer: str) -> float:
    """Return 1.0 where the response ends, after its thoughts, with the answer in a box, else 0.0."""
    found = re.fullmatch(r".*</think>\\boxed\{(\d+)\}", response, re.DOTALL)
    return float(found is not None and found[1] == answer)


def corpus(options: Options) -> pretraining.Corpus:
    """Return the problems, their solutions and the tokenizer for them."""
    return pretraining.Corpus(
        tokenizer=pretraining.build_tokenizer(PIECES, TEXT, MARKS, VOCABULARY),
        problems=generate,
        solution=partial(solution, options=options),
        max_tokens=MAX_RESPONSE_TOKENS,
        reward=score,
        group=lambda problem: f"level {problem.level}",
    )


if __name__ == "__main__":
    given = tyro.cli(Options, description=__doc__)
    pretraining.run(corpus(given), given)
