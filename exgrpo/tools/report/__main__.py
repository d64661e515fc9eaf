"""`python -m exgrpo.tools.report`."""

import sys

from exgrpo.extras import needs

with needs(__name__, "exgrpo[train]"):
    from exgrpo.tools.report.program import main

sys.exit(main(sys.argv[1:]))
