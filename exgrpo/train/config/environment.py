"""The options of answers of several turns."""

from typing import Annotated, Literal

from pydantic import Field

from exgrpo.train.common.functions import Functions
from exgrpo.train.config.section import Section, StopString

ENVIRONMENTS = Functions("exgrpo.train.rollout.turns.environment", "environment.function")
MOST_TURNS = 1000


class EnvironmentConfig(Section):
    """What replies to the policy within an answer: tools, games, users (docs/environments.md)."""

    function: Annotated[str, ENVIRONMENTS.checked] | None = Field(
        None, description=f"What replies: {ENVIRONMENTS.choices} None: nothing does."
    )
    stop: tuple[StopString, ...] | None = Field(
        None,
        description="Strings at which the policy waits for a reply, besides the EOS token; None: the function's.",
    )
    role: Literal["user", "tool"] | None = Field(
        None, description="Replies are messages of this role in the chat template; None: they are text as it is."
    )
    turns: int = Field(8, ge=2, le=MOST_TURNS, description="Turns of the policy in an answer, at most.")
    time_limit: float = Field(
        10.0, gt=0, le=3600, description="Seconds for a reply, at most an hour; then the answer ends unfinished."
    )
