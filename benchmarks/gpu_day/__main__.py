"""`python -m benchmarks.gpu_day`."""

import sys

from benchmarks.gpu_day.program import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
