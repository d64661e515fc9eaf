"""Pass@1, avg@k and unbiased pass@k from graded answers, with their uncertainty, and what answers lack."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import comb
from typing import NamedTuple

import numpy as np

from exgrpo.train.evaluate.interval import effective_count, wilson


class Verdict(NamedTuple):
    """What is known of an answer."""

    source: str
    question: str
    right: bool
    finished: bool = True
    """False: it was cut at the length limit."""
    formed: bool | None = None
    """Whether it has the form that the reward needs; None: the reward cannot tell."""
    found: bool | None = None
    """Whether the reward finds any answer in it; None: the reward cannot tell."""
    key: int = 0
    """Of its solution, as in `Grades`; right answers to a question without a key count as one solution."""


class LeftOut(NamedTuple):
    """A row that was not asked, with the answers it would have got: so many count as wrong."""

    source: str
    question: str
    answers: int


@dataclass(frozen=True)
class SourceScore:
    """Scores of one data source.

    Attributes:
        questions: different questions, those that were left out included.
        answers: answers to them; a question that was left out has as many wrong ones as it would have been asked for.
        pass_rate: mean over questions of the fraction of right answers: Pass@1, and avg@k with k answers each.
        standard_error: of pass_rate, over questions; None of one question.
        low, high: 95 % confidence interval of pass_rate: Wilson's, with the effective number of answers.
        pass_at: for k = 2, 4, 8, ... up to the answers every question has, the probability that one of k is right.
        left_out: those of the questions that were not asked, for their prompts are too long.
        truncated: fraction of the given answers that were cut at the length limit; None where there are none.
        without_form: fraction of the given answers without the form that the reward needs; None where it cannot tell.
        without_answer: fraction of the given answers in which the reward finds no answer; None where it cannot tell.
    """

    questions: int
    answers: int
    pass_rate: float
    standard_error: float | None
    low: float
    high: float
    pass_at: dict[int, float]
    left_out: int
    truncated: float | None
    without_form: float | None
    without_answer: float | None


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


def score_source(verdicts: Sequence[Verdict], left_out: Sequence[LeftOut] = ()) -> SourceScore:
    """The scores of one source, whose rows all come here; there is at least one row.

    Rows that ask the same question, as in files that repeat each row 32 times, count as one question with more answers.
    """
    by_question: dict[str, list[bool]] = {}
    for verdict in verdicts:
        by_question.setdefault(verdict.question, []).append(verdict.right)
    for row in left_out:
        by_question.setdefault(row.question, []).extend([False] * row.answers)
    rights = list(by_question.values())
    rates, answers = np.array([np.mean(of_question) for of_question in rights]), sum(map(len, rights))
    low, high = wilson(float(rates.mean()), effective_count(rates, answers))
    fewest = min(map(len, rights))
    ks = [2**i for i in range(1, fewest.bit_length()) if 2**i <= fewest]
    return SourceScore(
        questions=len(rights),
        answers=answers,
        pass_rate=float(rates.mean()),
        standard_error=float(rates.std(ddof=1) / np.sqrt(len(rates))) if len(rates) > 1 else None,
        low=low,
        high=high,
        pass_at={k: float(np.mean([pass_at_k(len(v), sum(v), k) for v in rights])) for k in ks},
        left_out=len({row.question for row in left_out}),
        truncated=_lacking([verdict.finished for verdict in verdicts]),
        without_form=_lacking([verdict.formed for verdict in verdicts]),
        without_answer=_lacking([verdict.found for verdict in verdicts]),
    )


def _lacking(having: Sequence[bool | None]) -> float | None:
    """The fraction of answers that lack something; None where there are none, or nobody knows."""
    known = [one for one in having if one is not None]
    return 1 - sum(known) / len(known) if known else None


def score(verdicts: Iterable[Verdict], left_out: Iterable[LeftOut] = ()) -> dict[str, SourceScore]:
    """Scores by source, in the order of their names."""
    answered: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        answered.setdefault(verdict.source, []).append(verdict)
    not_asked: dict[str, list[LeftOut]] = {}
    for row in left_out:
        not_asked.setdefault(row.source, []).append(row)
    sources = sorted(answered.keys() | not_asked.keys())
    return {source: score_source(answered.get(source, ()), not_asked.get(source, ())) for source in sources}


def score_all(verdicts: Iterable[Verdict], left_out: Iterable[LeftOut] = ()) -> SourceScore:
    """The scores over the questions of all sources together."""
    return score_source(
        [verdict._replace(question=f"{verdict.source}\0{verdict.question}") for verdict in verdicts],
        [row._replace(question=f"{row.source}\0{row.question}") for row in left_out],
    )


def average(scores: dict[str, SourceScore]) -> float:
    """The plain mean of Pass@1 over sources, as the paper averages its benchmarks."""
    return float(np.mean([source.pass_rate for source in scores.values()]))
