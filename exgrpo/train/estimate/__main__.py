"""`python -m exgrpo.train.estimate`."""

import sys

from exgrpo.extras import needs

with needs(__name__, "exgrpo[train]"):
    from exgrpo.train.estimate.program import main

sys.exit(main(sys.argv[1:]))
