"""Rollout engines behind one small interface."""

from exgrpo.train.rollout.engine import EngineCounts, Finished, RolloutEngine, RolloutError, Sampling, collect
from exgrpo.train.rollout.transformers_engine import TransformersEngine

__all__ = ["EngineCounts", "Finished", "RolloutEngine", "RolloutError", "Sampling", "TransformersEngine", "collect"]
