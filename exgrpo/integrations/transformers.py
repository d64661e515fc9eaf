"""Patch for causal LMs of transformers that returns log-probabilities and entropies instead of logits."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor, nn

from exgrpo.extras import needs
from exgrpo.heads.forwards import Replacement, replace_forward
from exgrpo.heads.inputs import HeadInputs, is_partitioned
from exgrpo.heads.inside import close_head, compute_during, is_open, is_outermost, open_head
from exgrpo.heads.logit_map import LogitMap, measure
from exgrpo.kernels import LogProb, linear_log_prob
from exgrpo.kernels.inputs import IGNORED

with needs(__name__, "transformers"):
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.utils import ModelOutput

MARK = "_exgrpo"
"""Attribute of a patched model that holds its state."""
COMPARED = 8
"""Number of tokens whose results are compared with the model's own logits."""


@dataclass
class TokenOutput(ModelOutput):
    """Output of a patched model for labels. Position i of a row scores ``labels[:, i + 1]``.

    Attributes:
        loss: the model's own loss, a scalar: mean negative log-probability of the labels that are not -100 (their sum
            over ``num_items_in_batch`` if that is given), plus the router's loss if the model reports one. 0 without
            any label.
        log_prob: log-probability of each label in nats, ``[B, L]`` float32 (float64 for float64 models). Position i
            scores ``labels[:, i + 1]``; the last position and labels of -100 are 0.
        entropy: entropy in nats of the same distributions, same shape and dtype.
        past_key_values: the model's own, like all below; ``cache`` since transformers 5.24.
        hidden_states, attentions, router_logits, aux_loss: the model's own, if requested.
    """

    loss: Tensor | None = None
    log_prob: Tensor | None = None
    entropy: Tensor | None = None
    # Since 5.24 models return it as `cache`, and ModelOutput renames the old field.
    if "cache" in CausalLMOutputWithPast.__annotations__:
        cache: Any = None
    else:
        past_key_values: Any = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    router_logits: tuple[Tensor, ...] | None = None
    aux_loss: Tensor | None = None


@dataclass(frozen=True, eq=False)
class _PatchedModel:
    """State of a patched model; an attribute of the model, so that a copy gets its own."""

    forward: Replacement
    head: nn.Module
    logit_map: LogitMap
    backend: str


def patch_lm_head(model: nn.Module, *, backend: str = "auto", memory: int | None = None) -> nn.Module:
    """Make a forward with labels return log-probabilities and entropies without logits. In place, reversible.

    A forward with the keyword ``labels`` then returns a :class:`TokenOutput`: its ``loss`` is the model's own, its
    ``log_prob`` and ``entropy`` are per token and differentiable. Further keywords of such a forward are
    ``temperature`` (a number, or a tensor shaped like ``labels``) and, instead of ``labels``, the already shifted
    ``shift_labels`` ``[B, L]``. A forward without labels, hence ``generate``, is unchanged.

    The model's own code runs up to the head. Its code after the head (a softcap, a scale) is measured here, by sending
    numbers through it; then the results for a few tokens are compared with the model's own logits. A model that
    computes its logits in another way is thus refused, without a list of architectures. This takes two forwards of a
    few tokens, which are collective if the parameters are sharded.

    Args:
        model: causal LM of transformers, also with adapters of peft. Patch it after adding adapters and before wrapping
            it in DDP or ``torch.compile``; if ZeRO-3 has partitioned it while loading, patch ``engine.module`` after
            ``deepspeed.initialize``.
        backend: backend of :mod:`exgrpo.kernels`.
        memory: bytes that the kernels may take, see :func:`exgrpo.kernels.linear_log_prob`.

    Returns:
        The same model.

    Raises:
        TypeError: no causal LM of transformers, or its head is quantised.
        ValueError: it is patched already, the backend is unknown, or its logits differ from the kernels'.
        RuntimeError: the parameters are sharded and nothing gathers them yet.

    Example::

        model = patch_lm_head(AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", dtype="bfloat16"))
        output = model(input_ids, attention_mask=attention_mask, labels=labels)
        (output.loss - 0.01 * output.entropy.mean()).backward()
    """
    head = _head(model)
    if hasattr(model, MARK) or is_open(head):
        raise ValueError(f"model: {type(model).__name__} is patched already; unpatch_lm_head undoes it")
    if any(is_partitioned(p) for p in head.parameters()) and not head._forward_pre_hooks:
        raise RuntimeError("model: ZeRO-3 has it partitioned; patch engine.module, after deepspeed.initialize")
    parameter = next(model.parameters())
    device = None if parameter.is_meta else parameter.device  # accelerate offloads to meta
    tokens = torch.arange(COMPARED, device=device)[None] % cast(Any, model).config.get_text_config().vocab_size
    with _evaluating(model):
        logits = model(input_ids=tokens).logits
        logit_map = measure(model, direct=False, memory=memory)
        vars(model)[MARK] = _PatchedModel(replace_forward(model, _model_forward), head, logit_map, backend)
        open_head(head)
        try:
            result = model(input_ids=tokens, labels=tokens)
            _compare(LogProb(result.log_prob, result.entropy), logits, tokens, type(model).__name__)
        except BaseException:
            unpatch_lm_head(model)
            raise
    return model


def unpatch_lm_head(model: nn.Module) -> nn.Module:
    """Undo :func:`patch_lm_head`, and return the same model.

    Raises:
        ValueError: the model is not patched, or its forward has been replaced again since.
    """
    if not hasattr(model, MARK):
        raise ValueError(f"model: {type(model).__name__} is not patched")
    patched: _PatchedModel = vars(model)[MARK]
    for module, outermost in ((model, patched.forward.is_outermost(model)), (patched.head, is_outermost(patched.head))):
        if not outermost:
            raise ValueError(f"{type(module).__name__}.forward was replaced after patch_lm_head; undo that first")
    patched.forward.undo(model)
    del vars(model)[MARK]
    close_head(patched.head)
    return model


def _model_forward(
    model: nn.Module,
    *args: Any,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    num_items_in_batch: int | Tensor | None = None,
    return_dict: bool | None = None,
    **kwargs: Any,
) -> Any:
    patched: _PatchedModel = vars(model)[MARK]
    labelled = labels is not None or shift_labels is not None
    if return_dict is not None:
        kwargs["return_dict"] = return_dict or labelled
    if not labelled:
        if isinstance(temperature, Tensor) or temperature != 1:
            raise ValueError("temperature: expected with labels only; without them the model's own logits are returned")
        return patched.forward.own(*args, **kwargs)
    if _head(model) is not patched.head:
        raise RuntimeError("model: its head was replaced after patch_lm_head; unpatch_lm_head, then patch it again")
    if labels is not None and shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    target = cast(Tensor, shift_labels)
    compute = functools.partial(
        _log_prob, target=target, options=patched.logit_map.options(temperature), backend=patched.backend
    )
    output, result = compute_during(patched.head, compute, lambda: patched.forward.own(*args, **kwargs))
    loss = _own_loss(
        model, result.log_prob, target.to(result.log_prob.device), num_items_in_batch, output.get("aux_loss")
    )
    kept = {name: output[name] for name in _PASSED_ON if output.get(name) is not None}
    scored = TokenOutput(loss=loss, log_prob=result.log_prob, entropy=result.entropy, **kept)
    return scored.to_tuple() if return_dict is False else scored


_PASSED_ON = tuple(field.name for field in fields(TokenOutput))[3:]


def _log_prob(head: HeadInputs, target: Tensor, options: dict[str, Any], backend: str) -> LogProb:
    if target.shape != head.hidden.shape[:-1]:
        expected = f"{list(head.hidden.shape[:-1])}, that of the hidden states"
        raise ValueError(
            f"labels: expected shape {expected}, got {list(target.shape)}; instead of logits_to_keep, set the labels "
            "of unwanted positions to -100: they cost nothing"
        )
    target = target.to(head.hidden.device)
    return linear_log_prob(head.hidden, head.weight, target, bias=head.bias, backend=backend, **options)


def _own_loss(
    model: Any, log_prob: Tensor, target: Tensor, items: int | Tensor | None, aux_loss: Tensor | None
) -> Tensor:
    if items is None:
        items = (target != IGNORED).sum().clamp(min=1)
    elif isinstance(items, Tensor):
        items = items.to(log_prob.device)
    loss = -log_prob.sum() / items
    if aux_loss is None:
        return loss
    owners = (model, model.config.get_text_config())
    coefs = (getattr(owner, name, None) for owner in owners for name in ("router_aux_loss_coef", "aux_loss_coef"))
    return loss + next(coef for coef in coefs if coef is not None) * aux_loss.to(loss.device)


def _head(model: Any) -> nn.Module:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(head, nn.Module):
        raise TypeError(
            f"model: expected a causal LM of transformers, got {type(model).__name__}, which has no output embedding; "
            "of a wrapped model pass the inner one (model.module)"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise TypeError(f"model: {type(model).__name__} is an encoder-decoder; expected a causal LM")
    return head


def _compare(result: LogProb, logits: Tensor, tokens: Tensor, name: str) -> None:
    exact = logits[0, :-1].double().log_softmax(-1)
    log_prob = exact.gather(-1, tokens[0, 1:, None]).squeeze(-1)
    entropy = -(exact.exp() * exact).sum(-1)
    pairs = zip(result, (log_prob, entropy), strict=True)
    error = max(float((ours[0, :-1].double() - own).abs().max()) for ours, own in pairs)
    # At least 2^-13 per number: GPUs may multiply float32 as TF32.
    allowed = 4 * max(torch.finfo(logits.dtype).eps, 2**-13) * (1 + float(logits.abs().max()))
    if not error <= allowed:
        raise ValueError(
            f"model: the head of {name} is no plain linear layer: its log-probabilities differ by {error:.2g} from "
            "those of its weight and bias; use its logits with exgrpo.kernels.policy_loss"
        )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
