"""`python -m exgrpo.train.experience`."""

import sys

from exgrpo.extras import needs

with needs(__name__, "exgrpo[train]"):
    from exgrpo.train.experience_data.program import main

sys.exit(main(sys.argv[1:]))
