"""The policy that a run starts from, kept as what a divergence refers to.

With adapters it is the model without them, which takes no memory, or with those that the run began with. Otherwise it
is a second model, sharded as the policy is.
"""

import dataclasses
from collections.abc import Callable, Sequence

import deepspeed

from exgrpo.train.config import Config
from exgrpo.train.policy.adapters import without_adapters
from exgrpo.train.policy.average import KeptWeights
from exgrpo.train.policy.batch import TokenSequence, TrainingRow
from exgrpo.train.policy.model import PolicyModel
from exgrpo.train.policy.zero3 import Policy, deepspeed_settings, kept_whole, load_model
from exgrpo.train.pretrained.source import ModelSource
from exgrpo.train.records import Score

ScoreSequences = Callable[[Sequence[TokenSequence]], list[Score]]


class Reference:
    """Puts its log-probs beside the policy's.

    Args:
        score: log-probs of responses under the reference, at the rollout temperature; all ranks call it together.
    """

    def __init__(self, score: ScoreSequences) -> None:
        self.score = score

    def beside(self, rows: Sequence[Sequence[TrainingRow]]) -> list[list[TrainingRow]]:
        """The rows of each group; fresh ones that are learnt from get the reference's log-probs."""
        scores = iter(self.score([row for of_group in rows for row in of_group if _compared(row)]))
        return [
            [
                dataclasses.replace(row, reference_log_prob=next(scores).log_prob) if _compared(row) else row
                for row in of_group
            ]
            for of_group in rows
        ]


def _compared(row: TrainingRow) -> bool:
    return not (row.replayed or row.masked)


def make_reference(config: Config, source: ModelSource, policy: Policy) -> Reference | None:
    """The reference of a run whose objective has one.

    Args:
        config: the run.
        source: the model that it starts from.
        policy: what is trained of it.
    """
    if config.objective.kl_coef == 0:
        return None
    if config.lora.path:
        start = KeptWeights(policy.states)
        return Reference(lambda sequences: _as_kept(policy, start, sequences))
    if config.lora.rank:
        return Reference(lambda sequences: _without_adapters(policy, sequences))
    frozen = PolicyModel(load_model(config, source), config.policy.kernel_backend).requires_grad_(False)
    if kept_whole(config, policy.world.size):
        engine = frozen.to(policy.world.device)
    else:
        engine, *_ = deepspeed.initialize(model=frozen, config=deepspeed_settings(config), dist_init_required=False)
    return Reference(lambda sequences: policy.score_with(engine, sequences, policy.temperature))


def _without_adapters(policy: Policy, sequences: Sequence[TokenSequence]) -> list[Score]:
    with without_adapters(policy.model):
        return policy.score(sequences, policy.temperature)


def _as_kept(policy: Policy, weights: KeptWeights, sequences: Sequence[TokenSequence]) -> list[Score]:
    with weights.applied():
        return policy.score(sequences, policy.temperature)
