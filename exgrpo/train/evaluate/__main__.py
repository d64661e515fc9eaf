"""`python -m exgrpo.train.evaluate`."""

import sys

if __name__ == "__main__":  # grading processes import this module, too, and need nothing of it
    from exgrpo.extras import needs

    with needs(__name__, "exgrpo[train]"):
        from exgrpo.train.ending import leave
        from exgrpo.train.evaluate.program import main

    leave(main(sys.argv[1:]))
