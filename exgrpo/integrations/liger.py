"""Liger: its fused linear GRPO loss on :mod:`exgrpo.kernels`. Importable without Liger."""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from exgrpo.kernels import importance_ratio, linear_log_prob, linear_policy_loss, policy_loss
from exgrpo.kernels.inputs import IGNORED

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
"""Loss types that differ only in the weight of each token, which is multiplied into its advantage."""
COVERED = {"loss_type": LOSS_TYPES, "importance_sampling_level": ("token",), "delta": (None,)}
"""Supported values of Liger's options: averages of the tokens' clipped objectives."""


class LigerFusedLinearGRPOLoss(torch.nn.Module):
    r"""The GRPO loss of a batch of completions from hidden states and head, called like Liger's module of this name.

    The objective of a token is :math:`\min(w A, \mathrm{clip}(w, 1 - \mathrm{low}, 1 + \mathrm{high}) A) - \beta K`,
    with the importance ratio w and the k3 estimate K of the divergence from a reference model. ``loss_type`` selects
    the average over tokens. Without a divergence the logits are computed once
    (:func:`exgrpo.kernels.linear_policy_loss`); with one they are recomputed in the backward
    (:func:`exgrpo.kernels.linear_log_prob`).

    Args:
        beta: weight of the divergence from the reference; 0: no divergence.
        compiled, chunk_size: ignored: nothing is compiled, and chunks are chosen by their bytes.
        use_ref_model: True if a reference is passed to the call; without one the divergence is 0.
        epsilon_low: ratios are clipped to at least ``1 - epsilon_low``.
        epsilon_high: ratios are clipped to at most ``1 + epsilon_high``.
        loss_type: ``"grpo"``, ``"bnpo"``, ``"dr_grpo"`` or ``"dapo"``.
        max_completion_length: divisor of each row for ``"dr_grpo"``.
        importance_sampling_level: ``"token"``.
        temperature: divisor of the logits, above 0.
        delta: None.
        use_bias_correction_kl: multiply the divergence of a token by its importance ratio.
        sapo_..., vespo_...: ignored: loss types ``"sapo"`` and ``"vespo"`` are refused.
        memory: bytes that the kernels may take, see :func:`exgrpo.kernels.linear_log_prob`; not in Liger's loss.

    Raises:
        ValueError: an option is not covered by this objective; the message names it.
    """

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
        *,
        memory: int | None = None,
    ) -> None:
        super().__init__()
        given = {"loss_type": loss_type, "importance_sampling_level": importance_sampling_level, "delta": delta}
        for name, value in given.items():
            if value not in COVERED[name]:
                raise ValueError(
                    f"{name}: {value!r} is no objective of exgrpo.kernels, expected "
                    f"{' or '.join(map(repr, COVERED[name]))}; for others keep "
                    "liger_kernel.chunked_loss.LigerFusedLinearGRPOLoss"
                )
        self.beta = beta
        self.memory = memory
        self.use_ref_model = use_ref_model
        self.clip = (min(epsilon_low, 1.0), epsilon_high)  # no ratio is below 0
        self.loss_type = loss_type
        self.max_completion_length = max_completion_length
        self.temperature = temperature
        self.use_bias_correction_kl = use_bias_correction_kl

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute the loss of B completions of up to L tokens.

        Args:
            _input: hidden states, ``[B, L, D]``.
            lin_weight: the head, ``[V, D]``.
            selected_token_ids: the completions, ``[B, L]``, int64, in ``[0, V)`` where the mask is not 0.
            attention_mask: ``[B, L]``, any dtype; 0 masks a position, whatever its contents.
            advantages: ``[B]``. Constant.
            bias: ``[V]``.
            ref_per_token_logps: log-probabilities under the reference model, ``[B, L]``. Constant.
            old_per_token_logps: log-probabilities under the policy that generated the tokens, ``[B, L]``. Constant.
                None: the current policy did, every ratio is 1.
            ref_input: hidden states of the reference model, ``[B, L, E]``, used without ``ref_per_token_logps``.
            ref_weight: its head, ``[V, E]``.
            ref_bias: ``[V]``.
            vllm_is_ratio: weight of each token's policy objective, at least 0, ``[B, L]``, ``[B, 1]`` or ``[B]``.
            num_items_in_batch: tokens of the whole batch on all processes, for ``"dapo"``; None: count the tokens of
                this call.

        Returns:
            tuple: the loss, a differentiable scalar, and its metrics, detached scalars: the mean divergence (if
            ``beta`` is not 0) and the share of clipped tokens. float32 (float64 for float64 inputs).

        Raises:
            TypeError: an argument has the wrong type or dtype.
            ValueError: an argument has the wrong shape, device or value, or the reference or
                ``max_completion_length`` is missing.
        """
        mask = attention_mask != 0
        kept = selected_token_ids.masked_fill(~mask, IGNORED)
        row_weight, normalizer = self._average(mask, num_items_in_batch)
        weighted = (advantages * row_weight).unsqueeze(-1) * _per_token(vllm_is_ratio, mask)
        if self.beta == 0:
            present = torch.full(mask.shape, math.inf, device=mask.device)
            result = linear_policy_loss(
                _input,
                lin_weight,
                kept,
                present if old_per_token_logps is None else old_per_token_logps,
                weighted,
                clip=self.clip,
                normalizer=normalizer,
                bias=bias,
                temperature=self.temperature,
                memory=self.memory,
            )
            return result.loss, (self._clipped_share(result.ratio, advantages, mask),)
        log_prob = self._log_prob(_input, lin_weight, kept, bias)
        old = log_prob.detach() if old_per_token_logps is None else old_per_token_logps
        result = policy_loss(log_prob, old, weighted, clip=self.clip, normalizer=normalizer, mask=mask)
        clipped = self._clipped_share(result.ratio, advantages, mask)
        reference = self._reference(log_prob, kept, ref_per_token_logps, ref_input, ref_weight, ref_bias)
        divergence = self._divergence(log_prob, old, reference, mask)
        loss = result.loss + self.beta * (divergence * row_weight.unsqueeze(-1)).sum() / normalizer
        return loss, (_share(divergence.detach(), mask), clipped)

    def _average(self, mask: Tensor, num_items_in_batch: float | Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the weight of each row [B] and the divisor of the weighted sum over tokens."""
        lengths = mask.sum(-1).float()
        rows = len(mask)
        weight, tokens = torch.ones_like(lengths), lengths.sum()
        if self.loss_type == "grpo":
            weight, tokens = 1 / lengths.clamp(min=1), lengths.new_tensor(rows)
        elif self.loss_type == "dr_grpo":
            if self.max_completion_length is None:
                raise ValueError("max_completion_length: loss_type 'dr_grpo' divides by it, got None")
            tokens = lengths.new_tensor(rows * self.max_completion_length)
        elif self.loss_type == "dapo":
            tokens = _tokens_of_a_process(tokens, num_items_in_batch)
        return weight, tokens.clamp(min=1)

    def _reference(
        self,
        log_prob: Tensor,
        target: Tensor,
        given: Tensor | None,
        hidden: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        if not self.use_ref_model:
            return log_prob.detach()
        if given is not None:
            return given.detach()
        if hidden is None or weight is None:
            raise ValueError("ref_per_token_logps, or ref_input and ref_weight: use_ref_model is True, got None")
        with torch.no_grad():
            return self._log_prob(hidden, weight, target, bias)

    def _log_prob(self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
        temperature, memory = self.temperature, self.memory
        return linear_log_prob(hidden, weight, target, bias=bias, temperature=temperature, memory=memory).log_prob

    def _divergence(self, log_prob: Tensor, old_log_prob: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
        """Return the k3 estimate of each token [B, L], 0 where masked."""
        log_ratio = reference.masked_fill(~mask, 0) - log_prob
        divergence = log_ratio.expm1() - log_ratio
        if self.use_bias_correction_kl:
            divergence = divergence * importance_ratio(log_prob, old_log_prob.masked_fill(~mask, 0))
        return divergence

    def _clipped_share(self, ratio: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Return the share of tokens beyond the bound to which their advantage pushes."""
        below, above = ratio < 1 - self.clip[0], ratio > 1 + self.clip[1]
        sign = advantages.unsqueeze(-1)
        return _share((below & (sign < 0)) | (above & (sign > 0)), mask)


def _tokens_of_a_process(tokens: Tensor, num_items_in_batch: float | Tensor | None) -> Tensor:
    """Return the mean number of tokens per process, from this process's count or the given total."""
    distributed = dist.is_available() and dist.is_initialized()
    if num_items_in_batch is not None:
        tokens = torch.as_tensor(num_items_in_batch, dtype=torch.float32, device=tokens.device)
    elif distributed:
        dist.all_reduce(tokens)
    return tokens / (dist.get_world_size() if distributed else 1)


def _per_token(weight: Tensor | None, mask: Tensor) -> Tensor:
    """Expand weights of tokens or rows to [B, L]; None means 1."""
    if weight is None:
        return torch.ones_like(mask, dtype=torch.float32)
    rows = weight.unsqueeze(-1) if weight.dim() == 1 else weight
    if rows.shape not in (mask.shape, mask[:, :1].shape):
        shapes = f"{list(mask.shape)}, {[len(mask), 1]} or {[len(mask)]}"
        raise ValueError(f"vllm_is_ratio: expected shape {shapes}, got {list(weight.shape)}")
    return rows.detach().expand(mask.shape)


def _share(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)
