"""The policy that a run starts from, kept as what a divergence, or a regression, refers to.

With adapters it is the model without them, which takes no memory, or with those that the run began with. Otherwise it
is a second model, sharded as the policy is.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import deepspeed

from exgrpo.train.common.records import Score
from exgrpo.train.common.step_batch import Ints, StepBatch
from exgrpo.train.config.options import Config
from exgrpo.train.policy.adapters import without_adapters
from exgrpo.train.policy.engine import deepspeed_settings
from exgrpo.train.policy.model import PolicyModel, compile_layers, load_model
from exgrpo.train.policy.policy import Policy
from exgrpo.train.policy.source import ModelSource
from exgrpo.train.policy.states import WEIGHT, States


class KeptWeights:
    """The weights as they are now, with which the model computes later for a while.

    Attributes:
        weights: [n] fp32 by name, of the part of each that is here; while they are `applied`, the trained ones.
    """

    def __init__(self, states: States) -> None:
        self.states = states
        self.weights = {name: states.get(name, WEIGHT).clone() for name in states.parameters}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model computes with them here; all ranks enter and leave together.

        Where the block fails they stay: the run is at its end, and a rank that fails alone waits for no other.
        """
        self._exchange()
        yield
        self._exchange()

    def _exchange(self) -> None:
        for name, kept in self.weights.items():
            present = self.states.get(name, WEIGHT).clone()
            self.states.set(name, WEIGHT, kept)
            kept.copy_(present)
        self.states.apply()


class Reference:
    """Puts its log-probs beside the policy's.

    Args:
        score: rows under the reference, at the rollout temperature; all ranks call it together.
    """

    def __init__(self, score: Callable[[StepBatch], Score]) -> None:
        self.score = score

    def fill(self, batch: StepBatch, *, replayed: bool = False) -> Ints:
        """Put `reference_log_prob` for the rows that are trained on and learnt from; these rows' numbers.

        Args:
            batch: the step.
            replayed: whether replayed rows are compared, too.
        """
        rows = batch.rows_of(batch.trained)
        rows = rows[(batch.fresh[rows] | replayed) & batch.learnt[rows]]
        batch.put(rows, reference_log_prob=self.score(batch.take(rows)).log_prob)
        return rows


def make_reference(config: Config, source: ModelSource, policy: Policy) -> Reference | None:
    """The reference of a run whose objective has one: the model of the source, of which the policy is trained."""
    if not config.objective.compared:
        return None
    if config.lora.path:
        return _within(KeptWeights(policy.states).applied, policy)
    if config.lora.rank:
        return _within(lambda: without_adapters(policy.model), policy)
    model, options = load_model(config, source), config.policy
    frozen = PolicyModel(model, options.kernel_backend, options.kernel_memory).requires_grad_(False)
    if policy.world.size == 1:
        if policy.compiled:  # where the policy has not moved, the divergence is 0
            compile_layers(model)
        engine = frozen.to(policy.world.device)
    else:
        engine, *_ = deepspeed.initialize(model=frozen, config=deepspeed_settings(config), dist_init_required=False)
    return Reference(lambda batch: policy.score_with(engine, batch, policy.temperature))


def _within(context: Callable[[], AbstractContextManager[None]], policy: Policy) -> Reference:
    """The policy itself, as it is within a context."""

    def score(batch: StepBatch) -> Score:
        with context():
            return policy.score(batch, policy.temperature)

    return Reference(score)
