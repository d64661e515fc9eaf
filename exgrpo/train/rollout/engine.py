"""The interface that every rollout engine has."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from exgrpo.train.records import Rollout, TokenIds


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled: at most `max_tokens` each, temperature > 0, nucleus `top_p`."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    log_prob: bool = False


class RolloutEngine(Protocol):
    """Generates answers with a copy of the policy."""

    def generate(
        self, prompts: Sequence[TokenIds], counts: Sequence[int], sampling: Sampling, seed: int
    ) -> list[list[Rollout]]:
        """Sample counts[i] answers to prompts[i]. The caller's random state stays as it was.

        A response ends with its EOS token (finished), or was cut after `max_tokens` (not finished). With
        `sampling.log_prob` every rollout carries the engine's own log-probs.
        """

    def push_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights; names are those of the Hugging Face model, tied weights come once."""

    def differing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Names of those of the weights with which the engine does not compute, as far as it can tell."""

    def sleep(self) -> None:
        """Give back accelerator memory until `wake`."""

    def wake(self) -> None:
        """Be ready to take weights and generate."""

    def close(self) -> None:
        """Free everything; the engine is not used again."""
