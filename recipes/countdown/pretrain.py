r"""Pretrain the tiny model of the countdown task and save it, with its tokenizer, in Hugging Face format.

The corpus is synthetic and, like real corpora, of mixed quality: most of its answers are right, the others are random
expressions of the numbers of the problem. A problem is made from a random expression, which is its right answer in the
corpus. So the model learns to spread its answers over the right expressions of a problem. The problems are those of the
`pretrain` split, of difficulties 1 to 3.

Run it from the repository: `python -m recipes.countdown.pretrain`. The result depends only on the seed and on the
arithmetic of the machine.
"""

import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro

from exgrpo.train.data.tasks.countdown import (
    LARGEST,
    MAX_RESPONSE_TOKENS,
    MODEL_FOLDER,
    CountdownProblem,
    format_solution,
    generate,
    random_expression,
    reward,
    reward_key,
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
    steps: int = 2500
    """Optimiser steps."""
    batch: int = 96
    """Solutions in a step."""
    problems: int = 40_000
    """Different problems in the corpus; each pass answers them anew."""
    shares: tuple[float, float, float, float] = (0.2, 0.7, 0.1, 0.0)
    """Shares of the difficulties 1 to 4 in the corpus."""
    right: float = 0.85
    """Share of right answers; the others are random expressions of the numbers."""


def solution(problem: CountdownProblem, rng: random.Random, options: Options) -> str:
    """Return one answer of the corpus."""
    if rng.random() < options.right:
        return format_solution(problem.solution)
    return format_solution(random_expression(list(problem.solution.numbers()), rng))


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
