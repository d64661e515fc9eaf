"""The policy that a run starts from, kept as what a divergence, or a regression, refers to.

With adapters it is the model with those that the run began with. Otherwise it is a second model, sharded as the policy
is.
"""

from collections.abc import Callable

import deepspeed

from exgrpo.train.common.records import Score
from exgrpo.train.common.step_batch import Ints, StepBatch
from exgrpo.train.config.options import Config
from exgrpo.train.policy.engine import deepspeed_settings
from exgrpo.train.policy.model import PolicyModel, compile_layers, load_model
from exgrpo.train.policy.policy import Policy
from exgrpo.train.policy.source import ModelSource
from exgrpo.train.policy.states import WEIGHT


class KeptWeights:
    """The trained weights as they are now, to score with later.

    Attributes:
        weights: [n] fp32 by name, of the part of each that is here; while they are in use, the trained ones.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.weights = {name: policy.states.get(name, WEIGHT).clone() for name in policy.states.parameters}

    def score(self, batch: StepBatch) -> Score:
        """Score by the weights of the reference. If that fails they stay in use: the run is over."""
        self._exchange()
        score = self.policy.score(batch, self.policy.temperature)
        self._exchange()
        return score

    def _exchange(self) -> None:
        states = self.policy.states
        for name, kept in self.weights.items():
            present = states.get(name, WEIGHT).clone()
            states.set(name, WEIGHT, kept)
            kept.copy_(present)
        states.apply()


class Reference:
    """Puts its log-probs beside the policy's.

    Args:
        score: rows under the reference, at the rollout temperature; all ranks call it together.
    """

    def __init__(self, score: Callable[[StepBatch], Score]) -> None:
        self.score = score

    def fill(self, batch: StepBatch, *, replayed: bool = False) -> Ints:
        """Put `reference_log_prob` for the trained rows inside `loss_mask`; return their numbers.

        Args:
            batch: the step.
            replayed: whether replayed rows are compared, too.
        """
        rows = batch.rows_of(batch.trained)
        rows = rows[(batch.fresh[rows] | replayed) & batch.loss_mask[rows]]
        batch.put(rows, reference_log_prob=self.score(batch.take(rows)).log_prob)
        return rows


def make_reference(config: Config, source: ModelSource, policy: Policy) -> Reference | None:
    """The reference of a run whose objective has one: the model of the source, of which the policy is trained."""
    if not config.objective.compared:
        return None
    if config.lora.rank:
        return Reference(KeptWeights(policy).score)
    model, options = load_model(config, source), config.policy
    frozen = PolicyModel(model, options.kernel_backend, options.kernel_memory).requires_grad_(False)
    if policy.world.size == 1:
        if policy.compiled:  # where the policy has not moved, the divergence is 0
            compile_layers(model)
        engine = frozen.to(policy.world.device)
    else:
        engine, *_ = deepspeed.initialize(model=frozen, config=deepspeed_settings(config), dist_init_required=False)
    return Reference(lambda batch: policy.score_with(engine, batch, policy.temperature))
