"""Requests to rollout engines, from what tests have at hand, and a check of their answers."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from exgrpo.train.common.records import Rollout, TokenIds
from exgrpo.train.rollout.engine import Request, RolloutEngine, Sampling, collect, generate


def requests_for(
    prompts: Sequence[TokenIds], counts: Sequence[int], sampling: Sampling, seeds: Sequence[int]
) -> list[Request]:
    """counts[i] answers to prompts[i] by seeds[i], all sampled in the same way."""
    return [Request(prompt, count, sampling, seed) for prompt, count, seed in zip(prompts, counts, seeds, strict=True)]


def check_ends(answers, eos, most):
    """Answers of [R] token ids, whether they are finished and log-probs end with their first EOS, or are cut."""
    assert {finished for _, finished, _ in answers} == {True, False}
    for response, finished, log_prob in answers:
        ends = np.flatnonzero(np.isin(response, eos)).tolist()
        assert ends == ([len(response) - 1] if finished else [])
        assert finished or len(response) == most
        assert log_prob is None or len(log_prob) == len(response)
    assert {response[-1] for response, finished, _ in answers if finished} == set(eos)


def in_two_parts(engine: RolloutEngine, requests: Sequence[Request], first: int) -> list[list[Rollout]]:
    """The answers to requests, of which a call writes at most so many tokens and another one the rest."""
    short = [replace(one, sampling=replace(one.sampling, max_tokens=first)) for one in requests]
    return continued(engine, requests, collect(short, engine.generate(short)))


def continued(
    engine: RolloutEngine, requests: Sequence[Request], begun: Sequence[Sequence[Rollout | None]]
) -> list[list[Rollout]]:
    """The answers to requests of which some may be begun."""
    asked = [replace(one, begun=tuple(of_one)) for one, of_one in zip(requests, begun, strict=True)]
    return collect(asked, generate(engine, asked))
