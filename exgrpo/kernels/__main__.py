"""Which backends there are on this machine, why the others are not, and whether they compute rightly.

python -m exgrpo.kernels
"""

import argparse
import sys
from collections.abc import Sequence

import torch

from exgrpo import __version__
from exgrpo.kernels import backend_choice, dispatch, extension
from exgrpo.kernels.self_check import TOLERANCES, self_check
from exgrpo.kernels.tables import dtype_name


def main(argv: Sequence[str]) -> int:
    """Print a line for each backend on each kind of device; the exit status is 1 where one computes wrongly."""
    argparse.ArgumentParser(prog="exgrpo kernels", description=__doc__.partition("\n")[0]).parse_args(argv)
    print(f"exgrpo {__version__} in {extension.ROOT}, torch {torch.__version__}")
    print("Checked: the error of a policy loss's gradients against float64.")
    kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    wrong = False
    for device in map(torch.device, kinds):
        default = dispatch.automatic(device, torch.float32, backend_choice.LARGE + 1)
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
            found = ", ".join(f"{dtype_name(dtype)} {error:.1e}" for dtype, error in errors.items())
            verdict = f"{'right' if right else 'WRONG'}, {found}{', the default' * (name == default)}"
            print(f"{device.type:5} {name:7} {verdict}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
