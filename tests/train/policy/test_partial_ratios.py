"""Corrections by token of answers whose first token an earlier policy wrote, against exact expectations."""

from itertools import product

import numpy as np
import pytest

from exgrpo.train.common.step_batch import ENGINE
from exgrpo.train.config.objective import CorrectionConfig
from exgrpo.train.policy.correction import corrected
from tests.train.batches import Row, make_batch

STALE, NEW = np.array([0.7, -0.4, 0.1]), np.array([-0.2, 0.5, 0.3])
"""Logits of the first token under the policy that wrote it and under the present one."""


@pytest.mark.parametrize("independent", [True, False])
def test_ratios_by_token_give_the_policy_gradient_and_plain_reuse_does_not(independent):
    """All answers of two tokens, the first one by an earlier policy; the second one's logits may depend on the first.

    An expectation over all answers has no noise. With ratios by token the gradient at the first token is exact, and
    all of it if the rewards of the tokens add up and the second one is independent; ratios of answers are always exact.
    """
    rng = np.random.default_rng(0)
    second = np.tile(rng.normal(size=3), (3, 1)) if independent else rng.normal(size=(3, 3))
    reward = np.add.outer(rng.normal(size=3), rng.normal(size=3)) if independent else rng.normal(size=(3, 3))
    log_softmax = lambda logits: logits - np.log(np.exp(logits).sum(-1, keepdims=True))  # noqa: E731
    old, new, after = log_softmax(STALE), log_softmax(NEW), log_softmax(second)
    answers = list(product(range(3), range(3)))
    rows = [Row(0.0, (a, b), (old[a], after[a, b]), old_log_probs_from=ENGINE) for a, b in answers]
    batch = make_batch([(0, rows)])
    batch.fill(
        log_prob=np.concatenate([[new[a], after[a, b]] for a, b in answers]),
        advantage=[reward[a, b] for a, b in answers],
    )

    def gradient(first, factor):
        """Of the expected reward, by the logits of the first token, and of the second one behind each first one."""
        found = np.zeros((4, 3))
        for (a, b), (of_first, of_second) in zip(answers, factor.reshape(-1, 2), strict=True):
            weight = np.exp(first[a] + after[a, b]) * reward[a, b]
            found[0] += weight * of_first * (np.eye(3)[a] - np.exp(new))
            found[1 + (0 if independent else a)] += weight * of_second * (np.eye(3)[b] - np.exp(after[a]))
        return found

    exact = gradient(new, np.ones(18))
    weights = {
        name: corrected(batch, CorrectionConfig(behaviour="engine", correction=name, correction_bounds=(0, 100))).factor
        for name in ("tis", "sequence_tis")
    }
    by_token, by_answer, plain = (gradient(old, factor) for factor in (*weights.values(), np.ones(18)))
    np.testing.assert_allclose(by_token[0], exact[0], atol=1e-6)  # factors are fp32
    np.testing.assert_allclose(by_answer, exact, atol=1e-6)
    assert np.allclose(by_token, exact, atol=1e-6) == independent
    assert np.abs(plain[0] - exact[0]).max() > 0.02
