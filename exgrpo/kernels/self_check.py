"""Whether a backend computes rightly on this machine: a small case against float64."""

import torch

from exgrpo.kernels import dispatch, linear_policy_loss

SHAPE = (33, 48, 301)
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Of the gradients' relative error: rounding makes 1e-6 and, in 16 bits, 4e-3."""


def self_check(backend: str, device: torch.device, dtype: torch.dtype) -> float:
    """Relative error of a policy loss's gradients against float64 on full logits, from the same rounded operands."""
    count, width, vocabulary = SHAPE
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*size, generator=generator) for size in ((count, width), (vocabulary, width)))
    operands = [values.to(device, dtype) for values in (hidden, weight / width**0.5)]
    target = torch.randint(vocabulary, (count,), generator=generator).to(device)
    advantage = torch.randn(count, generator=generator).to(device)
    old = torch.full_like(advantage, -6.0)

    def gradients(dtype: torch.dtype, name: str) -> list[torch.Tensor]:
        states, head = (values.to(dtype, copy=True).requires_grad_() for values in operands)
        result = linear_policy_loss(states, head, target, old, advantage, clip=None, entropy_coef=0.01, backend=name)
        return [gradient.double() for gradient in torch.autograd.grad(result.loss, (states, head))]

    pairs = zip(gradients(dtype, backend), gradients(torch.float64, dispatch.REFERENCE), strict=True)
    return max(((ours - exact).norm() / exact.norm()).item() for ours, exact in pairs)
