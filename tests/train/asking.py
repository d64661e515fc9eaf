"""Requests to rollout engines, from what tests have at hand."""

from collections.abc import Sequence

from exgrpo.train.common.records import TokenIds
from exgrpo.train.rollout.engine import Request, Sampling


def requests_for(
    prompts: Sequence[TokenIds], counts: Sequence[int], sampling: Sampling, seeds: Sequence[int]
) -> list[Request]:
    """counts[i] answers to prompts[i] by seeds[i], all sampled in the same way."""
    return [Request(prompt, count, sampling, seed) for prompt, count, seed in zip(prompts, counts, seeds, strict=True)]
