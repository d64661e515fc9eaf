"""`python -m exgrpo.train.evaluate`."""

import sys

from exgrpo.train.evaluate.program import main

sys.exit(main(sys.argv[1:]))
