"""`python -m exgrpo.tools.experience`."""

import sys

from exgrpo.extras import needs

with needs(__name__, "exgrpo[train]"):
    from exgrpo.tools.experience.program import main

sys.exit(main(sys.argv[1:]))
