"""Held-out Pass@1."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from exgrpo.train.answers import Answerer
from exgrpo.train.data import Question
from exgrpo.train.rollout import Sampling


@dataclass(frozen=True)
class Evaluation:
    """Result over a set of questions.

    Attributes:
        pass_rate: Pass@1, the mean over questions of the fraction of right answers.
        standard_error: of pass_rate, over questions.
        by_source: Pass@1 of each data source.
        mean_tokens: mean response length.
        truncated: fraction of answers cut at the length limit.
    """

    pass_rate: float
    standard_error: float
    by_source: dict[str, float]
    mean_tokens: float
    truncated: float


def evaluate(
    answerer: Answerer, questions: Sequence[Question], samples: int, sampling: Sampling, seed: int
) -> Evaluation:
    """Answer every question `samples` times; all ranks work on it and get the same result."""
    answers = answerer.answer(questions, [samples] * len(questions), sampling, seed)
    right = np.array([np.mean([a.reward >= 1.0 for a in of_question]) for of_question in answers.of_question])
    sources = np.array([question.source for question in questions])
    return Evaluation(
        pass_rate=float(right.mean()),
        standard_error=float(right.std() / np.sqrt(len(right))),
        by_source={str(source): float(right[sources == source].mean()) for source in np.unique(sources)},
        mean_tokens=float(np.mean([len(rollout.response) for rollout in answers.rollouts])),
        truncated=float(np.mean([not rollout.finished for rollout in answers.rollouts])),
    )
