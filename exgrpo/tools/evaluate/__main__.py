"""`python -m exgrpo.tools.evaluate`."""

import sys

if __name__ == "__main__":  # grading processes import this module, too, but must not run it
    from exgrpo.extras import needs

    with needs(__name__, "exgrpo[train]"):
        from exgrpo.tools.evaluate.program import main
        from exgrpo.train.common.process import leave

    leave(main(sys.argv[1:]))
