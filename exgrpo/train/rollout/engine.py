"""The common interface of rollout engines, and the settings they are made with."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from exgrpo.train.common.records import EngineCounts, Rollout, TokenIds
from exgrpo.train.common.seeds import derive_seed
from exgrpo.train.config.options import Config
from exgrpo.train.config.rollout import RolloutConfig
from exgrpo.train.policy.source import ModelSource
from exgrpo.train.policy.tokenizer import DTYPES, Pretrained
from exgrpo.train.rollout.stops import NO_STOPS, Stops

Enough = Callable[[], bool]
"""Asked after each answer of a call: True ends the call early."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    Attributes:
        max_tokens: maximum length of an answer.
        temperature: above 0.
        top_p: nucleus probability; 1: off.
        log_prob: True if rollouts carry log-probs.
        stop: strings that end an answer, besides EOS.
        top_k: number of most likely tokens to sample from; 0: all.
        min_p: minimum probability relative to the most likely token; 0: off.
        allowed_tokens: True if rollouts carry, for each token, the ids that top-p, top-k and min-p allowed.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    log_prob: bool = False
    stop: Stops = NO_STOPS
    top_k: int = 0
    min_p: float = 0.0
    allowed_tokens: bool = False


@dataclass(frozen=True, eq=False)
class Request:
    """Request for several answers to one prompt.

    Attributes:
        prompt: [P] token ids.
        seed: one seed for all of these answers, below 2^63.
        begun: [count] tokens with which each answer begins, with the log-probs of the policy that wrote them or
            without; None: no tokens. Empty: no answer is begun. Engines are called by `generate` then.
    """

    prompt: TokenIds
    count: int
    sampling: Sampling
    seed: int
    begun: tuple[Rollout | None, ...] = ()

    def rest(self, sample: int, begun: Rollout | None) -> "Request":
        """Return the request for what follows the beginning of an answer."""
        written = np.empty(0, np.int32) if begun is None else begun.response
        left = self.sampling.max_tokens - len(written)
        return Request(
            prompt=np.concatenate([self.prompt, written]),
            count=1,
            sampling=replace(
                self.sampling, max_tokens=left, stop=replace(self.sampling.stop, before=tuple(written.tolist()))
            ),
            # Not the numbers that the beginning was drawn with, nor those of another answer.
            seed=derive_seed(self.seed, "rest", sample, len(written)),
        )


@dataclass(frozen=True, eq=False)
class Finished:
    """An answer: number `sample` (from 0) of the call's request number `request`.

    It is finished, as long as possible, or, once a call has enough, what is written so far.
    """

    request: int
    sample: int
    rollout: Rollout


class RolloutEngine(Protocol):
    """Generates answers with a copy of the policy, or with the policy itself.

    Attributes:
        unrepeatable: reason why the same seed may give other rollouts; None: it gives the same ones.
        free_log_prob: True if `Sampling.log_prob` costs next to nothing.
        ranks: number of neighbouring ranks that form one engine; they are called together with the same arguments.
    """

    unrepeatable: str | None
    free_log_prob: bool
    ranks: int

    def generate(self, requests: Sequence[Request], enough: Enough | None = None) -> Iterator[Finished]:
        """Sample the requested answers and yield each as soon as it is finished, in any order.

        The requests of a call may differ only in lengths and stop strings. If `unrepeatable` is None, the same call
        gives the same answers. If possible, the answers to a request depend on its seed and the weights alone, up to
        rounding, and not on the other requests or on the process.

        The caller's random state is unchanged, also between two answers. A response ends with its EOS token or with
        the token that completes a stop string (finished), or is cut after `max_tokens` (not finished). With
        `log_prob`, rollouts carry the engine's log-probs under the distribution that was sampled from (temperature
        and allowed tokens applied), and entropies if the engine has them.

        Once `enough`, where it is given, returns True, the call ends: it yields what is written of the other answers,
        not finished and shorter than `max_tokens`, and nothing of those without a token. Servers do not take it.

        It does not wait for other ranks. Engines that run elsewhere (servers) may be called in a separate thread.

        Raises:
            RolloutError: during iteration, if this rank's answers cannot be generated.
        """

    def push_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights; names are those of the Hugging Face model, tied weights come once.

        A collective call. Each rank must iterate over all weights, since iteration gathers them; the iterable can be
        iterated again.
        """

    def differing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Return the names of weights that differ from those in the engine, as far as it can detect.

        A collective call, as `push_weights`; the engine is awake.
        """

    def counts(self) -> EngineCounts:
        """Return the counters since the last call of this method."""

    def sleep(self) -> None:
        """Give back accelerator memory until `wake`."""

    def wake(self) -> None:
        """Get ready to generate; a collective call.

        An engine that dropped its weights in sleep iterates over those of the last push again.
        """

    def close(self) -> None:
        """Free everything; the engine is not used again."""


def is_whole(answer: Rollout, max_tokens: int) -> bool:
    """True if an answer is finished or as long as possible."""
    return answer.finished or len(answer.response) >= max_tokens


def generate(engine: RolloutEngine, requests: Sequence[Request], enough: Enough | None = None) -> Iterator[Finished]:
    """Generate as `RolloutEngine.generate`, also answers that are begun; those that are whole are yielded as they are.

    A begun answer becomes a request of its own, whose prompt goes on with its tokens.
    """
    asked: list[Request] = []
    of_asked: list[tuple[int, int, Rollout | None]] = []
    for i, request in enumerate(requests):
        if not request.begun:
            asked.append(request)
            of_asked.append((i, 0, None))
        for sample, begun in enumerate(request.begun):
            if begun is not None and is_whole(begun, request.sampling.max_tokens):
                yield Finished(i, sample, begun)
            else:
                asked.append(request.rest(sample, begun))
                of_asked.append((i, sample, begun))
    if enough and enough():
        return
    for answer in engine.generate(asked, enough) if enough else engine.generate(asked):
        i, first, begun = of_asked[answer.request]
        rollout = answer.rollout
        if begun is not None:
            rollout = Rollout.joined([begun, rollout], finished=rollout.finished)
        yield Finished(i, first + answer.sample, rollout)


def collect(requests: Sequence[Request], finished: Iterable[Finished]) -> list[list[Rollout]]:
    """Return the answers to each request in sampling order, once all are finished."""
    answers = {(one.request, one.sample): one.rollout for one in finished}
    return [[answers[i, sample] for sample in range(request.count)] for i, request in enumerate(requests)]


@dataclass(frozen=True)
class EngineSettings:
    """Settings of all rollout engines; each engine reads those it needs.

    Attributes:
        eos: token ids that end a response; at least one.
        rollout: engine, longest response, sizes and servers.
    """

    source: ModelSource
    dtype: torch.dtype
    eos: tuple[int, ...]
    pad: int
    max_prompt_tokens: int
    rollout: RolloutConfig
    attention: str = "sdpa"

    @property
    def length(self) -> int:
        """Tokens of the longest prompt and response."""
        return self.max_prompt_tokens + self.rollout.max_tokens


def training_settings(config: Config, pretrained: Pretrained) -> EngineSettings:
    """Return the engine settings of a training run."""
    return EngineSettings(
        source=pretrained.model,
        dtype=DTYPES[config.policy.dtype],
        eos=pretrained.eos,
        pad=pretrained.pad,
        max_prompt_tokens=config.data.max_prompt_tokens,
        rollout=config.rollout,
        attention=config.policy.attention,
    )
