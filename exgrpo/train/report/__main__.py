"""`python -m exgrpo.train.report`."""

import sys

from exgrpo.train.report.program import main

sys.exit(main(sys.argv[1:]))
