"""The loss of TRL's GRPOTrainer from hidden states, on :mod:`exgrpo.kernels`.

TRL requests log-probs by `model(..., labels=labels, fused_lm_head=True)`. Here `linear_log_prob` computes them, for
every objective of TRL. If `linear_policy_loss` supports the objective, it computes the loss itself: three passes over
the head instead of four.

B rows, C completion tokens.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from exgrpo.heads.forwards import Replacement, replace_forward
from exgrpo.heads.inputs import HeadInputs
from exgrpo.heads.inside import compute, open_head
from exgrpo.heads.logit_map import LogitMap, measure
from exgrpo.integrations.liger import LOSS_TYPES
from exgrpo.kernels import LogProb, PolicyLoss, linear_log_prob, linear_policy_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from trl import GRPOTrainer
else:
    GRPOTrainer = object  # importable without TRL


class PolicyLossInputs(NamedTuple):
    """Arguments of `linear_policy_loss` for the loss of one micro-batch."""

    old_log_prob: Tensor  # [B, C] fp32
    advantage: Tensor  # [B, C] fp32
    mask: Tensor  # [B, C] bool, True for tokens in the loss
    normalizer: Tensor  # 0-d, above 0
    entropy_coef: float  # weight of the mean entropy
    clip: tuple[float, float] | None  # (low, high) for fresh tokens
    replayed: Tensor | None = None  # [B] bool; None: no row
    beta: float | None = None  # shaping of replayed tokens


MARK = "_exgrpo_trl"
"""Attribute of a model patched by :func:`use_kernels`."""


@dataclass(eq=False)
class _FusedModel:
    forward: Replacement
    logit_map: LogitMap
    temperature: float
    fp32_head: bool


def use_kernels(
    model: "PreTrainedModel", *, temperature: float, fp32_head: bool = False, memory: int | None = None
) -> None:
    """Make `model(..., labels=labels, fused_lm_head=True)` compute with the kernels; other calls are unchanged.

    The call returns TRL's output with `log_probs` and `entropy` [B, L-1]. With `objective`, a function that returns
    `PolicyLossInputs`, these are detached and [B, C], for the last C positions, and `loss` is `linear_policy_loss`'s.
    It is a function because FSDP casts tensor arguments of a model to its own dtype.

    Args:
        model: causal LM of transformers that has TRL's fused head, not wrapped.
        temperature: temperature of the policy.
        fp32_head: multiply in fp32, outside autocast.
        memory: bytes that the kernels may take, see :func:`exgrpo.kernels.linear_log_prob`.

    Raises:
        ValueError: the logits go through more than head, softcap and scale.
    """
    logit_map = measure(model, direct=True, memory=memory)
    forward = replace_forward(model, _model_forward)
    vars(model)[MARK] = _FusedModel(forward, logit_map, temperature, fp32_head)
    open_head(model.get_output_embeddings())


@contextmanager
def at_temperature(model: "PreTrainedModel", temperature: float) -> Iterator[None]:
    """Use this temperature within the context, in a model patched by `use_kernels`."""
    fused: _FusedModel = vars(model)[MARK]
    own, fused.temperature = fused.temperature, temperature
    try:
        yield
    finally:
        fused.temperature = own


def _model_forward(model: "PreTrainedModel", *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
    fused: _FusedModel = vars(model)[MARK]
    return _fused_forward(model, fused, *args, **kwargs) if fused_lm_head else fused.forward.own(*args, **kwargs)


def _fused_forward(
    model: "PreTrainedModel",
    fused: _FusedModel,
    *args: Any,
    labels: Tensor,
    objective: Callable[[], PolicyLossInputs] | None = None,
    **kwargs: Any,
) -> Any:
    from trl.trainer.utils import FusedCausalLMOutput

    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        kwargs.setdefault("output_router_logits", True)
    outputs = model.base_model(*args, **{**kwargs, "use_cache": False})
    head = model.get_output_embeddings()
    hidden = outputs.last_hidden_state[:, :-1].to(head.weight.device)
    target = labels[:, 1:].to(head.weight.device)
    aux_loss = None
    if kwargs.get("output_router_logits"):
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        experts = (config.num_experts, config.num_experts_per_tok)
        aux_loss = load_balancing_loss_func(outputs.router_logits, *experts, kwargs.get("attention_mask"))
    options = fused.logit_map.options(fused.temperature)
    with torch.autocast(hidden.device.type, enabled=False) if fused.fp32_head else nullcontext():
        hidden = hidden if torch.is_autocast_enabled(hidden.device.type) else hidden.to(head.weight.dtype)
        if objective is None:
            scores = compute(head, hidden, partial(_log_prob, target=target, options=options))
            return FusedCausalLMOutput(log_probs=scores.log_prob, entropy=scores.entropy, aux_loss=aux_loss)
        terms = objective()
        tokens = terms.mask.shape[1]
        policy_loss = partial(_policy_loss, target=target[:, -tokens:], objective=terms, options=options)
        result = compute(head, hidden[:, -tokens:], policy_loss)
    return FusedCausalLMOutput(loss=result.loss, log_probs=result.log_prob, entropy=result.entropy, aux_loss=aux_loss)


def _log_prob(head: HeadInputs, target: Tensor, options: dict[str, Any]) -> LogProb:
    return linear_log_prob(head.hidden, head.weight, target, bias=head.bias, **options)


def _policy_loss(head: HeadInputs, target: Tensor, objective: PolicyLossInputs, options: dict[str, Any]) -> PolicyLoss:
    return linear_policy_loss(head.hidden, head.weight, target, bias=head.bias, **objective._asdict(), **options)


def beyond_kernel(options: Any) -> list[str]:
    """Return the options of a GRPOConfig, with values, that `linear_policy_loss` does not support."""
    beyond = {
        "loss_type": options.loss_type not in LOSS_TYPES,
        "importance_sampling_level": options.importance_sampling_level != "token",
        "beta": options.beta != 0,
        "delta": options.delta is not None,
        "top_entropy_quantile": options.top_entropy_quantile < 1,
        "off_policy_mask_threshold": options.off_policy_mask_threshold is not None,
    }
    return [f"{name}={getattr(options, name)!r}" for name, holds in beyond.items() if holds]


class FusedLossMixin(GRPOTrainer):
    """Loss of `trl.GRPOTrainer` without materialized logits: `class T(FusedLossMixin, GRPOTrainer)`.

    Every objective of TRL takes its log-probs and entropies from `linear_log_prob`. Loss and gradient come from
    `linear_policy_loss` if it supports the objective: loss types grpo, bnpo, dr_grpo and dapo with token-level ratios,
    any clip range, temperature, entropy bonus and vLLM importance ratios. Arguments, metrics and checkpoints are those
    of GRPOTrainer.

    Raises:
        ValueError: the logits of the model go through more than head, softcap and scale.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for model in (self.model, self.ref_model):
            if model is not None:
                use_kernels(
                    self._causal_lm(model),
                    temperature=self.temperature,
                    fp32_head=self.args.cast_lm_head_to_fp32,
                    memory=getattr(self.args, "kernel_memory", None),  # only ExGRPOConfig has it
                )

    def _causal_lm(self, model: Any) -> "PreTrainedModel":
        model = self.accelerator.unwrap_model(model)
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        if not self.model.training or beyond_kernel(self.args):
            return super()._compute_loss(model, inputs)
        arguments = self._objective(inputs)
        passes: list[Any] = []

        def fused(**model_inputs: Any) -> Any:
            passes.append(model(**model_inputs, objective=lambda: arguments))
            return passes[-1]

        # Run TRL's loss code on the detached results for its metrics and its adaptive entropy bonus.
        super()._compute_loss(fused, inputs)
        loss = passes[-1].loss
        if self.aux_loss_enabled:
            weight = self.router_aux_loss_coef / self.current_gradient_accumulation_steps
            loss = loss + weight * passes[-1].aux_loss
        return loss

    def _objective(self, inputs: dict[str, Any]) -> PolicyLossInputs:
        """Express TRL's loss of a micro-batch as arguments of `linear_policy_loss`.

        The objective is positively homogeneous in the advantage, so the weight of a token relative to the mean over
        tokens, which the entropy bonus uses, is a factor of its advantage.
        """
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        tokens = mask.sum().clamp(min=1)
        advantage = inputs["advantages"].float()
        if advantage.dim() == 1:
            advantage = advantage[:, None]
        advantage = advantage * self._token_share(inputs, mask) * tokens
        if self.use_vllm and self.vllm_importance_sampling_correction:
            advantage = advantage * inputs["importance_sampling_ratio"]
        old_log_prob = inputs.get("old_per_token_logps")
        if old_log_prob is None:  # one optimiser step per generation: the current policy wrote the answers
            old_log_prob = torch.full(mask.shape, math.inf, device=mask.device)
        return PolicyLossInputs(
            old_log_prob=old_log_prob,
            advantage=advantage.expand(mask.shape),
            mask=mask.bool(),
            normalizer=(tokens * self.current_gradient_accumulation_steps).float(),
            entropy_coef=self._entropy_coef(),
            clip=(min(self.epsilon_low, 1.0), self.epsilon_high),  # no ratio is below 0
        )

    def _token_share(self, inputs: dict[str, Any], mask: Tensor) -> Tensor:
        """Return the weight of a token in a micro-batch's policy loss, [B, 1] or 0-d, before gradient accumulation."""
        rows = self._mean_rows(inputs)
        if self.loss_type == "grpo":
            return 1 / (rows * mask.sum(-1, keepdim=True).clamp(min=1))
        if self.loss_type == "bnpo":
            return 1 / mask.sum().clamp(min=1)
        if self.loss_type == "dr_grpo":
            return mask.new_tensor(1 / (rows * self.max_completion_length), dtype=torch.float32)
        micro_batches = self.accelerator.num_processes * self.args.steps_per_generation
        return micro_batches / inputs["num_items_in_batch"].clamp(min=1)

    def _mean_rows(self, inputs: dict[str, Any]) -> float:
        return len(inputs["completion_mask"])

    def _entropy_coef(self) -> float:
        if not self._entropy_bonus_enabled:
            return 0.0
        if self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target:
            return 0.0
        return self.entropy_coef
