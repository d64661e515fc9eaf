"""Checks of the ends of answers for every rollout engine."""

import numpy as np


def check_ends(answers, eos, most):
    """Answers of [R] token ids, whether they are finished and log-probs end with their first EOS, or are cut."""
    assert {finished for _, finished, _ in answers} == {True, False}
    for response, finished, log_prob in answers:
        ends = np.flatnonzero(np.isin(response, eos)).tolist()
        assert ends == ([len(response) - 1] if finished else [])
        assert finished or len(response) == most
        assert log_prob is None or len(log_prob) == len(response)
    assert {response[-1] for response, finished, _ in answers if finished} == set(eos)
