"""`python -m benchmarks.gpu_model`."""

import sys

from benchmarks.gpu_model.program import main

sys.exit(main(sys.argv[1:]))
