r"""Pretrain the tiny model of the countdown task and save it, with its tokenizer, in Hugging Face format.

The corpus is synthetic and, like real corpora, of mixed quality. Each problem is answered in one of two manners:

- careful: the operations one by one, then the expression. A careful solution reaches the target, or, at a small rate,
  it does right operations that lead elsewhere.
- hasty: an expression is stated at once. It is the nearest of a few random ones, and seldom right.

A problem is made from a random expression, which is its careful solution. So the model learns to spread its answers
over the right expressions of a problem. The problems are those of the `pretrain` split, of all difficulties.

Run it from the repository: `python -m recipes.countdown.pretrain`. The result depends only on the seed and on the
arithmetic of the machine.
"""

import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro

from exgrpo.train.data.countdown import (
    LARGEST,
    MAX_RESPONSE_TOKENS,
    MODEL_FOLDER,
    Problem,
    format_solution,
    generate,
    random_expression,
    reward,
    reward_key,
    worked_solution,
)
from recipes import pretraining

PIECES = r" ?[A-Za-z]+|\d{1,2}|[()]| ?[^\sA-Za-z\d()]+ ?|\s+"
"""Numbers of up to two digits, words, brackets, and operators with their spaces."""
TEXT = f"Make 1 from 2, 3. 4 + 5 - 6 * 7 / 8 = 9 ({' '.join(map(str, range(LARGEST + 1)))})"
MARKS = ("<think>", "</think>", "\\boxed{")
VOCABULARY = 384


@dataclass(frozen=True)
class Options(pretraining.Options):
    """What the pretraining does; the defaults make the shipped model."""

    output: Path = MODEL_FOLDER
    """Folder for the model and the tokenizer."""
    steps: int = 1200
    """Optimiser steps."""
    problems: int = 40_000
    """Different problems in the corpus; each pass answers them anew."""
    shares: tuple[float, float, float, float] = (0.2, 0.65, 0.15, 0.0)
    """Shares of the difficulties 1 to 4 in the corpus."""
    careful: float = 0.7
    """Share of careful solutions; the others are hasty."""
    astray: float = 0.2
    """Share of careful solutions that lead to another number than the target."""
    guesses: int = 3
    """Random expressions of which a hasty solution states the nearest."""


def solution(problem: Problem, rng: random.Random, options: Options) -> str:
    """Return one solution of the corpus."""
    numbers = list(problem.solution.numbers())
    if rng.random() < options.careful:
        astray = rng.random() < options.astray
        return worked_solution(random_expression(numbers, rng) if astray else problem.solution)
    guesses = [random_expression(numbers, rng) for _ in range(options.guesses)]
    return format_solution("", min(guesses, key=lambda guess: abs(guess.value - problem.solution.value)))


def corpus(options: Options) -> pretraining.Corpus:
    """Return the problems, their solutions and the tokenizer for them."""
    return pretraining.Corpus(
        tokenizer=pretraining.build_tokenizer(PIECES, TEXT, MARKS, VOCABULARY),
        problems=pretraining.mixture(generate, options.shares),
        solution=partial(solution, options=options),
        max_tokens=MAX_RESPONSE_TOKENS,
        reward=reward,
        group=lambda problem: f"difficulty {problem.difficulty}",
        key=reward_key,
    )


if __name__ == "__main__":
    given = tyro.cli(Options, description=__doc__)
    pretraining.run(corpus(given), given)
