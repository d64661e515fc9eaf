"""Prints how far the loss and its gradient are from the project's in float64, for each kind of term and aggregation.

It runs where verl is; see test_verl_replay.py.
"""

import itertools
import json
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils.tensordict_utils import assign_non_tensor
from verl.workers.config import FSDPActorConfig

from exgrpo.integrations.verl_method import replay_loss
from exgrpo.kernels import reference
from exgrpo.train.config.objective import SURROGATES, MethodOptions, ObjectiveConfig
from exgrpo.train.policy.loss import LossTerms

LENGTHS, PROMPT, LONGEST, ROWS = [3, 5, 1, 4], 2, 6, 3.5
"""The last but one row has no token of the policy, as one that fills up."""
BETA, ENTROPY = 0.1, 0.01
AGGREGATED = ("seq-mean-token-sum-norm", "token-mean")
WEIGHT = torch.tensor([1.0, 0.5, 0.0, 0.7]).repeat_interleave(torch.tensor(LENGTHS))
REPLAYED = torch.tensor([False, True, False, True])


def jagged(values: Tensor, lengths: list[int]) -> Tensor:
    return torch.nested.as_nested_tensor(list(values.split(lengths)), layout=torch.jagged)


def main() -> None:
    """Print one line of JSON."""
    cases = itertools.product(("shaped", "ratio", "clipped"), (True, False), AGGREGATED, (False, True))
    print(json.dumps([case(*one) for one in cases]))


class MicroBatch:
    """Four rows, of which two are replayed.

    Attributes:
        log_prob, entropy: [L] of all tokens, with prompts; verl has the scores of a token one place before it.
        old, advantage: [T] of the answers' tokens.
        own, replayed: [T] bool.
        at: [T] where the scores of the answers' tokens are.
    """

    def __init__(self, *, present: bool = False) -> None:
        torch.manual_seed(1)
        self.whole = [PROMPT + n for n in LENGTHS]
        self.log_prob = (-torch.rand(sum(self.whole)) * 3).requires_grad_()
        self.entropy = torch.rand(sum(self.whole)).requires_grad_()
        ends = list(itertools.accumulate(self.whole))
        self.at = torch.cat([torch.arange(end - n - 1, end - 1) for end, n in zip(ends, LENGTHS, strict=True)])
        self.old = self.log_prob.detach()[self.at] + torch.randn(len(self.at))
        self.advantage = torch.randn(len(self.at))
        self.replayed = REPLAYED.repeat_interleave(torch.tensor(LENGTHS))
        if present:
            self.old[self.replayed] = torch.inf
        self.own = torch.arange(len(self.at)) != 1
        self.own[8] = False

    def loss(self, objective: ObjectiveConfig, term: Any, aggregated: str, *, clip: bool) -> Tensor:
        """By verl's way."""
        of_answers = {"old_log_probs": self.old, "advantages": self.advantage, "weights": WEIGHT}
        of_answers |= {"responses": torch.zeros(len(self.at)).long(), "response_mask": self.own.long()}
        columns = {name: jagged(values, LENGTHS) for name, values in of_answers.items()}
        columns["prompts"] = jagged(torch.zeros(PROMPT * len(LENGTHS)).long(), [PROMPT] * len(LENGTHS))
        data = TensorDict({**columns, "replayed": REPLAYED}, batch_size=len(LENGTHS))
        of_batch = {"dp_size": 1, "batch_num_tokens": int(self.own.sum()), "global_batch_size": len(LENGTHS)}
        assign_non_tensor(data, **of_batch, clip=clip, rows=ROWS)
        shape = {"loss_agg_mode": aggregated, "loss_scale_factor": LONGEST, "entropy_coeff": ENTROPY}
        config = FSDPActorConfig(strategy="fsdp2", rollout_n=4, ppo_micro_batch_size_per_gpu=4, **shape)
        output = {"log_probs": jagged(self.log_prob, self.whole), "entropy": jagged(self.entropy, self.whole)}
        method, surrogate = MethodOptions(objective=objective), SURROGATES.find(objective.surrogate)
        loss, metrics = replay_loss(config, output, data, terms=LossTerms(method, 1.0, term=term, surrogate=surrogate))
        assert set(metrics) >= {"actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/entropy_loss"}
        return loss

    def error(self, loss: Tensor, expected: Callable[[Tensor, Tensor], Tensor]) -> float:
        """The largest difference of a loss and its gradient from one of float64 log-probs [T] and entropies [T]."""
        exact = [values.detach().double().requires_grad_() for values in (self.log_prob, self.entropy)]
        right = expected(*(values[self.at] for values in exact))
        found = [loss, *torch.autograd.grad(loss, (self.log_prob, self.entropy))]
        wanted = [right, *torch.autograd.grad(right, exact)]
        return max((ours - theirs).abs().max().item() for ours, theirs in zip(found, wanted, strict=True))

    def normalizer(self, aggregated: str) -> float:
        return float(self.own.sum()) if aggregated == "token-mean" else ROWS * LONGEST


def case(term: Any, clip: bool, aggregated: str, present: bool) -> dict[str, object]:
    """The clipped surrogate; `present`: ratios of replayed tokens are to the policy itself."""
    batch = MicroBatch(present=present)

    def expected(log_prob: Tensor, entropy: Tensor) -> Tensor:
        return reference.policy_loss(
            *(log_prob, batch.old.double(), (batch.advantage * WEIGHT).double()),
            replayed=None if term == "clipped" else batch.replayed,
            clip=(0.2, 0.2) if clip else None,
            beta=BETA if term == "shaped" else None,
            entropy=entropy,
            entropy_coef=ENTROPY,
            normalizer=batch.normalizer(aggregated),
            mask=batch.own,
        ).loss

    objective = ObjectiveConfig(beta=BETA)
    error = batch.error(batch.loss(objective, term, aggregated, clip=clip), expected)
    return {"term": term, "clip": clip, "aggregated": aggregated, "present": present, "error": error}


if __name__ == "__main__":
    main()
