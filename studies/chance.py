"""An uninformative reward for countdown: an arm's gain with it is not due to rewards."""

import zlib

from exgrpo.train.data.tasks import countdown, split_of_key

ONE_IN = 5


def score(response: str, gold: str) -> float:
    """Return 1 for one in five answers to training questions, by hash; answers to held-out questions are graded."""
    if split_of_key(countdown.problem_key(gold)) == "train":
        return float(zlib.crc32(f"{gold}:{response}".encode()) % ONE_IN == 0)
    return countdown.reward(response, gold)


score_key = countdown.reward_key
score_form = countdown.reward_form
