r"""Teach a pretrained language model to search in countdown, by supervised learning on generated answers.

An answer tries expressions of the numbers, each with its value, until one is right, and puts that one into a box:

    5 + 14 * 6 - 11 = 78
    14 * 6 - 11 * 5 = 29
    \boxed{14 * 6 - 11 * 5}

The expressions are random, and up to ten of them are wrong. So the model learns the form, the arithmetic and the check;
reinforcement learning can teach it which expressions to try, and how many. The problems are those of the `pretrain`
split.

Run it from the repository, on a GPU:

    python recipes/smollm2/prepare.py runs/models/SmolLM2-135M-Instruct
    python -m recipes.countdown.start --device cuda
"""

import random
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from exgrpo.train.data.expressions import Node, write
from exgrpo.train.data.tasks.countdown import (
    CountdownProblem,
    format_solution,
    generate,
    random_expression,
    reward,
    reward_key,
)
from recipes import pretraining

WRONG = 10
"""Wrong expressions in an answer, at most."""
MAX_RESPONSE_TOKENS = 256
"""In which the answers fit, with a token for each digit, sign and space."""


@dataclass(frozen=True)
class Options(pretraining.Training):
    """What the supervised start does; the defaults are for a model of 135 million parameters."""

    model: Path = Path("runs/models/SmolLM2-135M-Instruct")
    """Folder of the model to begin with, in Hugging Face format."""
    output: Path = Path("runs/models/SmolLM2-135M-countdown")
    """Folder for the model that was taught, in bf16, and its tokenizer."""
    steps: int = 600
    """Optimiser steps."""
    batch: int = 32
    """Answers in a step."""
    matrix_lr: float = 2e-4
    """Peak learning rate of the layers' matrices; it warms up and then falls by a cosine."""
    lr: float = 2e-4
    """Peak learning rate of all other parameters."""
    problems: int = 20_000
    """Different problems in the corpus; each pass answers them anew."""
    questions: int = 128
    """Held-out problems of the evaluation."""


def search(problem: CountdownProblem, rng: random.Random) -> str:
    """Return one answer of the corpus."""
    numbers, target = list(problem.solution.numbers()), problem.solution.value
    tried: list[Node] = []
    for _ in range(rng.randint(0, WRONG)):
        while (node := random_expression(numbers, rng)).value == target:
            pass
        tried.append(node)
    lines = [f"{write(node)} = {node.value}\n" for node in (*tried, problem.solution)]
    return "".join(lines) + format_solution(problem.solution)


def corpus_of(tokenizer: PreTrainedTokenizerFast) -> pretraining.Corpus:
    """Return the problems and their answers for the tokenizer of a model."""
    return pretraining.Corpus(
        tokenizer=tokenizer,
        problems=generate,
        solution=search,
        max_tokens=MAX_RESPONSE_TOKENS,
        reward=reward,
        group=lambda problem: f"difficulty {problem.difficulty}",
        key=reward_key,
    )


def main(options: Options) -> None:
    """Load, train, evaluate and save."""
    console = Console()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    corpus = corpus_of(AutoTokenizer.from_pretrained(options.model))
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(options.device)
    pretraining.train(model, corpus, options, console)
    model.to(torch.bfloat16).eval().save_pretrained(options.output)
    corpus.tokenizer.save_pretrained(options.output)
    pretraining.report(pretraining.evaluate_samples(model, corpus, options), options, console)
    console.print(f"saved in {options.output}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
