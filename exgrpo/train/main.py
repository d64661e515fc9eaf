"""Train a reasoning model by ExGRPO: `deepspeed exgrpo/train/main.py [--recipe FILE] [--section.field VALUE ...]`."""

import sys

if __name__ == "__main__":
    # This file's folder comes first on the path of a script; its modules must not pass for top-level packages.
    sys.path.pop(0)
    from exgrpo.extras import needs

    with needs(__name__, "exgrpo[train]"):
        from exgrpo.train.ending import leave
        from exgrpo.train.program import main

    leave(main(sys.argv[1:]))
