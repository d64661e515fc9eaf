"""Do the rollout engine and the trainer compute the same policy?"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from exgrpo.train.common.distributed import agree
from exgrpo.train.common.errors import ModelError, WeightMismatchError
from exgrpo.train.common.records import Rollout, TokenIds
from exgrpo.train.common.seeds import derive_seed
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.policy.policy import Policy
from exgrpo.train.rollout.engine import Request, RolloutEngine, Sampling, collect

# Mean absolute difference of token log-probs. Two right fp32 paths differ by about 1e-6, two bf16 ones by about 1e-2
# (their logits are rounded to 8 bits of mantissa) and two fp16 ones by an eighth of that (11 bits); a weight that did
# not arrive costs tenths and more.
TOLERANCE = {"fp32": 1e-3, "bf16": 6e-2, "fp16": 1e-2}
SHOWN_NAMES = 8


def check_engine(
    policy: Policy,
    engine: RolloutEngine,
    prompts: Sequence[TokenIds],
    *,
    dtype: str,
    max_tokens: int,
    seed: int,
    cut: Mapping[str, Any] | None = None,
) -> float:
    """Generate a few answers and score them with the trainer, over the words that they were drawn from.

    Args:
        policy: of the trainer.
        engine: asleep.
        prompts: each gets two answers.
        dtype: of both.
        max_tokens: of an answer.
        seed: of the run.
        cut: `RolloutConfig.cut` of the run; None: answers are drawn from all words.

    Returns:
        the mean absolute difference of token log-probs over all ranks.

    Raises:
        RolloutError: on every rank, where the engine of one does not generate.
        ModelError: on every rank, where the model has activations beyond the range of fp16.
        WeightMismatchError: on every rank, where it exceeds the tolerance of the dtype; it names the weights that
            differ, as far as the engine can tell.
    """
    world = policy.world
    if dtype == "fp16":
        _check_range(policy, prompts)
    sampling = Sampling(max_tokens=max_tokens, log_prob=True, **(cut or {}))
    seeds = [derive_seed(seed, "weight check", world.rank // engine.ranks, i) for i in range(len(prompts))]
    engine.wake()
    requests = [Request(prompt, 2, sampling, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
    answers = agree(world, lambda: collect(requests, engine.generate(requests)))
    engine.sleep()
    engine.counts()  # what the check has read is not for the next step to count
    pairs = [(prompt, r) for prompt, rs in zip(prompts, answers, strict=True) for r in rs]
    everything = [pair for of_rank in world.gather(pairs) for pair in of_rank]
    batch = StepBatch.of_answers([prompt for prompt, _ in everything], [r for _, r in everything])
    gaps = np.abs(policy.score(batch, sampling.temperature).log_prob - batch.engine_log_prob)
    gap = float(gaps[batch.by_token(np.array([r.log_prob is not None for _, r in everything]))].mean())
    if not gap <= TOLERANCE[dtype]:
        engine.wake()  # asleep, it may have no weights
        differing = world.gather(engine.differing(policy.weights()))
        raise WeightMismatchError(
            f"the rollout engine's log-probs differ from the trainer's by {gap:.2e} on average; two right {dtype} "
            f"paths differ by less than {TOLERANCE[dtype]:.0e}. {_cause(differing)}: rollouts would come from "
            "another policy"
        )
    return gap


def _check_range(policy: Policy, prompts: Sequence[TokenIds]) -> None:
    """Whether the log-probs of prompts that follow themselves are numbers: no engine could sample from others.

    Raises:
        ModelError: they are not.
    """
    batch = StepBatch.of_answers(prompts, [Rollout(prompt, finished=True) for prompt in prompts])
    if not np.isfinite(policy.score(batch, 1.0).log_prob).all():
        raise ModelError(
            "policy.dtype fp16: the log-probs of this model are not finite, since its activations exceed 65504, the "
            "largest number of fp16: take policy.dtype bf16"
        )


def _cause(differing: Sequence[Sequence[str]]) -> str:
    """What may be wrong, from the names of the weights in which each rank's engine differs."""
    names = list(dict.fromkeys(name for of_rank in differing for name in of_rank))
    if not names:
        return (
            "No weight was found to differ: the model's head may do more than hidden @ weight.T + bias (a logit scale) "
            "or rounding moves this model's probabilities so far (with --policy.dtype fp32, only the former remains)"
        )
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    ranks = [str(rank) for rank, of_rank in enumerate(differing) if of_rank]
    return f"It has other weights on rank {', '.join(ranks)}: {', '.join(names[:SHOWN_NAMES])}{more}"
