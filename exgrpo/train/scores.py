"""Pass@1, avg@k and unbiased pass@k from graded answers, with standard errors over questions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np


@dataclass(frozen=True)
class SourceScore:
    """Scores of one data source.

    Attributes:
        questions: different questions.
        answers: graded answers to them.
        pass_rate: mean over questions of the fraction of right answers: Pass@1, and avg@k with k answers each.
        standard_error: of pass_rate, over questions.
        pass_at: for k = 2, 4, 8, ... up to the answers every question has, the probability that one of k is right.
    """

    questions: int
    answers: int
    pass_rate: float
    standard_error: float
    pass_at: dict[int, float]


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k answers is right, from `right` of `samples`.

    1 - C(samples - right, k) / C(samples, k): the fraction of the k-subsets of the answers that hold a right one.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k: {k} is not between 1 and the {samples} answers")
    return 1 - comb(samples - right, k) / comb(samples, k)


def score_source(rights: Sequence[Sequence[bool]]) -> SourceScore:
    """Scores from the verdicts on each question's answers; every question has at least one."""
    rates = np.array([np.mean(verdicts) for verdicts in rights])
    fewest = min(len(verdicts) for verdicts in rights)
    ks = [2**i for i in range(1, fewest.bit_length()) if 2**i <= fewest]
    return SourceScore(
        questions=len(rights),
        answers=sum(len(verdicts) for verdicts in rights),
        pass_rate=float(rates.mean()),
        # Of one question nothing can be said about the spread over questions.
        standard_error=float(rates.std(ddof=1) / np.sqrt(len(rates))) if len(rates) > 1 else float("nan"),
        pass_at={k: float(np.mean([pass_at_k(len(v), sum(v), k) for v in rights])) for k in ks},
    )


def score(answers: Iterable[tuple[str, str, bool]]) -> dict[str, SourceScore]:
    """Scores by source from (source, question, right) of every answer.

    Rows that ask the same question of the same source, as in files that repeat each row 32 times, count as one
    question with more answers.
    """
    by_source: dict[str, dict[str, list[bool]]] = {}
    for source, question, right in answers:
        by_source.setdefault(source, {}).setdefault(question, []).append(right)
    return {source: score_source(list(questions.values())) for source, questions in sorted(by_source.items())}


def score_all(answers: Iterable[tuple[str, str, bool]]) -> SourceScore:
    """The scores of `score` over the questions of all sources together."""
    (overall,) = score(("all", f"{source}\0{question}", right) for source, question, right in answers).values()
    return overall


def average(scores: dict[str, SourceScore]) -> float:
    """The plain mean of Pass@1 over sources, as the paper averages its benchmarks."""
    return float(np.mean([source.pass_rate for source in scores.values()]))
