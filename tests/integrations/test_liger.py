"""Liger's module of the same name is the oracle: its losses, metrics and gradients, on the CPU in plain torch."""

import inspect
from importlib.util import find_spec

import pytest
import torch

from exgrpo.integrations.liger import LOSS_TYPES, LigerFusedLinearGRPOLoss
from exgrpo.kernels.reference import linear_log_prob
from tests.gloo import on_ranks

ROWS, LENGTH, WIDTH, VOCABULARY = 5, 9, 16, 67
TEMPERATURE = 0.8


def liger():
    for package in ("liger_kernel", "triton"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed; Liger imports Triton")
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss as Theirs

    return Theirs


def batch(dtype=torch.float32, bias=False):
    """The arguments of a call: ratios on both sides of the clip, a row without any token, junk where it is masked."""
    hidden = torch.randn(ROWS, LENGTH, WIDTH, dtype=dtype)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=dtype) / 2
    target = torch.randint(VOCABULARY, (ROWS, LENGTH))
    mask = (torch.arange(LENGTH) < torch.tensor([[9], [4], [0], [7], [1]])).long()
    bias = torch.randn(VOCABULARY, dtype=dtype) if bias else None
    log_prob = linear_log_prob(hidden, weight, target, bias=bias, temperature=TEMPERATURE).log_prob
    reference = hidden + torch.randn_like(hidden) / 8, weight + torch.randn_like(weight) / 8
    given = {"_input": hidden.requires_grad_(), "lin_weight": weight.requires_grad_(), "selected_token_ids": target}
    given |= {"attention_mask": mask, "advantages": torch.tensor([1.5, -0.7, 0.3, 0.0, -1.1])}
    given |= {"bias": None if bias is None else bias.requires_grad_(), "ref_input": reference[0]}
    old = (log_prob + 0.4 * torch.randn(ROWS, LENGTH)).float()
    return {**given, "ref_weight": reference[1], "old_per_token_logps": old}


def run(module, call):
    loss, metrics = module(**call)
    leaves = [x for x in call.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    return [loss.detach(), *metrics, *torch.autograd.grad(3 * loss, leaves)]


def compare(call, **options):
    """Both modules, float32: sums of some hundred terms, in two orders."""
    theirs = run(liger()(compiled=False, temperature=TEMPERATURE, **options), call)
    ours = run(LigerFusedLinearGRPOLoss(compiled=False, temperature=TEMPERATURE, **options), call)
    assert len(ours) == len(theirs)
    for mine, yours in zip(ours, theirs, strict=True):
        assert (mine.shape, mine.dtype) == (yours.shape, yours.dtype)
        torch.testing.assert_close(mine, yours, rtol=1e-4, atol=1e-6)
    return ours


def test_it_is_constructed_and_called_as_theirs():
    for name in ("__init__", "forward"):
        ours, theirs = (inspect.signature(getattr(x, name)) for x in (LigerFusedLinearGRPOLoss, liger()))
        shared = [p for p in ours.parameters.values() if p.name != "memory"]
        assert [(p.name, p.default) for p in shared] == [(p.name, p.default) for p in theirs.parameters.values()]


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_types_with_and_without_a_reference(loss_type, beta):
    options = {"loss_type": loss_type, "max_completion_length": 11, "epsilon_low": 0.1, "epsilon_high": 0.3}
    found = compare(batch(), beta=beta, use_ref_model=beta > 0, **options)
    clipped = found[2 if beta else 1]
    assert 0.2 < clipped < 0.8


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.1, "use_bias_correction_kl": True},
        {"beta": 0.1, "use_ref_model": False},
        {"beta": 0.0, "chunk_size": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("bias", [False, True])
def test_other_options(options, bias):
    compare(batch(bias=bias), **options)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_without_old_log_probabilities_every_ratio_is_1(beta):
    compare(batch() | {"old_per_token_logps": None}, beta=beta)


@pytest.mark.parametrize(("shape", "beta"), [((ROWS, LENGTH), 0.1), ((ROWS, 1), 0.0), ((ROWS,), 0.1)])
def test_weights_for_what_another_engine_sampled(shape, beta):
    weight = torch.rand(shape) * (torch.rand(shape) > 0.3)
    compare(batch() | {"vllm_is_ratio": weight}, beta=beta, loss_type="grpo")


@pytest.mark.parametrize("count", [40, 17.5, torch.tensor(40), 0])
def test_the_tokens_of_a_larger_batch_are_what_dapo_divides_by(count):
    compare(batch() | {"num_items_in_batch": count}, beta=0.0)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_reference_log_probabilities_and_frozen_parameters(beta):
    call = batch() | {"ref_per_token_logps": -3 * torch.rand(ROWS, LENGTH), "ref_input": None, "ref_weight": None}
    call["lin_weight"] = call["lin_weight"].detach()
    compare(call, beta=beta)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_nothing_to_learn_from_gives_zero(beta):
    call = batch()
    loss, _, *gradients = run(LigerFusedLinearGRPOLoss(beta=beta), call | {"attention_mask": torch.zeros(ROWS, LENGTH)})
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_in_bfloat16_it_is_nearer_to_the_exact_loss_than_theirs(beta):
    """Liger rounds the logits to bfloat16; the exact values are its own of the same numbers in float32."""
    call = batch(torch.bfloat16)

    def floats(x):
        is_float = isinstance(x, torch.Tensor) and x.is_floating_point()
        return x.detach().float().requires_grad_(x.requires_grad) if is_float else x

    options = {"beta": beta, "compiled": False, "temperature": TEMPERATURE, "epsilon_low": 9.0, "epsilon_high": 9.0}
    exact = run(liger()(**options), {name: floats(value) for name, value in call.items()})
    theirs, ours = run(liger()(**options), call), run(LigerFusedLinearGRPOLoss(**options), call)
    assert (ours[0] - exact[0]).abs() <= (theirs[0] - exact[0]).abs()
    for mine, yours, true in zip(
        ours[2 + (beta > 0) :], theirs[2 + (beta > 0) :], exact[2 + (beta > 0) :], strict=True
    ):
        assert mine.dtype == torch.bfloat16
        assert (mine - true).norm() <= 1.1 * (yours - true).norm()


@pytest.mark.parametrize(
    ("option", "value"), [("loss_type", "cispo"), ("importance_sampling_level", "sequence"), ("delta", 4.0)]
)
def test_what_the_objective_does_not_cover_is_refused_by_name(option, value):
    with pytest.raises(ValueError, match=f"^{option}: {value!r}.*keep liger_kernel"):
        LigerFusedLinearGRPOLoss(**{option: value})


def test_what_is_missing_or_of_the_wrong_shape_is_named():
    call = batch()
    with pytest.raises(ValueError, match="max_completion_length"):
        LigerFusedLinearGRPOLoss(beta=0.0, loss_type="dr_grpo")(**call)
    with pytest.raises(ValueError, match=r"vllm_is_ratio.*\[5, 9\].*got \[2\]"):
        LigerFusedLinearGRPOLoss(beta=0.0)(**call, vllm_is_ratio=torch.ones(2))
    with pytest.raises(ValueError, match="ref_input.*use_ref_model"):
        LigerFusedLinearGRPOLoss()(**call | {"ref_input": None})


def check_rank(rank):
    """Ranks with different numbers of tokens, counted or told."""
    torch.manual_seed(rank)
    call = batch()
    call["attention_mask"][rank:] = 1
    compare(call, beta=0.0)
    compare(call | {"num_items_in_batch": 70}, beta=0.0)


@pytest.mark.long
def test_processes_divide_by_their_common_number_of_tokens(tmp_path):
    liger()
    on_ranks(check_rank, 2, tmp_path)
