"""Rollouts by the trainer's own model, where one process has it whole: no copy, and nothing to push."""

from collections.abc import Iterable

import torch
from torch import nn

from exgrpo.train.common.distributed import World
from exgrpo.train.config.options import Config
from exgrpo.train.policy.attention import ONE_TOKEN
from exgrpo.train.policy.policy import Policy
from exgrpo.train.rollout.engine import EngineSettings
from exgrpo.train.rollout.transformers.engine import TransformersEngine, attends_one_token


class SharedEngine(TransformersEngine):
    """The policy generates: it has its present weights, adapters beside weights in 4 bits included.

    Awake, its module is as a copy would be, so its answers are those of a copy: in evaluation mode, with plain layers
    and the attention for one token, and no parameter is trained, for PyTorch chooses its products by that, too. Asleep,
    it is as the trainer left it. So nothing else may use the policy while the engine is awake: `rollout.ahead` needs
    servers.

    Args:
        settings: how to generate.
        world: the process that is alone.
        policy: of that process, whole.
    """

    def __init__(self, settings: EngineSettings, world: World, policy: Policy) -> None:
        super().__init__(settings, world, policy.model)
        self._policy = policy
        self._one_token = attends_one_token(settings, policy.model)
        # While it is awake: the trainer's mode and attention, and the parameters that are trained.
        self._trainers: tuple[bool, str, list[nn.Parameter]] | None = None

    def push_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Nothing: the module has them."""

    def differing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """See `RolloutEngine.differing`."""
        pairs = zip(weights, self._policy.weights(), strict=True)
        return [name for (name, weight), (_, own) in pairs if not torch.equal(own, weight.to(own.device))]

    def wake(self) -> None:
        """Take the module from the trainer."""
        if self._trainers is None:
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self._trainers = self.model.training, self.model.config._attn_implementation, trained
            self.model.eval().requires_grad_(False)
            if self._policy.compiled:  # they would be compiled again and again, as the cache grows
                torch.compiler.set_stance("force_eager")
            if self._one_token:
                self.model.set_attn_implementation(ONE_TOKEN)

    def sleep(self) -> None:
        """Give the module back."""
        if self._trainers is not None:
            (training, attention, trained), self._trainers = self._trainers, None
            self.model.train(training)
            for parameter in trained:
                parameter.requires_grad_()
            if self._policy.compiled:
                torch.compiler.set_stance("default")
            if self._one_token:
                self.model.set_attn_implementation(attention)

    def close(self) -> None:
        """Let go of the module."""
        del self.model, self._policy


def shares_policy(config: Config, ranks: int) -> bool:
    """Whether the policy itself generates: by transformers, where one process has it whole."""
    return config.rollout.engine == "transformers" and ranks == 1
