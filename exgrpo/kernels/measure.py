"""Times the backends on the machine at hand and writes the table by which ``auto`` chooses:

    python -m exgrpo.kernels.measure --output FILE

EXGRPO_BACKEND_TABLE=FILE has it used; its sections may also replace the shipped ones. Training never runs this.
"""

import argparse
import sys
from pathlib import Path

import torch

from exgrpo.kernels.tables import DTYPES
from exgrpo.kernels.tuning.backend_timing import tabulate
from exgrpo.kernels.tuning.workload import Shape, seconds_of, shape_of

SHAPES = {
    "cpu": ((64, 32, 64), (512, 96, 512), (1024, 896, 32000), (512, 1536, 151936)),
    "cuda": ((512, 96, 512), (8192, 1536, 151936), (8192, 3584, 152064)),
}


def main(argv: list[str]) -> int:
    """Run the program; returns its exit status."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("choice.toml"), help="the table (%(default)s)")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16", "float32"], help="of the operands")
    shapes = [Shape(*numbers) for numbers in SHAPES[device.type]]
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=shapes, metavar="T,D,V")
    options = parser.parse_args(argv)
    try:
        tabulate(options.dtype, options.shapes, device, seconds_of, options.output)
    except (RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
