"""A bound on the second moment of log-ratios (M2PO, arXiv 2510.01161, algorithm 1)."""

from collections.abc import Sequence

import numpy as np

from exgrpo.train.experience.rules import needs
from exgrpo.train.experience.weighing import ReplayedAnswer, Weighed, WeighOptions


@needs(term="ratio", present="values")
def weigh(answers: Sequence[ReplayedAnswer], options: WeighOptions) -> list[Weighed]:
    """w A, without the tokens whose ratio has gone too far in the direction of their advantage.

    Of the tokens with A > 0 and w > 1 or A < 0 and w < 1, those with the largest (log w)^2 are left out until the mean
    of the others is at most tau. All replayed tokens of a step count together. (The published code caps where the paper
    drops, and does so for each micro-batch.)
    """
    log_ratio = [answer.log_ratio for answer in answers]
    onward = [of_row * np.sign(answer.advantage) > 0 for of_row, answer in zip(log_ratio, answers, strict=True)]
    squares = [of_row.astype(np.float64) ** 2 for of_row in log_ratio]
    counted = np.concatenate([of_row[far] for of_row, far in zip(squares, onward, strict=True)] or [[]])
    order = np.argsort(counted, kind="stable")
    means = np.cumsum(counted[order]) / np.arange(1, len(counted) + 1)
    # The prefix means of sorted numbers do not fall: as many as are within the bound are the longest prefix.
    counted[order] = means <= options.second_moment
    kept = np.split(counted, np.cumsum([np.count_nonzero(far) for far in onward])[:-1])
    factors = [np.ones(len(far), np.float32) for far in onward]
    for factor, far, of_row in zip(factors, onward, kept, strict=False):
        factor[far] = of_row
    return [Weighed(answer.log_prob, factor) for answer, factor in zip(answers, factors, strict=True)]
