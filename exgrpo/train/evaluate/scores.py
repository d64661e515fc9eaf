"""Pass@1, avg@k and unbiased pass@k from graded answers, with standard errors over questions."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import comb
from typing import TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True)
class SourceScore:
    """Scores of one data source.

    Attributes:
        questions: different questions, those that were left out included.
        answers: answers to them; a question that was left out has as many wrong ones as it would have been asked for.
        pass_rate: mean over questions of the fraction of right answers: Pass@1, and avg@k with k answers each.
        standard_error: of pass_rate, over questions.
        pass_at: for k = 2, 4, 8, ... up to the answers every question has, the probability that one of k is right.
        left_out: those of the questions that were not asked, for their prompts are too long.
    """

    questions: int
    answers: int
    pass_rate: float
    standard_error: float
    pass_at: dict[int, float]
    left_out: int = 0


def question_key(text: str, gold: str) -> str:
    """What rows of one source have in common that ask the same question."""
    return f"{text}\0{gold}"


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k answers is right, from `right` of `samples`.

    1 - C(samples - right, k) / C(samples, k): the fraction of the k-subsets of the answers that hold a right one.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k: {k} is not between 1 and the {samples} answers")
    return 1 - comb(samples - right, k) / comb(samples, k)


def score_source(rights: Sequence[Sequence[bool]], left_out: int = 0) -> SourceScore:
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
        left_out=left_out,
    )


def score(
    answers: Iterable[tuple[str, str, bool]], left_out: Iterable[tuple[str, str, int]] = ()
) -> dict[str, SourceScore]:
    """Scores by source.

    Rows that ask the same question of the same source, as in files that repeat each row 32 times, count as one
    question with more answers.

    Args:
        answers: (source, question, right) of every answer.
        left_out: (source, question, answers) of every row that was not asked: so many answers count as wrong.
    """
    by_source: dict[str, dict[str, list[bool]]] = {}
    for source, question, right in answers:
        by_source.setdefault(source, {}).setdefault(question, []).append(right)
    not_asked: dict[str, set[str]] = {}
    for source, question, count in left_out:
        by_source.setdefault(source, {}).setdefault(question, []).extend([False] * count)
        not_asked.setdefault(source, set()).add(question)
    return {
        source: score_source(list(questions.values()), len(not_asked.get(source, ())))
        for source, questions in sorted(by_source.items())
    }


def score_all(answers: Iterable[tuple[str, str, bool]], left_out: Iterable[tuple[str, str, int]] = ()) -> SourceScore:
    """The scores of `score` over the questions of all sources together."""
    (overall,) = score(_of_one_source(answers), _of_one_source(left_out)).values()
    return overall


def _of_one_source(rows: Iterable[tuple[str, str, T]]) -> Iterator[tuple[str, str, T]]:
    return (("all", f"{source}\0{question}", value) for source, question, value in rows)


def average(scores: dict[str, SourceScore]) -> float:
    """The plain mean of Pass@1 over sources, as the paper averages its benchmarks."""
    return float(np.mean([source.pass_rate for source in scores.values()]))
