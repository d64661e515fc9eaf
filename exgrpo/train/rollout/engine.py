"""The interface that every rollout engine has, and the settings that it is made with."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from exgrpo.train.common.records import EngineCounts, Rollout, TokenIds
from exgrpo.train.config.options import Config
from exgrpo.train.config.rollout import RolloutConfig
from exgrpo.train.policy.source import ModelSource
from exgrpo.train.policy.tokenizer import DTYPES, Pretrained
from exgrpo.train.rollout.stops import NO_STOPS, Stops


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled.

    Attributes:
        max_tokens: of each at most.
        temperature: above 0.
        top_p: of the nucleus; 1: all words are in it.
        log_prob: whether rollouts carry log-probs.
        stop: strings that end an answer, too.
        top_k: so many of the likeliest words; 0: all.
        min_p: words with at least so much of the likeliest one's probability; 0: all.
        kept: whether rollouts carry the words that the three have left for each token.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    log_prob: bool = False
    stop: Stops = NO_STOPS
    top_k: int = 0
    min_p: float = 0.0
    kept: bool = False


@dataclass(frozen=True, eq=False)
class Request:
    """Some answers to one prompt.

    Attributes:
        prompt: [P] token ids.
        count: answers.
        sampling: how they are sampled.
        seed: below 2^63, of all of them.
    """

    prompt: TokenIds
    count: int
    sampling: Sampling
    seed: int


@dataclass(frozen=True, eq=False)
class Finished:
    """An answer that has just been finished: the `sample`-th one (from 0) to the `request`-th request of the call."""

    request: int
    sample: int
    rollout: Rollout


class RolloutEngine(Protocol):
    """Generates answers with a copy of the policy, or with the policy itself.

    Attributes:
        unrepeatable: why the same seed may give other rollouts; None where it gives the same ones.
        free_log_prob: whether `Sampling.log_prob` costs next to nothing.
        ranks: how many neighbouring ranks make up one engine; they are called together with the same arguments.
    """

    unrepeatable: str | None
    free_log_prob: bool
    ranks: int

    def generate(self, requests: Sequence[Request]) -> Iterator[Finished]:
        """Sample the answers that are asked for and give each as soon as it is finished, in any order.

        All requests of a call are sampled alike, but lengths and stop strings may differ.
        Where `unrepeatable` is None the same call gives the same answers. An engine that can lets the answers to a
        request depend on its seed and the weights alone, up to rounding: not on the other requests of the call, nor on
        the process.

        The caller's random state stays as it was, between the answers too. A response ends with its EOS token or with
        the token that completes a stop string (finished), or was cut after `max_tokens` (not finished). With
        `log_prob` every rollout carries the engine's own log-probs under the policy that was sampled from, at the
        temperature, and among the words that were kept, and its entropies where the engine knows them.

        It waits for no other rank and, where it runs elsewhere (servers), may be called in a thread of its own.

        Raises:
            RolloutError: while it is run through; this rank's share cannot be had.
        """

    def push_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights; names are those of the Hugging Face model, tied weights come once.

        All ranks call it together, and each must run through all weights: they are gathered on the way. They can be run
        through again.
        """

    def differing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Names of those of the weights with which the engine does not compute, as far as it can tell.

        All ranks call it together, as `push_weights`, while the engine is awake.
        """

    def counts(self) -> EngineCounts:
        """What was done since the last call of this method."""

    def sleep(self) -> None:
        """Give back accelerator memory until `wake`."""

    def wake(self) -> None:
        """Be ready to generate; all ranks call it together.

        An engine that drops its weights in sleep runs through those of the last push again.
        """

    def close(self) -> None:
        """Free everything; the engine is not used again."""


def collect(requests: Sequence[Request], finished: Iterable[Finished]) -> list[list[Rollout]]:
    """The answers to each request in the order of samples, once all are finished."""
    answers = {(one.request, one.sample): one.rollout for one in finished}
    return [[answers[i, sample] for sample in range(request.count)] for i, request in enumerate(requests)]


@dataclass(frozen=True)
class EngineSettings:
    """The settings of any rollout engine; each engine reads those that concern it.

    Attributes:
        source: the model.
        dtype: compute dtype.
        eos: token ids that end a response; at least one.
        pad: token id that fills prompts up.
        max_prompt_tokens: longest prompt.
        rollout: which engine, the longest response, sizes and servers.
        attention: attention implementation of transformers.
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
    """What a training run asks of its engine."""
    return EngineSettings(
        source=pretrained.model,
        dtype=DTYPES[config.policy.dtype],
        eos=pretrained.eos,
        pad=pretrained.pad,
        max_prompt_tokens=config.data.max_prompt_tokens,
        rollout=config.rollout,
        attention=config.policy.attention,
    )
