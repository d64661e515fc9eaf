"""Which backends there are on this machine, why the others are not, and whether they compute rightly.

python -m exgrpo.kernels
"""

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from exgrpo import __version__
from exgrpo.kernels import backend_choice, dispatch, extension, linear_policy_loss
from exgrpo.kernels.tables import dtype_name

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

    def gradients(dtype: torch.dtype, name: str) -> list[Tensor]:
        states, head = (values.to(dtype, copy=True).requires_grad_() for values in operands)
        result = linear_policy_loss(states, head, target, old, advantage, clip=None, entropy_coef=0.01, backend=name)
        return [gradient.double() for gradient in torch.autograd.grad(result.loss, (states, head))]

    pairs = zip(gradients(dtype, backend), gradients(torch.float64, dispatch.REFERENCE), strict=True)
    return max(((ours - exact).norm() / exact.norm()).item() for ours, exact in pairs)


def main(argv: Sequence[str]) -> int:
    """Print a line for each backend on each kind of device; the exit status is 1 where one computes wrongly."""
    argparse.ArgumentParser(prog="exgrpo kernels", description=__doc__.partition("\n")[0]).parse_args(argv)
    print(f"exgrpo {__version__} in {extension.ROOT}, torch {torch.__version__}")
    print("Checked: the error of a policy loss's gradients against float64.")
    kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    wrong = False
    for device in map(torch.device, kinds):
        defaults = {dtype: dispatch.automatic(device, dtype, backend_choice.LARGE + 1) for dtype in TOLERANCES}
        for name in dispatch.BACKENDS:
            reason = dispatch.unavailable(name, device)
            if reason:
                print(f"{device.type:5} {name:7} not available: {reason}")
                continue
            try:
                errors = {dtype: self_check(name, device, dtype) for dtype in TOLERANCES}
            except RuntimeError as error:  # its self-test failed, or it cannot even run
                wrong = True
                print(f"{device.type:5} {name:7} WRONG, {error}")
                continue
            right = all(error < TOLERANCES[dtype] for dtype, error in errors.items())
            wrong |= not right
            found = ", ".join(
                f"{dtype_name(dtype)} {error:.1e}{' (the default)' * (defaults[dtype] == name)}"
                for dtype, error in errors.items()
            )
            print(f"{device.type:5} {name:7} {'right' if right else 'WRONG'}, {found}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
