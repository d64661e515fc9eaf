"""Prints how far the loss and its gradient are from the project's in float64, for each kind of term and aggregation.

It runs where verl is; see test_verl_replay.py.
"""

import dataclasses
import itertools
import json

import torch
from tensordict import TensorDict
from verl.utils.tensordict_utils import assign_non_tensor
from verl.workers.config import FSDPActorConfig

from exgrpo.integrations.verl_method import UNCLIPPED, replay_loss
from exgrpo.kernels import reference

LENGTHS, PROMPT, LONGEST, ROWS = (3, 5, 1, 4), 2, 6, 3.5
BETA, ENTROPY = 0.1, 0.01
AGGREGATED = ("seq-mean-token-sum-norm", "token-mean")


def jagged(values: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(values.split(lengths)), layout=torch.jagged)


def main() -> None:
    """One line of JSON."""
    cases = itertools.product(("shaped", "ratio", "clipped"), (True, False), AGGREGATED, (False, True))
    print(json.dumps([case(*one) for one in cases]))


def case(term: str, clip: bool, aggregated: str, present: bool) -> dict[str, object]:
    """A micro-batch of four rows, of which two are replayed; `present`: ratios of these are to the policy itself."""
    torch.manual_seed(1)
    tokens, lengths = sum(LENGTHS), list(LENGTHS)
    whole = [PROMPT + n for n in lengths]
    log_prob = (-torch.rand(sum(whole)) * 3).requires_grad_()
    entropy = torch.rand(sum(whole)).requires_grad_()
    # verl has the scores of a token where it is predicted, one place before.
    ends = list(itertools.accumulate(whole))
    at = torch.cat([torch.arange(end - n - 1, end - 1) for end, n in zip(ends, lengths, strict=True)])
    old, advantage = log_prob.detach()[at] + torch.randn(tokens), torch.randn(tokens)
    replayed = torch.tensor([False, True, False, True])
    of_token = replayed.repeat_interleave(torch.tensor(lengths))
    if present:
        old[of_token] = torch.inf
    mask = torch.ones(tokens, dtype=torch.int64)
    mask[1] = 0
    columns = {
        name: jagged(values, lengths) for name, values in {"old_log_probs": old, "advantages": advantage}.items()
    }
    answer, prompt = torch.zeros(tokens, dtype=torch.int64), torch.zeros(PROMPT * len(lengths), dtype=torch.int64)
    columns |= {"responses": jagged(answer, lengths), "prompts": jagged(prompt, [PROMPT] * len(lengths))}
    columns |= {"response_mask": jagged(mask, lengths), "replayed": replayed}
    data = TensorDict(columns, batch_size=len(lengths))
    of_batch = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": len(lengths)}
    assign_non_tensor(data, **of_batch, clip=clip, rows=ROWS)
    shape = {"loss_agg_mode": aggregated, "loss_scale_factor": LONGEST, "entropy_coeff": ENTROPY, "clip_ratio_c": 1e9}
    config = FSDPActorConfig(strategy="fsdp2", rollout_n=4, ppo_micro_batch_size_per_gpu=4, **shape)
    output = {"log_probs": jagged(log_prob, whole), "entropy": jagged(entropy, whole)}
    unclipped = dataclasses.replace(config, **UNCLIPPED)
    loss, _ = replay_loss(config, output, data, unclipped=unclipped, term=term, beta=BETA)
    exact = (values.detach().double().requires_grad_() for values in (log_prob, entropy))
    exact_log_prob, exact_entropy = exact
    expected = reference.policy_loss(
        *(exact_log_prob[at], old.double(), advantage.double()),
        replayed=None if term == "clipped" else of_token,
        clip=(0.2, 0.2) if clip else None,
        beta=BETA if term == "shaped" else None,
        entropy=exact_entropy[at],
        entropy_coef=ENTROPY,
        normalizer=float(mask.sum()) if aggregated == "token-mean" else ROWS * LONGEST,
        mask=mask.bool(),
    ).loss
    found = [loss, *torch.autograd.grad(loss, (log_prob, entropy))]
    right = [expected, *torch.autograd.grad(expected, (exact_log_prob, exact_entropy))]
    error = max((ours - theirs).abs().max().item() for ours, theirs in zip(found, right, strict=True))
    return {"term": term, "clip": clip, "aggregated": aggregated, "present": present, "error": error}


if __name__ == "__main__":
    main()
