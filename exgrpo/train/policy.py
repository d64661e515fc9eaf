"""The policy under ZeRO-3: a causal LM whose head computes log-probs and the loss without any logits."""

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import PreTrainedModel, get_scheduler
from transformers.integrations import HfDeepSpeedConfig

from exgrpo.kernels import LogProb, PolicyLoss, linear_log_prob, linear_policy_loss
from exgrpo.train.batch import MicroBatch, MiniBatch, Row, collate, schedule
from exgrpo.train.config import Config, ObjectiveConfig
from exgrpo.train.distributed import World
from exgrpo.train.model_source import ModelSource
from exgrpo.train.pretrained import DTYPES
from exgrpo.train.ratios import count_log_ratios


@dataclass(frozen=True, eq=False)
class Score:
    """A response under the policy at some temperature: [R] fp32 log-prob and [R] fp32 entropy of each token."""

    log_prob: npt.NDArray[np.float32]
    entropy: npt.NDArray[np.float32]


@dataclass(frozen=True)
class LossTerms:
    """How the loss of a micro-batch is formed; the same for all micro-batches of a mini-batch."""

    clip: tuple[float, float] | None
    beta: float | None
    entropy_coef: float
    normalizer: float
    temperature: float


@dataclass(frozen=True, eq=False)
class UpdateStats:
    """What one optimiser step did, over all ranks.

    `applied` is False where the gradient norm was not finite and the step was skipped. Ratios are means over
    tokens (and the largest fresh one); `replayed_weight` is the mean of what the ratio of a replayed token is shaped
    to; a mean over no tokens is NaN. `log_ratios` [2, BINS] counts fresh and replayed tokens, see `ratios`.
    """

    loss: float
    grad_norm: float
    applied: bool
    clip_fraction: float
    fresh_ratio: float
    fresh_ratio_max: float
    replayed_ratio: float
    replayed_weight: float
    log_ratios: torch.Tensor


class PolicyModel(nn.Module):
    """A Hugging Face causal LM that returns per-token results instead of logits.

    Args:
        model: any causal LM with `get_decoder()` and an output embedding.
        backend: backend of exgrpo.kernels.
    """

    def __init__(self, model: PreTrainedModel, backend: str = "auto") -> None:
        super().__init__()
        self.model = model
        self.softcap = getattr(model.config, "final_logit_softcapping", None)
        head = model.get_output_embeddings()
        # ZeRO-3 gathers a module's parameters around its own forward, so the fused call must happen inside it.
        head.forward = types.MethodType(partial(_fused_head, softcap=self.softcap, backend=backend), head)

    def forward(self, batch: MicroBatch, terms: float | LossTerms) -> LogProb | PolicyLoss:
        """Log-probs and entropies [B, L] of the targets at a temperature; of `LossTerms`, the loss and its parts."""
        decoder = self.model.get_decoder()
        hidden = decoder(input_ids=batch.tokens, use_cache=False).last_hidden_state
        return self.model.get_output_embeddings()(hidden, batch, terms)


def _fused_head(
    head: nn.Linear,
    hidden: torch.Tensor,
    batch: MicroBatch,
    terms: float | LossTerms,
    *,
    softcap: float | None,
    backend: str,
) -> LogProb | PolicyLoss:
    if not isinstance(terms, LossTerms):
        return linear_log_prob(
            hidden, head.weight, batch.target, bias=head.bias, temperature=terms, softcap=softcap, backend=backend
        )
    return linear_policy_loss(
        hidden,
        head.weight,
        batch.target,
        batch.old_log_prob,
        batch.advantage,
        replayed=batch.replayed,
        clip=terms.clip,
        beta=terms.beta,
        entropy_coef=terms.entropy_coef,
        normalizer=terms.normalizer,
        bias=head.bias,
        temperature=terms.temperature,
        softcap=softcap,
        backend=backend,
    )


class Policy:
    """The trained model, its optimiser and its schedule, sharded by DeepSpeed ZeRO-3.

    Args:
        config: the run.
        source: the model to start from.
        world: the processes that share it.
    """

    def __init__(self, config: Config, source: ModelSource, world: World) -> None:
        self.world = world
        self.budget = config.optimizer.micro_batch_tokens
        self.temperature = config.rollout.temperature
        settings = deepspeed_settings(config)
        self._zero3 = HfDeepSpeedConfig(settings)  # alive: from_pretrained then loads each rank its shard
        model = source.load(DTYPES[config.policy.dtype], config.policy.attention)
        if config.policy.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        wrapped = PolicyModel(model, config.policy.kernel_backend)
        optimizer = torch.optim.AdamW(
            wrapped.parameters(),
            lr=config.optimizer.lr,
            betas=config.optimizer.betas,
            weight_decay=config.optimizer.weight_decay,
        )
        scheduler = get_scheduler(
            "constant_with_warmup" if config.optimizer.schedule == "constant" else config.optimizer.schedule,
            optimizer,
            num_warmup_steps=config.optimizer.warmup_steps,
            num_training_steps=max(1, config.steps * config.optimizer.minibatches),
        )
        self.engine, *_ = deepspeed.initialize(
            model=wrapped,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            config=settings,
            dist_init_required=False,
        )

    @property
    def model(self) -> PreTrainedModel:
        """The wrapped causal LM."""
        return self.engine.module.model

    @property
    def learning_rate(self) -> float:
        """The rate of the next optimiser step."""
        return float(self.engine.get_lr()[0])

    @property
    def checkpoint_bytes(self) -> int:
        """What the shards of a checkpoint take on disk at least: fp32 weights and both moments of AdamW."""
        return 3 * 4 * sum(parameter.ds_numel for parameter in self.model.parameters())

    @torch.no_grad()
    def score(self, rows: Sequence[Row], temperature: float) -> list[Score]:
        """Log-probs and entropies of every row's response under the current policy at a temperature.

        The work is spread over all ranks.
        """
        plan = schedule([row.length for row in rows], self.budget, self.world.size)
        self.engine.eval()
        mine: list[tuple[int, Score]] = []
        for indices in plan[self.world.rank]:
            batch = collate([rows[i] for i in indices], self.world.device)
            result = self.engine(batch, temperature)
            log_prob, entropy = result.log_prob.cpu().numpy(), result.entropy.cpu().numpy()
            for line, i in enumerate(indices):
                span = slice(len(rows[i].prompt) - 1, rows[i].length)
                mine.append((i, Score(log_prob[line, span].copy(), entropy[line, span].copy())))
        return self.world.join(mine)

    def update(self, minibatch: MiniBatch, objective: ObjectiveConfig, *, clip: bool) -> UpdateStats:
        """One optimiser step on the mini-batch, for the policy at the rollout temperature.

        The loss is a sum over the mini-batch divided by constants of the whole of it, so neither the packing nor the
        number of ranks changes it. (DeepSpeed averages gradients over ranks: hence normalizer / ranks.)
        """
        terms = LossTerms(
            clip=objective.clip if clip else None,
            beta=objective.beta,
            entropy_coef=objective.entropy_coef * minibatch.normalizer / minibatch.tokens,
            normalizer=minibatch.normalizer / self.world.size,
            temperature=self.temperature,
        )
        plan = schedule([row.length for row in minibatch.rows], self.budget, self.world.size)
        self.engine.train()
        tally = _Tally(terms.beta)
        for indices in plan[self.world.rank] or [[]]:
            batch = collate([minibatch.rows[i] for i in indices], self.world.device)
            result = self.engine(batch, terms)
            self.engine.backward(result.loss, scale_wrt_gas=False)
            tally.add(batch, result)
        skipped = self.engine.skipped_steps
        self.engine.step()
        return tally.stats(
            self.world,
            grad_norm=self.engine.get_global_grad_norm(),
            applied=self.engine.skipped_steps == skipped,
        )

    def weights(self) -> "WholeWeights":
        """Every parameter of the causal LM whole; see `WholeWeights`."""
        return WholeWeights(self.model)

    def save(self, folder: Path) -> None:
        """Write the model in Hugging Face format (all ranks must call it; rank 0 writes)."""
        state: dict[str, torch.Tensor] = {}
        for name, weight in self.weights():
            if self.world.is_main:
                state[name] = weight.detach().cpu().clone()
        if self.world.is_main:
            self.model.save_pretrained(folder, state_dict=state)


@dataclass(frozen=True, eq=False)
class WholeWeights:
    """Name and whole tensor of every parameter, one at a time; all ranks must run through them together.

    Tied parameters appear once. A tensor is valid until the next one is asked for. They can be run through again, and
    then are what they have become meanwhile.
    """

    model: PreTrainedModel

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.data


def deepspeed_settings(config: Config) -> dict[str, Any]:
    """The DeepSpeed configuration of a run."""
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_param_persistence_threshold": config.distributed.persistence_threshold,
        "overlap_comm": False,
    }
    if config.distributed.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.optimizer.grad_clip,
        "bf16": {"enabled": config.policy.dtype == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }


class _Tally:
    """Sums over the micro-batches of one rank: loss, clipped, ratios, counts of tokens and of their log-ratios."""

    def __init__(self, beta: float | None) -> None:
        self.beta = beta
        self.sums: list[torch.Tensor] = []
        self.log_ratios: list[torch.Tensor] = []

    def add(self, batch: MicroBatch, result: PolicyLoss) -> None:
        active = batch.target >= 0
        replayed = active & batch.replayed[:, None]
        fresh = active & ~batch.replayed[:, None]
        ratio = result.ratio.double()
        weight = ratio if self.beta is None else ratio / (ratio + self.beta)
        zero = ratio.new_zeros(())
        self.sums.append(
            torch.stack(
                [
                    result.loss.detach().double(),
                    fresh.sum().double(),
                    replayed.sum().double(),
                    result.clipped.sum().double(),
                    torch.where(fresh, ratio, zero).sum(),
                    torch.where(replayed, ratio, zero).sum(),
                    torch.where(replayed, weight, zero).sum(),
                    torch.where(fresh, ratio, zero).amax(),
                ]
            )
        )
        self.log_ratios.append(count_log_ratios(result.log_prob - batch.old_log_prob, batch.replayed, active))

    def stats(self, world: World, *, grad_norm: float | torch.Tensor, applied: bool) -> UpdateStats:
        stacked, counts = torch.stack(self.sums).cpu(), torch.stack(self.log_ratios).sum(0).cpu()
        gathered = world.gather((torch.cat([stacked[:, :-1].sum(0), stacked[:, -1:].amax(0)]), counts))
        of_ranks = torch.stack([numbers for numbers, _ in gathered])
        loss, fresh, replayed, clipped, fresh_ratio, replayed_ratio, weight = of_ranks[:, :-1].sum(0).tolist()
        return UpdateStats(
            loss=loss / world.size,
            grad_norm=float(grad_norm),
            applied=applied,
            clip_fraction=clipped / fresh if fresh else float("nan"),
            fresh_ratio=fresh_ratio / fresh if fresh else float("nan"),
            fresh_ratio_max=float(of_ranks[:, -1].max()) if fresh else float("nan"),
            replayed_ratio=replayed_ratio / replayed if replayed else float("nan"),
            replayed_weight=weight / replayed if replayed else float("nan"),
            log_ratios=torch.stack([counts for _, counts in gathered]).sum(0),
        )
