"""The sampling law against closed forms and chi-square tests (seeded, so that they cannot flicker)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from exgrpo.train.experience import bucket_log_weights, draw_questions
from exgrpo.train.experience.sampling import LAWS

K = 8


def buckets(sizes: dict[int, int]) -> np.ndarray:
    """Bucket of each question, in an order that mixes the buckets."""
    bucket = np.repeat(list(sizes), list(sizes.values())).astype(np.int16)
    return np.random.default_rng(0).permutation(np.concatenate([bucket, np.zeros(10, np.int16)]))


def test_gaussian_law_has_the_papers_weights():
    weights = np.exp(bucket_log_weights("gaussian", K))
    expected = [0.0044, 0.054, 0.242, 0.399, 0.242, 0.054, 0.0044]
    np.testing.assert_allclose(weights / np.sqrt(2 * np.pi), expected, atol=5e-4)


@pytest.mark.parametrize(
    ("law", "expected"),
    [
        ("uniform", [1, 1, 1, 1, 1, 1, 1]),
        ("linear", [1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8, 6 / 8, 7 / 8]),
        ("sqrt", np.sqrt(np.arange(1, 8) / 8)),
        ("linear_clip", [1 / 8, 2 / 8, 3 / 8, 4 / 8, 4 / 8, 4 / 8, 4 / 8]),
    ],
)
def test_other_laws(law, expected):
    np.testing.assert_allclose(np.exp(bucket_log_weights(law, K)), expected)


def test_unknown_law_is_named():
    with pytest.raises(ValueError, match="unknown sampling law 'gauss'; expected one of gaussian"):
        bucket_log_weights("gauss", K)


@pytest.mark.parametrize("law", [law for law in LAWS if law != "random"])
def test_buckets_are_drawn_by_the_law_over_the_non_empty_ones(law):
    sizes = {1: 50, 3: 50, 4: 200, 6: 400}
    bucket, log_weights = buckets(sizes), bucket_log_weights(law, K)
    rng = np.random.default_rng(1)
    drawn = np.concatenate([draw_questions(rng, bucket, 5, log_weights) for _ in range(4000)])
    observed = [np.sum(bucket[drawn] == k) for k in sizes]
    weights = np.exp(log_weights[[k - 1 for k in sizes]])
    assert stats.chisquare(observed, len(drawn) * weights / weights.sum()).pvalue > 0.01


def test_the_random_law_draws_every_buffered_question_alike():
    bucket, rng = buckets({1: 5, 4: 30, 7: 5}), np.random.default_rng(4)
    assert bucket_log_weights("random", K) is None
    drawn = np.concatenate([draw_questions(rng, bucket, 10, None) for _ in range(2000)])
    counts = np.bincount(drawn, minlength=len(bucket))[bucket > 0]
    statistic = np.sum((counts - counts.mean()) ** 2) / counts.mean() * 39 / 30
    assert 0.01 < stats.chi2(39).cdf(statistic) < 0.99


def test_members_of_a_bucket_are_equally_likely():
    bucket, rng = buckets({4: 40}), np.random.default_rng(2)
    drawn = np.concatenate([draw_questions(rng, bucket, 10, bucket_log_weights("gaussian", K)) for _ in range(2000)])
    counts = np.bincount(drawn, minlength=len(bucket))[bucket == 4]
    # Without replacement the counts vary less than multinomial ones by the factor (N - n) / (N - 1).
    statistic = np.sum((counts - counts.mean()) ** 2) / counts.mean() * 39 / 30
    assert 0.01 < stats.chi2(39).cdf(statistic) < 0.99


def test_what_a_small_bucket_cannot_supply_goes_to_the_others():
    # Equal weights, three draws, one member in bucket 3: it is drawn unless all three fall into bucket 5.
    bucket, rng = buckets({3: 1, 5: 20}), np.random.default_rng(3)
    log_weights = bucket_log_weights("uniform", K)
    took = [np.sum(bucket[draw_questions(rng, bucket, 3, log_weights)] == 3) for _ in range(4000)]
    assert stats.binomtest(int(sum(took)), 4000, 7 / 8).pvalue > 0.01


@given(st.lists(st.integers(0, 6), min_size=K - 1, max_size=K - 1), st.data())
def test_draws_are_distinct_buffered_questions(sizes, data):
    bucket = buckets(dict(enumerate(sizes, start=1)))
    count = data.draw(st.integers(0, sum(sizes)))
    law = data.draw(st.sampled_from(LAWS))
    drawn = draw_questions(
        np.random.default_rng(data.draw(st.integers(0, 99))), bucket, count, bucket_log_weights(law, K)
    )
    assert len(drawn) == len(set(drawn.tolist())) == count
    assert (bucket[drawn] > 0).all()


def test_a_very_narrow_law_still_draws_from_far_buckets():
    log_weights = bucket_log_weights("gaussian", K, sigma=1e-3)
    assert len(draw_questions(np.random.default_rng(0), buckets({1: 2, 7: 3}), 5, log_weights)) == 5


def test_too_large_a_count_is_refused():
    with pytest.raises(ValueError, match="6 questions asked for, 5 are buffered"):
        draw_questions(np.random.default_rng(0), buckets({1: 5}), 6, bucket_log_weights("uniform", K))
