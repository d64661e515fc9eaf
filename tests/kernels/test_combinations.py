"""Dtypes, autocast and options in any combination, on every backend: right, and in the promised dtypes."""

import math
import os
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from exgrpo.kernels import linear_log_prob, linear_policy_loss, reference

from .conftest import BACKENDS, DEVICE
from .support import relative_error

TOKENS, WIDTH, VOCABULARY = (3, 5), 12, 37
DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])
# Far from the bounds of clipping, which a rounded log-probability might cross.
OFFSETS = torch.tensor([-0.6, -0.05, 0.05, 0.6])


@dataclass(frozen=True)
class Setting:
    """One call of each function."""

    backend: str
    seed: int
    autocast: torch.dtype | None
    hidden: torch.dtype
    weight: torch.dtype
    bias: torch.dtype | None
    temperature: tuple[int, ...] | None
    """The shape of a tensor; None: a number."""
    temperature_dtype: torch.dtype
    softcap: float | None
    grouped: bool
    frozen: frozenset[str]
    masked: bool
    entropy_coef: float

    @property
    def operand(self) -> torch.dtype:
        """What hidden states and weight are rounded to."""
        return self.hidden if torch.float64 in (self.hidden, self.weight) else self.autocast or self.hidden

    @property
    def result(self) -> torch.dtype:
        return torch.float64 if self.hidden == torch.float64 else torch.float32


@st.composite
def any_setting(draw):
    autocast = draw(st.sampled_from([None, torch.bfloat16, torch.float16]))
    hidden, weight = draw(DTYPES), draw(DTYPES)
    backend = draw(st.sampled_from([*BACKENDS, "reference"]))
    return Setting(
        backend,
        draw(st.integers(0, 1000)),
        autocast,
        hidden,
        weight if autocast and torch.float64 not in (hidden, weight) else hidden,
        draw(st.none() | DTYPES),
        draw(st.sampled_from([None, (), TOKENS])),
        draw(DTYPES),
        draw(st.sampled_from([None, 4.0])),
        backend != "reference" and draw(st.booleans()),
        draw(st.frozensets(st.sampled_from(["hidden", "weight", "bias"]))),
        draw(st.booleans()),
        draw(st.sampled_from([0.0, 0.1])),
    )


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """Of this process alone."""
    store = tmp_path_factory.mktemp("group") / "store"
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def results_and_gradients(inputs, options, tokens, functions, frozen, entropy_coef):
    """Log-probabilities, entropies and loss, and the gradients of both functions in what is not frozen."""
    log_prob_of, loss_of = functions
    leaves = {name: x.detach().requires_grad_(name not in frozen) for name, x in inputs.items() if x is not None}
    target, old, advantage, replayed, mask, upstream = tokens
    head = {"bias": None, **leaves, **options}
    found = log_prob_of(target=target, **head)
    terms = {"replayed": replayed, "mask": mask, "entropy_coef": entropy_coef}
    loss = loss_of(target=target, old_log_prob=old, advantage=advantage, **terms, **head).loss
    scalars = [sum((values * up.to(values.dtype)).sum() for values, up in zip(found, upstream, strict=True)), loss]
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    assert loss.requires_grad == bool(wanted)
    return [*found, loss], [torch.autograd.grad(scalar, wanted) for scalar in scalars if wanted]


@settings(max_examples=12 if os.environ.get("TRITON_INTERPRET") else 60)
@given(setting=any_setting())
def test_any_combination(setting, group):
    """Against the oracle in float64 on the operands as they are rounded."""
    torch.manual_seed(setting.seed)
    weight = torch.randn(VOCABULARY, WIDTH) / WIDTH**0.5
    target = torch.randint(0, VOCABULARY, TOKENS)
    hidden = 2 * torch.randn(*TOKENS, WIDTH) + 2 * weight[target]
    bias = None if setting.bias is None else torch.randn(VOCABULARY).to(DEVICE, setting.bias)
    inputs = {"hidden": hidden.to(DEVICE, setting.hidden), "weight": weight.to(DEVICE, setting.weight), "bias": bias}
    target[0, :2] = -100
    temperature = 0.7
    if setting.temperature is not None:
        temperature = (0.5 + torch.rand(setting.temperature)).to(DEVICE, setting.temperature_dtype)
    options = {"temperature": temperature, "softcap": setting.softcap}
    exact_inputs = {
        name: x if x is None else x.to(x.dtype if name == "bias" else setting.operand).double()
        for name, x in inputs.items()
    }
    exact_options = dict(options)
    if setting.temperature is not None:
        exact_options["temperature"] = temperature.to(setting.result).double()
    target = target.to(DEVICE)
    log_prob = reference.linear_log_prob(target=target, **exact_inputs, **exact_options).log_prob
    old = log_prob + OFFSETS.to(DEVICE)[torch.randint(0, 4, TOKENS)]
    mask = torch.rand(TOKENS, device=DEVICE) < 0.7 if setting.masked else None
    advantage, upstream = torch.randn(TOKENS, device=DEVICE), torch.randn(2, *TOKENS, device=DEVICE)
    tokens = (target, old, advantage, torch.rand(TOKENS, device=DEVICE) < 0.3, mask, upstream)
    more = {"backend": setting.backend} | ({"vocab_group": group} if setting.grouped else {})
    with torch.autocast(DEVICE.type, setting.autocast) if setting.autocast else nullcontext():
        ours, gradients = results_and_gradients(
            inputs, options | more, tokens, (linear_log_prob, linear_policy_loss), setting.frozen, setting.entropy_coef
        )
    functions = (reference.linear_log_prob, reference.linear_policy_loss)
    exact, exact_gradients = results_and_gradients(
        exact_inputs, exact_options, tokens, functions, setting.frozen, setting.entropy_coef
    )
    logits = exact_inputs["hidden"] @ exact_inputs["weight"].T
    leaves = [x for name, x in inputs.items() if x is not None and name not in setting.frozen]
    check(ours, exact, gradients, exact_gradients, leaves, setting, logits)


def logit_error(setting, size):
    """How far a logit of this size, divided by the temperature, may be off by the promises of the backend."""
    rounding = torch.finfo(setting.result).eps
    if setting.backend == "reference":  # its products are rounded to the operands' dtype; temperatures are 0.5 and more
        rounding = max(rounding, torch.finfo(setting.operand).eps)
    return 2 * size.item() * rounding


def check(ours, exact, gradients, exact_gradients, leaves, setting, logits):
    largest, typical = (logit_error(setting, size) for size in (logits.abs().max(), logits.square().mean().sqrt()))
    few = 64 * torch.finfo(setting.result).eps
    # A log-probability moves by twice what the logits do, an entropy by sum p |log p + H| <= log V times that.
    allowed = [2 * largest, 2 * math.log(VOCABULARY) * largest]
    # Means of ratio * advantage: ratios are below 2 and advantages below 4 here.
    allowed.append(8 * 2 * largest + setting.entropy_coef * allowed[1])
    for mine, true, bound in zip(ours, exact, allowed, strict=True):
        assert mine.dtype == setting.result
        assert (mine - true).abs().max().item() <= bound + few * max(1, true.abs().max().item())
    # Norms of gradients: probabilities and coefficients are off by the relative error exp(2 typical) - 1, a product may
    # round its operands, and the gradient is rounded to the dtype of its leaf.
    for mine, true in zip(gradients, exact_gradients, strict=True):
        for gradient, exact_gradient, leaf in zip(mine, true, leaves, strict=True):
            assert gradient.dtype == leaf.dtype
            roundings = torch.finfo(setting.operand).eps + torch.finfo(leaf.dtype).eps
            assert relative_error(gradient, exact_gradient) <= 4 * typical + 2 * roundings + few
