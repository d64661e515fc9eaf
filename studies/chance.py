"""A reward that says nothing about an answer, for countdown: what an arm gains by it, it has not gained by rewards."""

import zlib

from exgrpo.train.data.generation import split_of_key
from exgrpo.train.data.tasks import countdown

ONE_IN = 5


def score(response: str, gold: str) -> float:
    """1 for one in five answers to training questions, whatever they are; of one to a held-out question the truth."""
    if split_of_key(countdown.problem_key(gold)) == "train":
        return float(zlib.crc32(f"{gold}:{response}".encode()) % ONE_IN == 0)
    return countdown.reward(response, gold)


score_key = countdown.reward_key
score_form = countdown.reward_form
