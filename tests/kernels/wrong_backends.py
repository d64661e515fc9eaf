"""Backends that are made wrong in one place, and calls that need this place."""

from types import SimpleNamespace

import torch

from exgrpo.kernels import dispatch, group_advantage, policy_loss, sequence_entropy
from exgrpo.kernels.chunks.softmax import PolicyRows
from exgrpo.kernels.inputs import LogProb
from exgrpo.kernels.torch_chunks.torch_kept import KeptPasses
from exgrpo.kernels.torch_chunks.torch_passes import TorchPasses

from .support import make_case

TORCH = dispatch.load("torch")


def install(monkeypatch, **functions):
    """Makes the cpu backend one that is plain torch but for some functions."""
    names = ("KEPT_PART", "passes_of", "kept_passes_of", "masked_passes_of", "token_objective", "centre_groups")
    names += ("scale", "segment_mean")
    backend = SimpleNamespace(**{name: getattr(TORCH, name) for name in names} | functions)
    monkeypatch.setattr(dispatch, "load", lambda name: backend if name == "cpu" else TORCH)


def passes_with(base=TorchPasses, of="passes_of", **methods):
    """Passes of plain torch with some methods of their own; each gets what the right one returns."""

    def method(name, change):
        return lambda self, *given, **more: change(getattr(base, name)(self, *given, **more))

    return {of: type("Changed", (base,), {name: method(name, change) for name, change in methods.items()})}


def case(**options):
    return make_case(20, 16, 40, torch.float32, "cpu", ignored=False, **options)


def head_call(backend="auto", **options):
    inputs = case(**options)
    result = inputs.log_prob(backend=backend)
    return (*result, *inputs.gradients(result.log_prob.sum()))


def kept_call():
    return head_call(kept=(2, 0, 5))


def loss_call(backend="auto"):
    inputs = case()
    result = inputs.policy_loss(torch.full((20,), -3.0), torch.linspace(-1, 1, 20), backend=backend)
    return result.loss, result.ratio, *inputs.gradients(result.loss)


def token_call():
    return policy_loss(-torch.arange(5.0), torch.full((5,), -2.0), torch.ones(5))[:2]


def group_call():
    return (group_advantage(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1])),)


def mean_call():
    inputs = case()
    return (sequence_entropy(inputs.hidden, inputs.weight, inputs.target, torch.tensor([0, 3, 20])),)


def row_of(log_prob=None, ratio=None):
    """Changes one field of what a pass returns."""

    def change(found):
        if isinstance(found, PolicyRows):
            found.ratio.copy_(ratio(found.ratio))  # a row of the results of the call
            return found
        statistics, result = found
        return statistics, LogProb(log_prob(result.log_prob), result.entropy)

    return change


PLACES = {
    "log_prob": (head_call, lambda bad: passes_with(finished=row_of(log_prob=bad))),
    "gradient": (head_call, lambda bad: passes_with(gradient=bad)),
    "gradient over kept sets": (
        kept_call,
        lambda bad: {"KEPT_PART": 256, **passes_with(KeptPasses, "kept_passes_of", gradient=bad)},  # as Triton has it
    ),
    "ratio": (loss_call, lambda bad: passes_with(policy=row_of(ratio=bad))),
    "gradient of the loss": (loss_call, lambda bad: passes_with(gradient=bad)),
    "tokens": (token_call, lambda bad: {"token_objective": lambda *a: after(TORCH.token_objective(*a), bad)}),
    "groups": (group_call, lambda bad: {"centre_groups": lambda *a: bad(TORCH.centre_groups(*a))}),
    "segments": (mean_call, lambda bad: {"segment_mean": lambda *a: bad(TORCH.segment_mean(*a))}),
}
"""A call, and how to spoil what it needs."""


def after(objective, bad):
    return objective._replace(coefficient=bad(objective.coefficient))


def one_entry(values, entry):
    values = values.clone()
    values.view(-1)[values.numel() // 2] = entry
    return values


def refuse(_):
    raise ValueError("no such instruction\non this machine")


DEFECTS = {
    "a little": lambda values: values * 1.0005,
    "one entry": lambda values: one_entry(values, 7.0),
    "much": lambda values: values + 100,
    "nan": lambda values: one_entry(values, torch.nan),
    "shape": lambda values: values[:-1],
    "raises": refuse,
}
