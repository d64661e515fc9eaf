"""`python -m exgrpo.tools.estimate`."""

import sys

from exgrpo.extras import needs

with needs(__name__, "exgrpo[train]"):
    from exgrpo.tools.estimate.program import main

sys.exit(main(sys.argv[1:]))
