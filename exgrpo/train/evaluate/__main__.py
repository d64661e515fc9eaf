"""`python -m exgrpo.train.evaluate`."""

import sys

if __name__ == "__main__":  # grading processes import this module, too, and need nothing of it
    from exgrpo.extras import needs

    with needs(__name__, "exgrpo[train]"):
        from exgrpo.train.evaluate.program import main
        from exgrpo.train.process import leave

    leave(main(sys.argv[1:]))
