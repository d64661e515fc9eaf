"""Loss and gradients of TRL's GRPOTrainer with its own head, Liger's loss, and ours (TRL's issues 7063 and 7244)."""

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="trl is not installed: pip install trl==1.16.0", exc_type=ImportError)

from datasets import Dataset
from trl import GRPOTrainer

from benchmarks.heads import WRONG
from benchmarks.timing import OURS, Budget, Call, Result, Results, clock, paired_spread, race
from benchmarks.trl_step import config_of, reward
from benchmarks.workloads import FEW, ON_GPU, PROMPT, TINY, Workload, qwen_workload
from exgrpo.integrations.trl import FusedLossMixin
from exgrpo.kernels import linear_log_prob

NAME = "two layers of width 256, vocabulary 32,000"
SMALL = qwen_workload(NAME, (256, 512, 2, 4), 32000, **FEW | {"max_tokens": 64})
Batch = dict[str, Tensor]


class FullLogits(GRPOTrainer):
    """TRL's trainer on full logits."""

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **_: Any
    ) -> tuple[Tensor, Tensor, None]:
        logits = model(input_ids, attention_mask).logits[:, -logits_to_keep - 1 : -1]
        log_prob = (logits / self.temperature).log_softmax(-1)
        own = log_prob.gather(-1, input_ids[:, -logits_to_keep:, None])[..., 0]
        return own, -(log_prob.exp() * log_prob).sum(-1), None


class Liger(GRPOTrainer):
    """TRL's trainer on Liger's fused loss, as before version 1.16."""

    def _compute_loss(self, model: Any, inputs: Batch) -> Tensor:
        loss = import_module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss(
            beta=0.0,
            use_ref_model=False,
            compiled=torch.cuda.is_available(),
            loss_type=self.loss_type,
            max_completion_length=self.max_completion_length,
            temperature=self.temperature,
        )
        target, mask = inputs["completion_ids"], inputs["completion_mask"]
        ids, among = torch.cat([inputs["prompt_ids"], target], 1), torch.cat([inputs["prompt_mask"], mask], 1)
        hidden = model.base_model(ids, among, use_cache=False).last_hidden_state[:, -target.shape[1] - 1 : -1]
        return loss(hidden, model.lm_head.weight, target, mask, inputs["advantages"])[0]


class Patched(GRPOTrainer):
    """TRL's trainer with `linear_log_prob` in place of its head's function: a patch for TRL."""

    @staticmethod
    def apply(
        hidden: Tensor, weight: Tensor, bias: Any, target: Tensor, temperature: float, *_: Any
    ) -> tuple[Any, ...]:
        """Return log-probs, entropies, and nothing for what GRPO does not request."""
        return *linear_log_prob(hidden, weight, target, bias=bias, temperature=temperature), None, None, None

    def _compute_loss(self, model: Any, inputs: Batch) -> Tensor:
        with mock.patch("trl.trainer.utils._ChunkedLogProbFunction", Patched):
            return super()._compute_loss(model, inputs)


class Fused(FusedLossMixin, GRPOTrainer):
    """TRL's trainer on our loss."""


PLAIN, TRL, LIGER = "full logits", "trl", "Liger's loss"
ROWS = {PLAIN: FullLogits, TRL: GRPOTrainer, LIGER: Liger, "exgrpo's head": Patched, "exgrpo's loss": Fused}


def update(trainer: Any, batch: Batch) -> tuple[Tensor, ...]:
    """Return the loss of a micro-batch, and its gradients."""
    with trainer.compute_loss_context_manager():
        loss = trainer._compute_loss(trainer.model, batch)
    return loss, *torch.autograd.grad(loss, list(trainer.model.parameters()))


def error(values: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    off = torch.stack([(one.double() - right).norm() for one, right in zip(values, exact, strict=True)])
    return (off.norm() / torch.stack([right.norm() for right in exact]).norm()).item()


def measure(workload: Workload, folder: Path, device: torch.device, budget: Budget) -> Results:
    """Compare loss and gradients of all rows with float64, then measure times and memory."""
    config = config_of(Namespace(**vars(workload), output=folder / "run", steps=1, vllm=False))
    config.entropy_coef = 0.0  # Liger's loss has no entropies
    model, questions = str(workload.model(folder / "model")), Dataset.from_list([{"prompt": "w1", "answer": "w1"}])
    kinds = {row: kind for row, kind in ROWS.items() if row != LIGER or find_spec("liger_kernel")}
    trainers = {row: kind(model, reward, config, questions) for row, kind in kinds.items()}
    draw, size = torch.Generator().manual_seed(0), (workload.pass_rows, PROMPT + workload.max_tokens)
    lengths = torch.randint(workload.max_tokens // 2, workload.max_tokens + 1, size[:1], generator=draw)
    tokens = torch.randint(1, trainers[PLAIN].model.vocab_size, size, generator=draw).to(device)
    batch = {
        "prompt_ids": tokens[:, :PROMPT],
        "prompt_mask": torch.ones_like(tokens[:, :PROMPT]),
        "completion_ids": tokens[:, PROMPT:],
        "completion_mask": (torch.arange(workload.max_tokens) < lengths[:, None]).long().to(device),
        "advantages": torch.randn(size[0], generator=draw).to(device),
    }
    for trainer in trainers.values():
        trainer.current_gradient_accumulation_steps = 1
    calls: dict[str, Call] = {row: partial(update, trainer, batch) for row, trainer in trainers.items()}
    found = {row: call() for row, call in calls.items()}
    trainers[PLAIN].model.double()
    exact = calls[PLAIN]()
    trainers[PLAIN].model.float()
    errors = {row: error(values, exact) for row, values in found.items()}
    del found, exact
    most = WRONG * max(errors[PLAIN], errors[TRL])
    facts = {row: {"gradient_error": one, "wrong": one > most} for row, one in errors.items()}
    results = race(calls, device, replace(budget, patience=math.inf), facts, warm=True)
    for row, result in results.items():
        ratio = paired_spread(result.seconds, results[TRL].seconds)
        memory = (result.peak_bytes or 0) / (results[TRL].peak_bytes or 1)
        results[row] = replace(result, facts=facts[row] | {"times_trl": ratio, "memory_times_trl": memory})
    return {LIGER: Result(reason="not installed: pip install --no-deps liger-kernel==0.8.5"), **results}


@pytest.mark.timeout(3600)
@pytest.mark.benchmark(timer=clock)
@pytest.mark.parametrize("row", ROWS)
def test_trl_head(benchmark, groups, options, budget, device, tmp_path, row):
    workload = {"tiny": TINY, "small": SMALL, "full": ON_GPU[0] if device.type == "cuda" else SMALL}[options.sizes]
    group = f"TRL's loss and gradients: {workload.name}"
    groups.report(group, row, partial(measure, workload, tmp_path, device, budget), benchmark)
    assert not (row.startswith(OURS) and benchmark.extra_info["wrong"])
