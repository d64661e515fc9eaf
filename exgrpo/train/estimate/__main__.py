"""`python -m exgrpo.train.estimate`."""

import sys

from exgrpo.train.estimate.program import main

sys.exit(main(sys.argv[1:]))
