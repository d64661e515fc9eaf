"""Check that the rollout engine and the trainer compute the same log-probs."""

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

# Mean absolute difference of token log-probs. Two correct fp32 paths differ by about 1e-6, two bf16 ones by about 1e-2
# (their logits are rounded to 8 bits of mantissa) and two fp16 ones by an eighth of that (11 bits); a missing weight
# causes tenths and more.
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
    """Generate a few answers and compare their log-probs with the trainer's, over the same allowed tokens.

    Args:
        engine: the rollout engine, asleep.
        prompts: prompts with two answers each.
        cut: `RolloutConfig.cut` of the run; None: sample from the full vocabulary.

    Returns:
        the mean absolute difference of token log-probs over all ranks.

    Raises:
        RolloutError: on every rank, if the engine of one fails.
        ModelError: on every rank, if activations exceed the range of fp16.
        WeightMismatchError: on every rank, if the difference exceeds the tolerance of the dtype; the message names the
            weights that differ, as far as the engine can detect.
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
    engine.counts()  # reset: the next step must not count the check's tokens
    pairs = [(prompt, r) for prompt, rs in zip(prompts, answers, strict=True) for r in rs]
    everything = [pair for of_rank in world.gather(pairs) for pair in of_rank]
    batch = StepBatch.from_answers([prompt for prompt, _ in everything], [r for _, r in everything])
    gaps = np.abs(policy.score(batch, sampling.temperature).log_prob - batch.engine_log_prob)
    gap = float(gaps[batch.by_token(np.array([r.log_prob is not None for _, r in everything]))].mean())
    if not gap <= TOLERANCE[dtype]:
        engine.wake()  # an engine may drop its weights in sleep
        differing = world.gather(engine.differing(policy.weights()))
        raise WeightMismatchError(
            f"the rollout engine's log-probs differ from the trainer's by {gap:.2e} on average; two correct {dtype} "
            f"paths differ by less than {TOLERANCE[dtype]:.0e}. {_cause(differing)}: rollouts would come from "
            "another policy"
        )
    return gap


def _check_range(policy: Policy, prompts: Sequence[TokenIds]) -> None:
    """Raise ModelError unless the log-probs of prompts, scored as answers to themselves, are finite."""
    batch = StepBatch.from_answers(prompts, [Rollout(prompt, finished=True) for prompt in prompts])
    if not np.isfinite(policy.score(batch, 1.0).log_prob).all():
        raise ModelError(
            "policy.dtype fp16: the log-probs of this model are not finite, since its activations exceed 65504, the "
            "largest number of fp16: take policy.dtype bf16"
        )


def _cause(differing: Sequence[Sequence[str]]) -> str:
    """Return the probable cause, given the names of the weights that differ on each rank."""
    names = list(dict.fromkeys(name for of_rank in differing for name in of_rank))
    if not names:
        return (
            "No weight was found to differ: the model's head may do more than hidden @ weight.T + bias (a logit scale) "
            "or rounding moves this model's probabilities so far (with --policy.dtype fp32, only the former remains)"
        )
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    ranks = [str(rank) for rank, of_rank in enumerate(differing) if of_rank]
    return f"It has other weights on rank {', '.join(ranks)}: {', '.join(names[:SHOWN_NAMES])}{more}"
