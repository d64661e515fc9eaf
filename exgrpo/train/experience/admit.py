"""Which answers of a graded group are stored: functions `(group, setting) -> trajectories`.

Of equal answers to a question the memory keeps the newest if the function says `needs(distinct="response")`, with
"key" also of those with the same solution key. Otherwise it keeps all, so that a group stays as it was.
"""

from exgrpo.train.experience.buckets import BUCKETS
from exgrpo.train.experience.difficulty import count_successes
from exgrpo.train.experience.rules import needs
from exgrpo.train.experience.settings import Setting
from exgrpo.train.records import Group, Trajectory
from exgrpo.train.reward.success import EPSILON


@needs(distinct="response")
def successes(group: Group, setting: Setting) -> list[Trajectory]:
    """The fresh answers that are successes; of continuous rewards those that beat their group's mean.

    ExGRPO, arXiv 2510.02245, section 3.2.
    """
    return BUCKETS[setting.options.bucket_by].admitted(group, setting.success)


@needs(distinct="key")
def solutions(group: Group, setting: Setting) -> list[Trajectory]:
    """The successes of a group; of those to a question that have the same solution key the memory keeps the newest.

    So a frequent solution does not fill the buffer: Re:Max (package remax-rl) keeps modes so.
    """
    return successes(group, setting)


def with_advantage(group: Group, setting: Setting) -> tuple[Trajectory, ...]:
    """All fresh answers of a group whose rewards differ: all of them have an advantage, or nearly so.

    Rollout-level replay, arXiv 2606.04560; POPO, arXiv 2606.01281.
    """
    rewards = [row.net_reward for row in group.rows]
    return group.fresh if max(rewards) - min(rewards) > EPSILON else ()


def in_band(group: Group, setting: Setting) -> tuple[Trajectory, ...]:
    """All fresh answers of a group whose pass rate m / F lies in `band`.

    The high-quality groups of BAPO, arXiv 2602.20722.
    """
    evidence = count_successes(group, setting.success)
    low, high = setting.options.band
    return group.fresh if low - EPSILON <= evidence.successes / evidence.rows <= high + EPSILON else ()


def all(group: Group, setting: Setting) -> tuple[Trajectory, ...]:
    """All fresh answers, right or wrong (Arnal et al., arXiv 2604.08706; RePO, arXiv 2506.09340)."""
    return group.fresh


@needs(distinct="response")  # of what a run starts with
def nothing(group: Group, setting: Setting) -> tuple[Trajectory, ...]:
    """No answer: what is replayed are prompts, or traces that were given at the start."""
    return ()
