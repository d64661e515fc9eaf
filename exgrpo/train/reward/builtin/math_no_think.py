"""The reward of answers with or without thinking."""

from exgrpo.train.reward.grading import final_answer
from exgrpo.train.reward.grading import math_no_think as reward
from exgrpo.train.reward.grading import math_no_think_form as form
from exgrpo.train.reward.grading import math_no_think_found as found

__all__ = ["decisive_part", "form", "found", "reward"]


def decisive_part(response: str) -> str | None:
    """The answer."""
    return final_answer(response) or None
