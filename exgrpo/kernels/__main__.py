"""Show the backends of this machine, their self-tests, and the order in which ``auto`` tries them.

python -m exgrpo.kernels
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import product

import torch

from exgrpo import __version__
from exgrpo.kernels import backend_choice, dispatch, extension, self_test

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def verdict(name: str, device: torch.device) -> str:
    """Return a few words on a backend, which begin with "not available" or "WRONG" if it is that."""
    if reason := dispatch.unavailable(name, device):
        return f"not available: {reason}"
    if name == self_test.PLAIN:
        return "plain PyTorch, with which the others are compared"
    for dtype in DTYPES:
        try:
            fault = self_test.fault(name, device, dtype, dispatch.load)
        except RuntimeError as error:
            fault = str(error)
        if fault:
            return f"WRONG in {dtype}: {fault}"
    return "right"


def main(argv: Sequence[str]) -> int:
    """Print the backends and the table of choices; the exit status is 1 where a backend computes wrongly."""
    argparse.ArgumentParser(prog="exgrpo kernels", description=__doc__.partition("\n")[0]).parse_args(argv)
    print(f"exgrpo {__version__} in {extension.ROOT}, torch {torch.__version__}")
    devices = [torch.device(kind) for kind in ("cpu", "cuda") if kind == "cpu" or torch.cuda.is_available()]
    print("\nBackends, compared with torch in float64 on small cases (self-test):")
    verdicts = {(device, name): verdict(name, device) for device, name in product(devices, dispatch.BACKENDS)}
    for (device, name), text in verdicts.items():
        print(f"{device.type:5} {name:7} {text}")
    print(f"\nChoice of auto up to {backend_choice.LARGE} logits, and above:")
    unfit = [key for key, text in verdicts.items() if text.startswith(("not available", "WRONG"))]
    sizes = backend_choice.LARGE, backend_choice.LARGE + 1
    for device, dtype in product(devices, DTYPES):
        orders = (backend_choice.order(device, dtype, size) for size in sizes)
        small, large = (next(name for name in order if (device, name) not in unfit) for order in orders)
        print(f"{device.type:5} {dtype!s:15} {small:7} {large}")
    return int(any(text.startswith("WRONG") for text in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
