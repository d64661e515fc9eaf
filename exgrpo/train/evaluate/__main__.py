"""`python -m exgrpo.train.evaluate`."""

import sys

from exgrpo.extras import needs

with needs(__name__, "exgrpo[train]"):
    from exgrpo.train.evaluate.program import main

sys.exit(main(sys.argv[1:]))
