r"""Reward of reasoning-gym questions: the package's own verifier, applied to the answer in the response.

The answer is the content of the last <answer> tags after the last "</think>", as in the package itself; without tags
the last \boxed{...} of that text, else the whole of it, stripped.
"""

import ast
import json
from functools import lru_cache
from typing import Any

from exgrpo.extras import needs
from exgrpo.train.reward.grading import END_OF_THINKING, boxed_answer, tagged_answer

with needs(__name__, "exgrpo[tasks]"):
    from reasoning_gym.factory import create_dataset


def reward(response: str, gold: str) -> float:
    """Return the score of the verifier of the question's data set: 1 for a right answer; some give partial credit.

    `gold` is in the format of exgrpo.train.data.gym.
    """
    kept = json.loads(gold)
    data_set = _data_set(kept["data_set"], json.dumps(kept["arguments"]))
    entry = ast.literal_eval(kept["entry"])
    try:
        return float(data_set.score_answer(answer(response), entry))
    except Exception:  # some verifiers raise for answers that they cannot parse
        return 0.0


def reward_key(response: str, gold: str) -> str:
    """Return the answer with each run of white space replaced by one space."""
    return " ".join(answer(response).split())


def answer(response: str) -> str:
    """Return the answer in a response; "" if it is empty."""
    text = response.rpartition(END_OF_THINKING)[2]
    for found in (tagged_answer(text), boxed_answer(text)):
        if found is not None:
            return found
    return text.strip()


@lru_cache(maxsize=64)
def _data_set(name: str, arguments: str) -> Any:
    return create_dataset(name, **json.loads(arguments), seed=0, size=1)
