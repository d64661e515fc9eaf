"""`python -m exgrpo.train.report`."""

import sys

from exgrpo.train.report.page import main

sys.exit(main(sys.argv[1:]))
