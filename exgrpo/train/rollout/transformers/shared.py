"""Rollouts by the trainer's own model, where one process has it whole: no copy, and nothing to push."""

from collections.abc import Iterable

import torch

from exgrpo.train.config import Config
from exgrpo.train.distributed import World
from exgrpo.train.policy.zero3 import Policy, kept_whole
from exgrpo.train.rollout.settings import EngineSettings
from exgrpo.train.rollout.transformers.attention import ONE_TOKEN
from exgrpo.train.rollout.transformers.engine import TransformersEngine, attends_one_token


class SharedEngine(TransformersEngine):
    """The policy generates: it has its present weights, adapters beside weights in 4 bits included.

    Awake, its module is in evaluation mode and has the attention for one token. Asleep, it is as the trainer left it.
    So nothing else may use the policy while the engine is awake: `rollout.ahead` needs servers.

    Args:
        settings: how to generate.
        world: the process that is alone.
        policy: kept whole.
    """

    def __init__(self, settings: EngineSettings, world: World, policy: Policy) -> None:
        super().__init__(settings, world, policy.model)
        self._policy = policy
        self._one_token = attends_one_token(settings, policy.model)
        self._trainers: tuple[bool, str] | None = None  # mode and attention of the trainer, while it is awake

    def push_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Nothing: the module has them."""

    def differing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """See `RolloutEngine.differing`."""
        pairs = zip(weights, self._policy.weights(), strict=True)
        return [name for (name, weight), (_, own) in pairs if not torch.equal(own, weight.to(own.device))]

    def wake(self) -> None:
        """Take the module from the trainer."""
        if self._trainers is None:
            self._trainers = self.model.training, self.model.config._attn_implementation
            self.model.eval()
            if self._one_token:
                self.model.set_attn_implementation(ONE_TOKEN)

    def sleep(self) -> None:
        """Give the module back."""
        if self._trainers is not None:
            training, attention = self._trainers
            self._trainers = None
            self.model.train(training)
            if self._one_token:
                self.model.set_attn_implementation(attention)

    def close(self) -> None:
        """Let go of the module."""
        del self.model, self._policy


def shares_policy(config: Config, ranks: int) -> bool:
    """Whether the policy itself generates: by transformers, where one process keeps it whole."""
    return config.rollout.engine == "transformers" and kept_whole(config, ranks)
