"""Draws by inverting the cumulative distribution, and the numbers that they take."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.train.rollout.engine import Sampling
from exgrpo.train.rollout.transformers.draws import Noise, draw, invert


def by_running_sum(probability, uniform):
    """The plain rule, token by token in float64."""
    reached = np.cumsum(np.asarray(probability, np.float64))
    return int(np.searchsorted(reached, uniform * reached[-1], side="right"))


@given(st.integers(1, 700), st.integers(0, 2**32 - 1), st.floats(0, 1, exclude_max=True))
def test_a_token_is_where_the_running_sum_passes_the_number(vocabulary, seed, uniform):
    probability = np.random.default_rng(seed).dirichlet(np.full(vocabulary, 0.2)).astype(np.float32)
    found = int(invert(torch.from_numpy(probability)[None], torch.tensor([uniform], dtype=torch.float64)))
    expected = by_running_sum(probability, uniform)
    # At the edge of a token, rounding may decide for its neighbour that has a probability.
    reached = np.cumsum(probability.astype(np.float64)) / probability.sum(dtype=np.float64)
    near = {expected} | {i for i in np.flatnonzero(probability) if abs(reached[i] - uniform) < 1e-12}
    near |= {int(np.flatnonzero(probability[i + 1 :])[0]) + i + 1 for i in near if probability[i + 1 :].any()}
    assert found == expected or (found in near and min(abs(reached - uniform)) < 1e-12)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("vocabulary", [3, 256, 257, 5000])
def test_a_token_without_probability_is_never_drawn(uniform, vocabulary):
    for only in {0, 1, vocabulary // 2, vocabulary - 1}:
        probability = torch.zeros(1, vocabulary)
        probability[0, only] = 1.0
        assert invert(probability, torch.tensor([uniform])).item() == only


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 0.8, 0), (9, 1, 0), (0, 1, 0.1), (12, 0.9, 0.02), (40, 1, 0)]
)
def test_draws_at_a_temperature_from_the_words_that_are_left(top_k, top_p, min_p):
    torch.manual_seed(0)
    logits = 2 * torch.randn(1, 40)
    uniform = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    sampling = Sampling(1, temperature=0.7, top_p=top_p, top_k=top_k, min_p=min_p, allowed_tokens=True)
    drawn = draw(logits.expand(20000, -1), uniform, sampling)
    order = logits[0].argsort(descending=True)
    ordered = (logits[0].double() / 0.7).softmax(-1)[order]
    ordered[top_k or 40 :] = 0
    ordered /= ordered.sum()
    ordered *= (ordered.cumsum(0) - ordered < top_p) & (ordered >= min_p * ordered[0])  # the least set that reaches it
    nucleus = torch.zeros_like(ordered)
    nucleus[order] = ordered / ordered.sum()
    left = nucleus.nonzero().flatten().tolist()
    assert all(words.tolist() == (left if len(left) < 40 else []) for words in drawn.allowed_tokens.lists())
    # Evenly spaced numbers give each token its share of them, but for one at each of its edges.
    counts = torch.bincount(drawn.token, minlength=40)
    assert ((counts - 20000 * nucleus).abs() <= 1).all()
    torch.testing.assert_close(drawn.log_prob.double(), nucleus.log()[drawn.token], atol=1e-5, rtol=0)
    entropy = -(nucleus[nucleus > 0] * nucleus[nucleus > 0].log()).sum()
    torch.testing.assert_close(drawn.entropy.double(), entropy.expand(20000), atol=1e-5, rtol=0)


def test_noise_belongs_to_the_answer_and_the_position():
    keys = [(7, 0), (7, 1), (8, 0)]
    noise = Noise(keys)
    everyone = np.arange(3)
    together = np.stack([noise.at(position, everyone) for position in range(130)])
    for number, key in enumerate(keys):
        own = Noise([key])
        alone = [own.at(position, np.array([0]))[0] for position in range(130)]
        np.testing.assert_array_equal(together[:, number], alone)
    assert len(np.unique(together)) == together.size
    assert abs(together.mean() - 0.5) < 4 * (12 * together.size) ** -0.5
