r"""Pretrain the tiny model of the colouring task and save it, with its tokenizer, in Hugging Face format.

The corpus is synthetic and, like real corpora, of mixed quality. It colours the nodes of a graph one after the other,
and writes before each node the colours of its neighbours that have one. At a rate that falls with the difficulty it
heeds them: then the colour is a random one of those that no neighbour has, as far as there is one. Otherwise the colour
is random. So the model knows the rule, and few of its answers to difficult problems are right. The problems are those
of the `pretrain` split, of all difficulties.

Run it from the repository: `python -m recipes.colouring.pretrain`. The result depends only on the seed and on the
arithmetic of the machine.
"""

import random
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path

import tyro

from exgrpo.train.data.tasks.colouring import (
    COLOURS,
    MAX_RESPONSE_TOKENS,
    MODEL_FOLDER,
    ColouringProblem,
    generate,
    reward,
    reward_key,
    worked_solution,
)
from recipes import pretraining

NODES = "abcdefgh"
PIECES = r"Colour a to [a-z] with R, G, B so that edges differ:| ?[A-Za-z]+(?:=[RGB])?|\d| ?[^\sA-Za-z\d]+|\s+"
"""The sentence of a question, an edge and the colour of a node are one token each."""
SENTENCES = [f"Colour a to {last} with R, G, B so that edges differ:" for last in NODES[-2:]]
TEXT = " ".join(
    [
        "".join(SENTENCES),
        *(a + b for a, b in combinations(NODES, 2)),
        *(node + "=" + colour for node in NODES for colour in COLOURS),
    ]
) + "".join(f";a={colour}" for colour in COLOURS)
MARKS = ("<think>", "</think>", "\\boxed{")
VOCABULARY = 448


@dataclass(frozen=True)
class Options(pretraining.Options):
    """What the pretraining does; the defaults make the shipped model."""

    output: Path = MODEL_FOLDER
    """Folder for the model and the tokenizer."""
    steps: int = 800
    """Optimiser steps."""
    problems: int = 30_000
    """Different problems in the corpus; each pass answers them anew."""
    shares: tuple[float, float, float, float] = (0.3, 0.25, 0.35, 0.1)
    """Shares of the difficulties 1 to 4 in the corpus."""
    careful: tuple[float, float, float, float] = (0.9, 0.6, 0.2, 0.1)
    """Rate at which the colour of a node is chosen by its edges, for the difficulties 1 to 4."""


def solution(problem: ColouringProblem, rng: random.Random, options: Options) -> str:
    """Return one solution of the corpus."""
    careful = options.careful[problem.difficulty - 1]
    colours: dict[str, str] = {}
    for node in problem.nodes:
        free = COLOURS
        if rng.random() < careful:
            near = {colours.get(a if b == node else b) for a, b in problem.edges if node in (a, b)}
            free = "".join(colour for colour in COLOURS if colour not in near) or COLOURS
        colours[node] = rng.choice(free)
    return worked_solution(problem, "".join(colours.values()))


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
