"""Every refusal names the argument, what came and what was expected."""

import re
from contextlib import nullcontext

import pytest
import torch
from torch import zeros
from torch._subclasses.fake_tensor import FakeTensorMode

from exgrpo import kernels


def head():
    return {"hidden": zeros(2, 3, 8), "weight": zeros(20, 8), "target": zeros(2, 3, dtype=torch.int64)}


def tokens():
    return {"old_log_prob": zeros(2, 3), "advantage": zeros(2, 3)}


HEAD_ERRORS = [
    ({"hidden": [1.0]}, TypeError, "hidden: expected a tensor, got list"),
    ({"hidden": zeros(2, 3, 8, dtype=torch.int64)}, TypeError, "hidden: expected dtype torch.float16 or"),
    ({"hidden": torch.tensor(1.0)}, ValueError, "hidden: expected shape [..., D], got a tensor without dimensions"),
    ({"hidden": zeros(2, 3, 0), "weight": zeros(20, 0)}, ValueError, "hidden: expected shape [..., D] with a D of at"),
    ({"weight": zeros(20, 7)}, ValueError, "weight: expected shape [V, 8]"),
    ({"weight": zeros(0, 8)}, ValueError, "weight: expected at least one row, got an empty vocabulary"),
    ({"weight": zeros(20, 8, dtype=torch.bfloat16)}, TypeError, "weight: expected dtype torch.float32"),
    ({"weight": zeros(20, 8, device="meta")}, ValueError, "weight: expected device cpu, that of hidden, got meta"),
    ({"target": zeros(2, 3, dtype=torch.int32)}, TypeError, "target: expected dtype torch.int64, got torch.int32"),
    ({"target": zeros(6, dtype=torch.int64)}, ValueError, "target: expected shape [2, 3], got [6]"),
    ({"target": torch.tensor([[0, 20, 1], [-1, 3, -100]])}, ValueError, "target: expected values in [0, 20) or -100"),
    ({"bias": zeros(19)}, ValueError, "bias: expected shape [20], got [19]"),
    ({"weight_grad": zeros(20, 7)}, ValueError, "weight_grad: expected shape [20, 8], got [20, 7]"),
    ({"weight_grad": zeros(20, 8).half()}, TypeError, "weight_grad: expected dtype torch.float32, got torch.float16"),
    ({"weight_grad": zeros(8, 20).T}, ValueError, "weight_grad: expected a contiguous tensor that needs no gradient"),
    ({"temperature": 0.0}, ValueError, "temperature: expected a number above 0, got 0.0"),
    ({"temperature": float("nan")}, ValueError, "temperature: expected a finite number, got nan"),
    ({"temperature": torch.ones(3)}, ValueError, "temperature: expected shape [2, 3] or [], got [3]"),
    ({"temperature": torch.tensor([[1.0, 1, 1], [1, -2, 1]])}, ValueError, "temperature: expected finite numbers"),
    ({"temperature": True}, TypeError, "temperature: expected"),
    ({"target": torch.full((2, 3), -(2**63))}, ValueError, "target: expected values in [0, 20)"),
    ({"temperature": 10**400}, ValueError, "temperature: expected a number that float64 has, got an integer of"),
    ({"hidden": zeros(2, 3, 8).to_sparse()}, TypeError, "hidden: expected a dense tensor, got one of layout"),
    ({"ignore_index": None}, TypeError, "ignore_index: expected an integer, got NoneType"),
    ({"ignore_index": 2**63}, ValueError, "ignore_index: expected an integer of 64 bits, got one of 64"),
    ({"counts": 3}, TypeError, "counts: expected a pair"),
    ({"counts": (3.0, 1)}, TypeError, "counts[0]: expected an integer"),
    ({"counts": (9, 1)}, ValueError, "6 (tokens) >= counts[0]"),
    ({"softcap": -1.0}, ValueError, "softcap: expected a number above 0, got -1.0"),
    ({"vocab_group": "world"}, TypeError, "vocab_group: expected a torch.distributed process group, got str"),
    ({"backend": "fast"}, ValueError, "backend='fast': expected auto, torch, triton, cpu, cuda or reference"),
]

TERM_ERRORS = [
    ({"old_log_prob": zeros(6)}, ValueError, "old_log_prob: expected shape [2, 3], got [6]"),
    ({"old_log_prob": torch.tensor([[0, -torch.inf, -1]] * 2)}, ValueError, "old_log_prob: expected no -inf, which is"),
    ({"advantage": zeros(3)}, ValueError, "advantage: expected shape [2, 3] or [2], got [3]"),
    ({"replayed": zeros(2, 3)}, TypeError, "replayed: expected dtype torch.bool, got torch.float32"),
    ({"clip": 0.2}, TypeError, "clip: expected a pair (low, high) or None, got 0.2"),
    ({"clip": (0.2, -0.1)}, ValueError, "clip[1]: expected a number of at least 0, got -0.1"),
    ({"clip": (2.0, 0.2)}, ValueError, "clip[0]: expected a number of at most 1, got 2.0"),
    ({"beta": 0.0}, ValueError, "beta: expected a number above 0, got 0.0"),
    ({"entropy_coef": float("inf")}, ValueError, "entropy_coef: expected a finite number, got inf"),
    ({"normalizer": torch.ones(1)}, ValueError, "normalizer: expected shape [], got [1]"),
    ({"normalizer": torch.tensor(-2)}, ValueError, "normalizer: expected a number above 0; 1 of 1 are not"),
    ({"mask": torch.ones(2, 3)}, TypeError, "mask: expected dtype torch.bool, got torch.float32"),
    ({"mask": torch.ones(2, dtype=torch.bool)}, ValueError, "mask: expected shape [2, 3], got [2]"),
]


def entropy_of(bounds, target=None):
    target = zeros(6, dtype=torch.int64) if target is None else target
    return kernels.sequence_entropy(zeros(*target.shape, 8), zeros(20, 8), target, torch.tensor(bounds))


def name_of(change):
    return next(iter(change)) if isinstance(change, dict) else ""


@pytest.mark.parametrize(("change", "kind", "message"), HEAD_ERRORS, ids=name_of)
def test_head_arguments(change, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        kernels.linear_log_prob(**head() | change)
    with pytest.raises(kind, match=re.escape(message)):
        kernels.linear_policy_loss(**head() | tokens() | change)


@pytest.mark.parametrize(("change", "kind", "message"), TERM_ERRORS, ids=name_of)
def test_policy_arguments(change, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        kernels.linear_policy_loss(**head() | tokens() | change)
    with pytest.raises(kind, match=re.escape(message)):
        kernels.policy_loss(zeros(2, 3), **tokens() | change)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: kernels.policy_loss(zeros(3), zeros(3), zeros(3), entropy_coef=0.1), ValueError, "entropy: "),
        (lambda: kernels.importance_ratio(zeros(3), zeros(2)), ValueError, "old_log_prob: expected shape [3], got [2]"),
        (lambda: kernels.importance_ratio(3.0, zeros(2)), TypeError, "log_prob: expected a tensor, got float"),
        (lambda: kernels.shape_ratio(torch.ones(3), -1.0), ValueError, "beta: expected a number above 0, got -1.0"),
        (lambda: kernels.shape_ratio(1.0, 0.1), TypeError, "ratio: expected a tensor, got float"),
        (
            lambda: kernels.group_advantage(zeros(2, 3), zeros(2, 3).long()),
            ValueError,
            "reward: expected shape [N], got",
        ),
        (lambda: kernels.group_advantage(zeros(3), zeros(3)), TypeError, "group: expected dtype torch.int32 or"),
        (lambda: entropy_of([0, 6], head()["target"]), ValueError, "target: expected shape [T], packed sequences"),
        (lambda: entropy_of([0.0, 6.0]), TypeError, "cu_seqlens: expected dtype torch.int32 or torch.int64, got"),
        (lambda: entropy_of([[0, 6]]), ValueError, "cu_seqlens: expected shape [N + 1], got [1, 2]"),
        (lambda: entropy_of([0, 5]), ValueError, "bounds ascending from 0 to 6; 1 of 2 are not, the first is 5 at"),
        (lambda: entropy_of([0, 4, 3, 6]), ValueError, "1 of 4 are not, the first is 4 at position 1"),
    ],
)
def test_other_functions(call, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        call()


@pytest.mark.parametrize("clip", [(0.2, 0.2), None])
def test_a_token_that_is_left_out_may_be_impossible(clip, backend, device):
    impossible = torch.tensor([[-1.0, -torch.inf, -1], [-torch.inf, -1, -1]], device=device)
    case = {name: value.to(device) for name, value in (head() | tokens() | {"old_log_prob": impossible}).items()}
    case["target"][0, 1] = -100
    mask = torch.tensor([[True, True, True], [False, True, True]], device=device)
    for loss in (
        kernels.linear_policy_loss(**case, mask=mask, clip=clip, backend=backend).loss,
        kernels.policy_loss(zeros(2, 3, device=device), impossible, case["advantage"], mask=impossible > -2).loss,
    ):
        assert loss.isfinite()


def shapes_of(result):
    return [(value.shape, value.dtype) for value in ([result] if isinstance(result, torch.Tensor) else result)]


def calls_of_all(device, backend, context):
    """The shapes and dtypes of what all functions return, and of gradients, for inputs that are made in a context."""
    with context:
        hidden, weight = (torch.ones(shape, device=device, requires_grad=True) for shape in ((6, 8), (20, 8)))
        target, per_token = zeros(6, dtype=torch.int64, device=device), torch.ones(6, device=device)
        options = {"temperature": per_token, "softcap": 5.0, "backend": backend}
        divisor = {"normalizer": torch.ones((), device=device)}
        terms = {"entropy_coef": 0.1, **divisor}
        results = [
            kernels.linear_log_prob(hidden, weight, target, **options),
            kernels.linear_policy_loss(hidden, weight, target, per_token, per_token, **terms, **options),
            kernels.sequence_entropy(hidden, weight, target, torch.tensor([0, 2, 6], device=device), **options),
            kernels.policy_loss(per_token, per_token, per_token, **divisor),
            kernels.importance_ratio(per_token, per_token),
            kernels.shape_ratio(per_token, 0.1),
            kernels.group_advantage(per_token, target),
        ]
        losses = (results[0].log_prob.sum(), results[1].loss)
        results += [torch.autograd.grad(loss, (hidden, weight)) for loss in losses]
    return [shapes_of(result) for result in results]


def test_tensors_without_values(backend, device):
    """Have shapes and dtypes all the same: of fake tensors, and on the meta device."""
    real = calls_of_all(device, backend, nullcontext())
    assert calls_of_all(device, backend, FakeTensorMode()) == real
    assert calls_of_all("meta", "auto", nullcontext()) == real


@pytest.mark.parametrize("context", [nullcontext(), FakeTensorMode()], ids=["meta", "fake"])
def test_the_reference_needs_values(context):
    with context:
        arguments = {name: value.to("meta") for name, value in head().items()}
        with pytest.raises(ValueError, match="hidden: expected a tensor with values"):
            kernels.linear_log_prob(**arguments, backend="reference")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_values_on_the_gpu_under_the_debug_switch(monkeypatch):
    monkeypatch.setenv("EXGRPO_CHECK", "1")
    arguments = {name: value.cuda() for name, value in head().items()}
    arguments["target"][1, 2] = 20
    with pytest.raises(ValueError, match="the first is 20 at position 5"):
        kernels.linear_log_prob(**arguments)
