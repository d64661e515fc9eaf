"""Pass@1, avg@k, unbiased pass@k and distinct right answers at k, with their uncertainty, and what answers lack."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Z = NormalDist().inv_cdf(0.975)


class Verdict(NamedTuple):
    """What is known of an answer."""

    source: str
    question: str
    right: bool
    finished: bool | None = True
    """False: it was cut at the length limit; None: the question was not asked, see `unasked`."""
    formed: bool | None = None
    """Whether it has the form that the reward needs; None: the reward cannot tell."""
    found: bool | None = None
    """Whether the reward finds any answer in it; None: the reward cannot tell."""
    key: int = 0
    """Of its solution, as in `Grades`; right answers to a question without a key count as one solution."""


def unasked(source: str, question: str, answers: int) -> list[Verdict]:
    """The answers that a row would have got which was left out, for its prompt is too long: so many wrong ones."""
    return [Verdict(source, question, False, finished=None)] * answers


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
        pass_at_error: standard error of each, over questions; None of one question.
        distinct_at: for the same k, the expected number of different solutions among the right ones of k answers.
        distinct_at_error: standard error of each, over questions; None of one question.
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
    pass_at_error: dict[int, float | None]
    distinct_at: dict[int, float]
    distinct_at_error: dict[int, float | None]
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
    return distinct_at_k(samples, [right], k)


def distinct_at_k(samples: int, right: Iterable[int], k: int) -> float:
    """Unbiased estimate of the number of different solutions among the right ones of k answers.

    Each solution counts 1 - C(samples - c, k) / C(samples, k), the fraction of the k-subsets of the answers that hold
    one of its c answers.

    Args:
        samples: answers to the question.
        right: of each solution, how many right answers give it.
        k: answers that are drawn without replacement.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k: {k} is not between 1 and the {samples} answers")
    return sum(1 - math.comb(samples - count, k) / math.comb(samples, k) for count in right)


def wilson(rate: float, count: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a rate among `count` > 0 answers, which need not be a whole number."""
    centre = rate + Z**2 / (2 * count)
    half = Z * math.sqrt(rate * (1 - rate) / count + (Z / (2 * count)) ** 2)
    scale = 1 + Z**2 / count
    # Rounding must not leave [0, 1].
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def effective_count(rates: npt.NDArray[np.float64], answers: int) -> float:
    """How many independent answers tell as much about Pass@1 as these questions do.

    That is the n whose binomial variance p (1 - p) / n equals the squared standard error over questions. Answers to one
    question resemble one another, so n lies between the number of questions, where they are all alike, and that of
    answers, where they are independent. Where all answers are right or all are wrong, their spread says nothing, and
    the lower bound is taken.

    Args:
        rates: [Q] fraction of right answers to each question.
        answers: to all questions.
    """
    questions, rate = len(rates), float(rates.mean())
    if questions == 1 or rate in (0.0, 1.0):
        return float(questions)
    variance = float(rates.var(ddof=1)) / questions
    return min(max(rate * (1 - rate) / variance, questions), answers) if variance else float(answers)


def score_source(verdicts: Sequence[Verdict]) -> SourceScore:
    """The scores of one source, whose answers all come here; there is at least one.

    Rows that ask the same question, as in files that repeat each row 32 times, count as one question with more answers.
    """
    samples = Counter(verdict.question for verdict in verdicts)
    solutions: dict[str, Counter[int]] = {question: Counter() for question in samples}
    for verdict in verdicts:
        if verdict.right:
            solutions[verdict.question][verdict.key] += 1
    counts, rights, answers = list(samples.values()), list(solutions.values()), len(verdicts)
    rates = np.array([right.total() / count for count, right in zip(counts, rights, strict=True)])
    low, high = wilson(float(rates.mean()), effective_count(rates, answers))
    ks = [2**i for i in range(1, min(counts).bit_length())]
    pairs = list(zip(counts, rights, strict=True))
    pass_at = {k: np.array([pass_at_k(count, right.total(), k) for count, right in pairs]) for k in ks}
    distinct_at = {k: np.array([distinct_at_k(count, right.values(), k) for count, right in pairs]) for k in ks}
    return SourceScore(
        questions=len(rates),
        answers=answers,
        pass_rate=float(rates.mean()),
        standard_error=_error(rates),
        low=low,
        high=high,
        pass_at={k: float(values.mean()) for k, values in pass_at.items()},
        pass_at_error={k: _error(values) for k, values in pass_at.items()},
        distinct_at={k: float(values.mean()) for k, values in distinct_at.items()},
        distinct_at_error={k: _error(values) for k, values in distinct_at.items()},
        left_out=len({verdict.question for verdict in verdicts if verdict.finished is None}),
        truncated=_lacking([verdict.finished for verdict in verdicts]),
        without_form=_lacking([verdict.formed for verdict in verdicts]),
        without_answer=_lacking([verdict.found for verdict in verdicts]),
    )


def _error(values: npt.NDArray[np.float64]) -> float | None:
    """The standard error of a mean over questions; None of one question."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None


def _lacking(having: Sequence[bool | None]) -> float | None:
    """The fraction of answers that lack something; None where there are none, or nobody knows."""
    known = [one for one in having if one is not None]
    return 1 - sum(known) / len(known) if known else None


def score(verdicts: Iterable[Verdict]) -> dict[str, SourceScore]:
    """Scores by source, in the order of their names."""
    of_source: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        of_source.setdefault(verdict.source, []).append(verdict)
    return {source: score_source(of_source[source]) for source in sorted(of_source)}


def score_all(verdicts: Iterable[Verdict]) -> SourceScore:
    """The scores over the questions of all sources together."""
    return score_source([verdict._replace(question=f"{verdict.source}\0{verdict.question}") for verdict in verdicts])


def average(scores: dict[str, SourceScore]) -> float:
    """The plain mean of Pass@1 over sources, as the paper averages its benchmarks."""
    return float(np.mean([source.pass_rate for source in scores.values()]))
