"""A causal LM whose head computes log-probs and the loss without any logits, and how it is loaded.

Its base weights may be in 4 bits (QLoRA, arXiv 2305.14314), by bitsandbytes.
"""

from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from exgrpo.heads.inputs import HeadInputs
from exgrpo.heads.inside import compute, open_head
from exgrpo.heads.logit_map import measure
from exgrpo.kernels import LogProb, PolicyLoss, linear_log_prob, linear_policy_loss
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.config.options import Config
from exgrpo.train.policy.attention import PACKED
from exgrpo.train.policy.batch import MicroBatch, TokenBatch
from exgrpo.train.policy.loss import LossTerms, loss_of_log_probs
from exgrpo.train.policy.source import ModelSource
from exgrpo.train.policy.tokenizer import DTYPES

BACKEND = "inductor"
"""Of torch.compile."""


class PolicyModel(nn.Module):
    """A Hugging Face causal LM that returns per-token results instead of logits.

    Its probabilities are those of the model's own logits, with the model's own scale and softcap.

    Args:
        model: causal LM with `get_decoder()` and an output embedding; its parameters may be partitioned by ZeRO-3.
        backend: backend of exgrpo.kernels.
        memory: bytes that they may take besides gradients; None: backend default.

    Raises:
        ValueError: the model's code does more between its decoder and its logits than its head, a softcap and a scale.
    """

    def __init__(self, model: PreTrainedModel, backend: str = "auto", memory: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.backend = backend
        self.logit_map = measure(model, direct=True, memory=memory)
        # ZeRO-3 gathers a module's parameters around its own forward, so the fused call must happen inside it.
        open_head(model.get_output_embeddings())

    def forward(self, batch: TokenBatch, terms: float | LossTerms) -> LogProb | PolicyLoss:
        """Log-probs and entropies by target at a temperature; with `LossTerms` and a `MicroBatch`, the loss."""
        hidden = self._hidden(batch)
        if isinstance(terms, LossTerms):
            assert isinstance(batch, MicroBatch)
            loss = self._loss if terms.fused else self._composed_loss
            return compute(self.model.get_output_embeddings(), hidden, partial(loss, batch, terms))
        return compute(self.model.get_output_embeddings(), hidden, partial(self._log_prob, batch, terms))

    def _hidden(self, batch: TokenBatch) -> torch.Tensor:
        """[B, L, H] or, packed, [T, H] hidden states, by target."""
        decoder = self.model.get_decoder()
        parts = batch.segments
        if parts is None:
            return decoder(input_ids=batch.tokens, use_cache=False).last_hidden_state
        # transformers looks no further for a mask where it is given one, and the attention does not read it.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=batch.tokens.device)
        output = decoder(
            input_ids=batch.tokens,
            attention_mask=mask,
            position_ids=parts.position,
            segments=parts,
            use_cache=False,
        )
        # Its backward adds up what the answers to a prompt give to its last token.
        return parts.source(output.last_hidden_state[0])

    def _log_prob(self, batch: TokenBatch, temperature: float, head: HeadInputs) -> LogProb:
        # Which tokens have a gradient, a composed loss will know: those without one are left out of its backward.
        return linear_log_prob(
            head.hidden,
            head.weight,
            batch.target,
            bias=head.bias,
            allowed_tokens=batch.allowed_tokens,
            counts=None if torch.is_grad_enabled() else (batch.targets, 0),
            weight_grad=getattr(head.weight, "main_grad", None),
            backend=self.backend,
            **self.logit_map.options(temperature),
        )

    def _loss(self, batch: MicroBatch, terms: LossTerms, head: HeadInputs) -> PolicyLoss:
        return linear_policy_loss(
            head.hidden,
            head.weight,
            batch.target,
            batch.old_log_prob,
            batch.advantage,
            replayed=None if terms.as_fresh else batch.replayed,
            clip=terms.clip,
            beta=terms.beta,
            entropy_coef=terms.entropy_coef,
            normalizer=terms.normalizer,
            bias=head.bias,
            allowed_tokens=batch.allowed_tokens,
            counts=(batch.targets, batch.active),
            weight_grad=getattr(head.weight, "main_grad", None),
            backend=self.backend,
            **self.logit_map.options(terms.options.temperature),
        )

    def _composed_loss(self, batch: MicroBatch, terms: LossTerms, head: HeadInputs) -> PolicyLoss:
        return loss_of_log_probs(self._log_prob(batch, terms.options.temperature, head), batch, terms)


def load_model(config: Config, source: ModelSource) -> PreTrainedModel:
    """The model of a run with its attention, which reads packed rows where it can."""
    dtype = DTYPES[config.policy.dtype]
    model = source.load(dtype, config.policy.attention, quantisation(config, dtype))
    same_in_inference(model)
    exact_frequencies(model)
    if config.policy.attention == "sdpa" and model._can_set_attn_implementation():
        model.set_attn_implementation(PACKED)
    return model


def quantisation(config: Config, dtype: torch.dtype) -> BitsAndBytesConfig | None:
    """Return the quantisation of a run's model; None without one. Raises ConfigError if bitsandbytes is missing."""
    if config.lora.quantised == "none":
        return None
    if not find_spec("bitsandbytes"):
        raise ConfigError("lora.quantised: weights in 4 bits need bitsandbytes: pip install 'exgrpo[lora]'")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=config.lora.quantised,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=True,
    )


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of the decoder: those whose activations can be computed again."""
    return [module for module in model.get_decoder().modules() if isinstance(module, GradientCheckpointingLayer)]


def compile_layers(model: PreTrainedModel) -> None:
    """Have the layers compiled in place by torch.compile.

    Names of parameters stay. Lengths are symbols, so other ones are no reason to compile again. Layers share their
    graphs, which end at the attention (see `exgrpo.train.policy.attention`).

    Raises:
        NotImplementedError: the model has no layers that transformers names.
    """
    options: Any = {"deterministic": True} if BACKEND == "inductor" else None  # no choice of kernels by their times
    layers = layers_of(model)
    if not layers:
        raise NotImplementedError(f"transformers does not say what the layers of {type(model).__name__} are")
    for layer in layers:
        layer.compile(backend=BACKEND, dynamic=True, options=options)


def same_in_inference(model: nn.Module) -> None:
    """Have a model compute the same with and without gradients: else ratios of one policy to itself would not be 1.

    Dropout (GPT-2, OPT) is taken out. On processors with AVX512-BF16, bitsandbytes rounds the scales of quantised
    layers to 8 bits when no gradient is wanted.
    """
    layer: Any
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
        for name, value in vars(layer).items():
            if "drop" in name and isinstance(value, float):
                setattr(layer, name, 0.0)


def exact_frequencies(model: PreTrainedModel) -> None:
    """Compute the rotary frequencies of a model in fp32, where they are not.

    While ZeRO-3 loads a model in bf16, new tensors are bf16, too. Frequencies that are off by 2^-9 are off by radians
    at the position 4,000, and no rollout engine computes with them.
    """
    for module in model.modules():
        rotary = "RotaryEmbedding" in type(module).__name__  # as transformers tells them
        if rotary and any(buffer.dtype != torch.float32 for buffer in module.buffers()):
            model._init_weights(module.float())


def dense(parameter: nn.Parameter) -> Tensor:
    """The weight that the layers of a parameter multiply with: itself, or what 4 bits stand for."""
    state: Any = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter.data
    from bitsandbytes.functional import dequantize_4bit  # it takes seconds to import

    return dequantize_4bit(parameter.data, state)
