"""The reward of answers that follow the thinking."""

from exgrpo.train.reward.grading import END_OF_THINKING, answer_after_thinking
from exgrpo.train.reward.grading import math as reward
from exgrpo.train.reward.grading import math_form as form
from exgrpo.train.reward.grading import math_found as found

__all__ = ["decisive_part", "form", "found", "reward"]


def decisive_part(response: str) -> str | None:
    """The answer behind the last end of thinking, with that tag."""
    answer = answer_after_thinking(response)
    return None if answer is None else f"{END_OF_THINKING}{answer}"
