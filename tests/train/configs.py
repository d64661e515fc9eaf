"""Configurations for tests: the default run's, with some values changed."""

from typing import Any

from exgrpo.train.config import Config
from exgrpo.train.recipe import DEFAULT_RUN, merged, read_recipe, validate


def configured(*layers: dict[str, Any], **values: Any) -> Config:
    """The default run with nested or dotted values on top, later ones beating earlier ones."""
    return validate(merged(read_recipe(DEFAULT_RUN), *layers, values), "test")
