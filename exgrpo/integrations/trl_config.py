"""The options of ExGRPO in TRL: those of GRPOConfig, and those of a recipe of `exgrpo.train`."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from exgrpo.extras import needs

with needs(__name__, "exgrpo[trl]"):
    from trl import GRPOConfig

    from exgrpo.train.config import ExperienceConfig, ObjectiveConfig, RewardConfig, Section

BETAS = (1e-6, 1e6)
"""Between these `replay_beta` lies: beyond them the shaped ratio is 1 or 0."""


def _help(section: type[Section], name: str) -> dict[str, Any]:
    return {"help": section.model_fields[name].description}


def _of_recipe(section: type[Section], name: str) -> Any:
    return field(default=section.model_fields[name].default, metadata=_help(section, name))


def _list(name: str) -> Callable[[], list[Any]]:
    """The default of a tuple of the experience; an option of a command line can be a list."""
    return partial(list, ExperienceConfig.model_fields[name].default)


_experience, _objective = partial(_of_recipe, ExperienceConfig), partial(_of_recipe, ObjectiveConfig)


@dataclass
class ExGRPOConfig(GRPOConfig):
    """GRPOConfig with the options of experience replay, which are named as in the recipes of `exgrpo.train`.

    Its defaults are the paper's: loss type dr_grpo, advantages that are not scaled, an entropy bonus of 0.001.

    Raises:
        ValueError: an option of the replay is out of its range; the message names it.
    """

    loss_type: str = field(default="dr_grpo", metadata={"help": "dr_grpo, dapo, bnpo or grpo."})
    scale_rewards: str = field(default="none", metadata={"help": "none, group or batch."})
    entropy_coef: float = field(default=0.001, metadata={"help": "Weight of the mean token entropy bonus."})
    ratio: float = _experience("ratio")
    start_pass_rate: float = _experience("start_pass_rate")
    admit: str = _experience("admit")
    prioritise: str = _experience("prioritise")
    compose: str = _experience("compose")
    expire: list[str] = field(default_factory=_list("expire"), metadata=_help(ExperienceConfig, "expire"))
    mu: float = _experience("mu")
    sigma: float = _experience("sigma")
    age_scale: float = _experience("age_scale")
    trajectory: str = _experience("trajectory")
    replayed: int = _experience("replayed")
    advantage: str = _experience("advantage")
    count_replayed: bool = _experience("count_replayed")
    bucket_by: str = _experience("bucket_by")
    band: list[float] = field(default_factory=_list("band"), metadata=_help(ExperienceConfig, "band"))
    cooldown: int = _experience("cooldown")
    lag: int = _experience("lag")
    hard: float = _experience("hard")
    max_per_question: int | None = _experience("max_per_question")
    max_age: int | None = _experience("max_age")
    max_uses: int | None = _experience("max_uses")
    capacity: int | None = _experience("capacity")
    success: float = _of_recipe(RewardConfig, "success")
    weigh: str = _objective("weigh")
    replay_beta: float = _objective("beta")
    second_moment: float = _objective("second_moment")
    trigger: float = _objective("trigger")
    coefficient: float = _objective("coefficient")
    clip_with_replay: bool = _objective("clip_with_replay")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replay_beta is None or not BETAS[0] <= self.replay_beta <= BETAS[1]:
            raise ValueError(
                f"replay_beta: expected a number from {BETAS[0]:g} to {BETAS[1]:g}, got {self.replay_beta}; "
                "for the plain ratio, set weigh='ratio'"
            )
        if not math.isfinite(self.success):
            raise ValueError(f"success: expected a finite number, got {self.success}")
        _ = self.experience, self.objective

    @property
    def experience(self) -> ExperienceConfig:
        """The options of the experience as a section of a recipe."""
        return ExperienceConfig(**self._values(ExperienceConfig))

    @property
    def objective(self) -> ObjectiveConfig:
        """The options of replayed tokens as a section of a recipe; what TRL has its own options for is not in it."""
        own = {field.name for field in fields(GRPOConfig)}
        values = {name: value for name, value in self._values(ObjectiveConfig).items() if name not in own}
        return ObjectiveConfig(**values, beta=self.replay_beta)

    def _values(self, section: type[Section]) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name in section.model_fields}
