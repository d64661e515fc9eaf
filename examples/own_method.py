r"""A replay method of your own in two functions: hard questions first, and no answer more than twice.

    python exgrpo/train/main.py --recipe builtin:countdown \
        --experience.prioritise examples/own_method.py:hard_and_rare \
        --experience.expire retirement examples/own_method.py:worn_out

Each function gets all stored answers as columns and returns one value per answer. The other three functions of the
method stay those of ExGRPO. The run's output shows the effect: `replayed` counts the replayed answers of a step, and
`buffer` shrinks as answers expire. In metrics.jsonl, `replayed_times_max` is at most 2.

What to change next: the weights, by any column listed in docs/methods.md; `admit`, `compose` and `weigh` are set in the
same way.
"""

from exgrpo.train.replay import Expired, Priority

MOST = 2


def hard_and_rare(candidates, options):
    """Return log-weights: each success of the question's group, and each replay, divides the probability by e."""
    return Priority(-candidates.count - candidates.replays)


def worn_out(candidates, options):
    """Expire answers that have been replayed twice."""
    return Expired(candidates.replays >= MOST)
