"""Times how calls can be launched on the GPU at hand and writes a launch table:

    python -m exgrpo.kernels.tune --output FILE

EXGRPO_LAUNCH_TABLE=FILE has it used; its sections may also replace those of launch.toml. Training never runs this.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from exgrpo.kernels.dispatch import unavailable
from exgrpo.kernels.tables import DTYPES
from exgrpo.kernels.tuning.launch_tuner import Tuner, tune
from exgrpo.kernels.tuning.workload import Shape, seconds_of, shape_of

SHAPES = ((8192, 1536, 151936), (8192, 3584, 152064))


def main(argv: list[str]) -> int:
    """Run the program; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("launch.toml"), help="the table (%(default)s)")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16"], help="of the operands")
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=[Shape(*s) for s in SHAPES], metavar="T,D,V")
    parser.add_argument("--minutes", type=float, default=15.0, help="what has no time then stays (%(default)s)")
    options = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if reason := unavailable("triton", device):
        print(f"error: nothing to tune here: {reason}", file=sys.stderr)
        return 2
    tuner = Tuner(device, seconds_of, time.monotonic() + 60 * options.minutes)
    try:
        tune(tuner, options.dtype, options.shapes, options.output)
    except (RuntimeError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
