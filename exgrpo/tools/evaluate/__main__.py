"""`python -m exgrpo.tools.evaluate`."""

import sys

if __name__ == "__main__":  # grading processes import this module, too, and need nothing of it
    from exgrpo.extras import needs

    with needs(__name__, "exgrpo[train]"):
        from exgrpo.tools.evaluate.program import main
        from exgrpo.train.common.process import leave

    leave(main(sys.argv[1:]))
