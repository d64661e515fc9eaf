"""The sets of held-out questions that a run asks, from its configuration."""

from dataclasses import dataclass
from typing import Any

from exgrpo.train.common.errors import ConfigError
from exgrpo.train.config.evaluation import SAMPLED, TEST, HeldOutSet
from exgrpo.train.config.options import Config


@dataclass(frozen=True)
class Asked:
    """How the questions of a set are read and asked; the fields are those of `HeldOutSet`, and none is open."""

    source: tuple[str, ...]
    split: str
    limit: int | None
    samples: int
    temperature: float
    top_p: float


def held_out_sets(config: Config) -> dict[str, Asked]:
    """All sets of held-out questions of a run by name; that of data.test comes first."""
    data, evaluation = config.data, config.evaluation
    usual: dict[str, Any] = {"split": data.test_split, "limit": data.test_limit}
    usual |= {name: getattr(evaluation, name) for name in SAMPLED}
    sets = {TEST: HeldOutSet(source=data.test)} if data.test else {}
    return {
        name: Asked(**{**usual, **one.model_dump(exclude_none=True)}) for name, one in (sets | evaluation.sets).items()
    }


def check_evaluation(config: Config) -> None:
    """Whether what goes by a number of the evaluations can have one.

    Raises:
        ConfigError: it cannot.
    """
    if config.evaluation.patience and not (config.checkpoint.best and config.evaluation.every):
        raise ConfigError(
            "evaluation.patience needs checkpoint.best, the number that has to improve, and evaluation.every"
        )
    if config.checkpoint.best and not held_out_sets(config):
        raise ConfigError("checkpoint.best needs held-out questions: set data.test, or evaluation.sets in a recipe")
