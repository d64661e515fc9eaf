"""Rollout engines behind one small interface."""

from exgrpo.train.common.errors import RolloutError
from exgrpo.train.rollout.engine import Finished, Request, RolloutEngine, Sampling, collect
from exgrpo.train.rollout.stops import NO_STOPS, Stops, parts_of, text_of, turns_of
from exgrpo.train.rollout.transformers.engine import TransformersEngine

__all__ = [
    "NO_STOPS",
    "Finished",
    "Request",
    "RolloutEngine",
    "RolloutError",
    "Sampling",
    "Stops",
    "TransformersEngine",
    "collect",
    "parts_of",
    "text_of",
    "turns_of",
]
