"""Show the backends of this machine, their self-tests, and the choice of ``auto``.

python -m exgrpo.kernels
"""

import argparse
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby, product

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


def gpu() -> str:
    """Return the GPU that torch finds in a few words."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, {backend_choice.architecture(torch.device('cuda'))}"
    return "torch finds none" if torch.version.cuda or torch.version.hip else "none, as this torch is built for CPUs"


def choices(device: torch.device, unfit: Collection[str]) -> Iterator[str]:
    """Return a line for all dtypes of which the same is true: what auto takes on a device, and why."""

    def taken(dtype: torch.dtype) -> tuple[str, str, str]:
        orders = [
            backend_choice.order(device, dtype, size) for size in (backend_choice.LARGE, backend_choice.LARGE + 1)
        ]
        small, large = (next(name for name in order if name not in unfit) for order in orders)
        first = orders[1][0]
        return (
            small,
            large,
            backend_choice.why(device, dtype) if large == first else f"{first} cannot be used, see above",
        )

    for (small, large, why), dtypes in groupby(DTYPES, taken):
        names = " ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        yield f"{device.type:5} {names:33} {small:7} {large:7} {why}"


def main(argv: Sequence[str]) -> int:
    """Print the backends and the table of choices; the exit status is 1 where a backend computes wrongly."""
    argparse.ArgumentParser(prog="exgrpo kernels", description=__doc__.partition("\n")[0]).parse_args(argv)
    print(f"exgrpo {__version__} in {extension.ROOT}, torch {torch.__version__}")
    print(f"GPU: {gpu()}\nCUDA library: {extension.cuda_state()}")
    devices = [torch.device(kind) for kind in ("cpu", "cuda") if kind == "cpu" or torch.cuda.is_available()]
    print("\nBackends, compared with torch in float64 on small cases (self-test):")
    verdicts = {(device, name): verdict(name, device) for device, name in product(devices, dispatch.BACKENDS)}
    for (device, name), text in verdicts.items():
        print(f"{device.type:5} {name:7} {text}")
    print(f"\nChoice of auto up to {backend_choice.LARGE} logits, above, and why:")
    unfit = [key for key, text in verdicts.items() if text.startswith(("not available", "WRONG"))]
    for device in devices:
        print(*choices(device, {name for where, name in unfit if where == device}), sep="\n")
    if named := os.environ.get(dispatch.ENVIRONMENT):
        print(f"{dispatch.ENVIRONMENT}={named} is set, and decides instead of auto")
    return int(any(text.startswith("WRONG") for text in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
