"""Configurations for tests: the default run's, with some values changed."""

from functools import cache
from typing import Any

from exgrpo.train.config.options import Config
from exgrpo.train.config.recipe import DEFAULT_RUN, merged, read_recipe, validate

_default_run = cache(read_recipe)  # what is merged is not changed


def configured(*layers: dict[str, Any], **values: Any) -> Config:
    """The default run with nested or dotted values on top, later ones beating earlier ones."""
    return validate(merged(_default_run(DEFAULT_RUN), *layers, values), "test")
