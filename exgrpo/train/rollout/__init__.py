"""Rollout engines behind one small interface."""

from exgrpo.train.rollout.engine import RolloutEngine, Sampling
from exgrpo.train.rollout.transformers_engine import TransformersEngine

__all__ = ["RolloutEngine", "Sampling", "TransformersEngine"]
