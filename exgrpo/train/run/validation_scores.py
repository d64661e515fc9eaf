"""Pass@1, avg@k, unbiased pass@k and distinct@k with their uncertainty, and fractions of malformed answers."""

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
    """Graded answer of an evaluation.

    Attributes:
        question: `question_key` of the question.
        right: True if its reward counts as success.
        finished: False: it was cut at the length limit; None: the question was not asked, as in `unasked`.
        formed: True if it has the form that the reward needs; None: the reward has no such check.
        found: True if the reward finds any answer in it; None: the reward has no such check.
        key: key of its solution, as in `Grades`; right answers to a question without keys count as one solution.
    """

    source: str
    question: str
    right: bool
    finished: bool | None = True
    formed: bool | None = None
    found: bool | None = None
    key: int = 0


def unasked(source: str, question: str, answers: int) -> list[Verdict]:
    """Return wrong answers for a question that was left out because its prompt is too long."""
    return [Verdict(source, question, False, finished=None)] * answers


@dataclass(frozen=True)
class SourceScore:
    """Scores of one data source.

    Attributes:
        questions: number of different questions, left-out ones included.
        answers: number of answers; left-out questions count with as many wrong ones as the others have.
        pass_rate: mean over questions of the fraction of right answers: Pass@1, and avg@k with k answers each.
        standard_error: standard error of pass_rate over questions; None for one question.
        low, high: 95 % confidence interval of pass_rate: Wilson's, with the effective number of answers.
        pass_at: for k = 2, 4, 8, ... up to the smallest number of answers, the probability that one of k is right.
        pass_at_error: standard error of each over questions; None for one question.
        distinct_at: for the same k, the expected number of different solutions among the right ones of k answers.
        distinct_at_error: standard error of each over questions; None for one question.
        left_out: number of questions left out because their prompts are too long.
        truncated: fraction of generated answers that were cut at the length limit; None without answers.
        without_form: fraction of generated answers without the form that the reward needs; None without such a check.
        without_answer: fraction of generated answers in which the reward finds no answer; None without such a check.
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
    """Return a key that is equal for rows with the same question and gold answer."""
    return f"{text}\0{gold}"


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Estimate without bias the probability that at least one of k answers is right, from `right` of `samples`.

    1 - C(samples - right, k) / C(samples, k): the fraction of the k-subsets of answers with a right one.
    """
    return distinct_at_k(samples, [right], k)


def distinct_at_k(samples: int, right: Iterable[int], k: int) -> float:
    """Estimate without bias the number of different solutions among the right ones of k answers.

    Each solution counts 1 - C(samples - c, k) / C(samples, k), the fraction of the k-subsets of answers with one of its
    c answers.

    Args:
        right: number of right answers with each solution.
        k: number of answers drawn without replacement.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k: {k} is not between 1 and the {samples} answers")
    return sum(1 - math.comb(samples - count, k) / math.comb(samples, k) for count in right)


def wilson(rate: float, count: float) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a rate among `count` > 0 answers, which need not be an integer."""
    centre = rate + Z**2 / (2 * count)
    half = Z * math.sqrt(rate * (1 - rate) / count + (Z / (2 * count)) ** 2)
    scale = 1 + Z**2 / count
    # Rounding must not leave [0, 1].
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def effective_count(rates: npt.NDArray[np.float64], answers: int) -> float:
    """Return the number of independent answers with the same information about Pass@1.

    This is the n whose binomial variance p (1 - p) / n equals the squared standard error over questions. Answers to one
    question are correlated, so n lies between the number of questions (all alike) and that of answers (independent). If
    all answers are right or all are wrong, the spread has no information, and n is the lower bound.

    Args:
        rates: [Q] fraction of right answers to each question.
        answers: number of answers to all questions.
    """
    questions, rate = len(rates), float(rates.mean())
    if questions == 1 or rate in (0.0, 1.0):
        return float(questions)
    variance = float(rates.var(ddof=1)) / questions
    return min(max(rate * (1 - rate) / variance, questions), answers) if variance else float(answers)


def score_source(verdicts: Sequence[Verdict]) -> SourceScore:
    """Score all answers of one source, of which there is at least one.

    Rows with the same question, as in files that repeat each row 32 times, count as one question with more answers.
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
    """Return the standard error of a mean over questions; None for one question."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None


def _lacking(having: Sequence[bool | None]) -> float | None:
    """Return the fraction of False among values that are not None; None if there are none."""
    known = [one for one in having if one is not None]
    return 1 - sum(known) / len(known) if known else None


def score(verdicts: Iterable[Verdict]) -> dict[str, SourceScore]:
    """Score answers by source, sorted by name."""
    of_source: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        of_source.setdefault(verdict.source, []).append(verdict)
    return {source: score_source(of_source[source]) for source in sorted(of_source)}


def score_all(verdicts: Iterable[Verdict]) -> SourceScore:
    """Score the questions of all sources together."""
    return score_source([verdict._replace(question=f"{verdict.source}\0{verdict.question}") for verdict in verdicts])


def average(scores: dict[str, SourceScore]) -> float:
    """Return the unweighted mean of Pass@1 over sources, as the paper averages its benchmarks."""
    return float(np.mean([source.pass_rate for source in scores.values()]))
