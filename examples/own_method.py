r"""An own method of replay, in two functions: hard questions first, and no answer more than twice.

    python exgrpo/train/main.py --recipe builtin:countdown \
        --experience.prioritise examples/own_method.py:hard_and_rare \
        --experience.expire retirement examples/own_method.py:worn_out

Each function gets all stored answers as columns and returns one value for each of them. The other three functions of
the method stay those of ExGRPO. The lines of the run show it: `replayed` counts the replayed answers of a step, and
`buffer` shrinks where answers are worn out. In metrics.jsonl, `replayed_times_max` is at most 2.

What to change next: the weights, by any column that docs/methods.md names; `admit`, `compose` and `weigh` are named in
the same way.
"""

from exgrpo.train.replay import Expired, Priority

MOST = 2


def hard_and_rare(units, setting):
    """Log-weights: each success of the question's group, and each replay, makes it less likely by a factor of e."""
    return Priority(-units.count - units.replays)


def worn_out(units, setting):
    """Answers that have been replayed twice are forgotten."""
    return Expired(units.replays >= MOST)
