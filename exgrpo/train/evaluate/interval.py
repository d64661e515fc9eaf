"""The confidence interval of a pass rate."""

import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Z = NormalDist().inv_cdf(0.975)


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
