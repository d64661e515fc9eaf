r"""The reward of questions of reasoning-gym: the package's own verifier, on the answer in the response.

The answer is what the last <answer> tags hold of what follows the last "</think>", as the package itself has it. Where
there are none it is the last \boxed{...} of that, else all of it, stripped.
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
    """What the verifier of the question's data set gives the answer: 1 for a right one, some give less to others.

    Args:
        response: of the model.
        gold: as exgrpo.train.data.gym writes it.
    """
    kept = json.loads(gold)
    data_set = _data_set(kept["data_set"], json.dumps(kept["arguments"]))
    entry = ast.literal_eval(kept["entry"])
    try:
        return float(data_set.score_answer(answer(response), entry))
    except Exception:  # some verifiers raise at an answer that they cannot read
        return 0.0


def reward_key(response: str, gold: str) -> str:
    """The answer, with every run of white space as one space."""
    return " ".join(answer(response).split())


def answer(response: str) -> str:
    """The answer in a response; "" where there is none."""
    text = response.rpartition(END_OF_THINKING)[2]
    for found in (tagged_answer(text), boxed_answer(text)):
        if found is not None:
            return found
    return text.strip()


@lru_cache(maxsize=64)
def _data_set(name: str, arguments: str) -> Any:
    return create_dataset(name, **json.loads(arguments), seed=0, size=1)
