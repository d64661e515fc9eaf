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
    counted = np.sort(np.concatenate([of_row[far] for of_row, far in zip(squares, onward, strict=True)] or [[]]))
    means = np.cumsum(counted) / np.arange(1, len(counted) + 1)
    # The prefix means of sorted numbers do not fall: as many as are within the bound are the longest prefix.
    kept = int(np.count_nonzero(means <= options.second_moment))
    limit = counted[kept - 1] if kept else -1.0
    return [
        Weighed(answer.log_prob, (~far | (of_row <= limit)).astype(np.float32))
        for answer, of_row, far in zip(answers, squares, onward, strict=True)
    ]
