"""Trainers with a scripted engine and a recording policy."""

from types import SimpleNamespace

from exgrpo.train.trainer import Trainer
from tests.train.batches import rows_of
from tests.train.configs import configured
from tests.train.fakes import RecordingPolicy, ScriptedEngine, question_set, rollout_worker

K = 4


def make(skill: dict[int, float], *, free_log_prob: bool = False, **sections) -> Trainer:
    values = {"questions": 6, "rollout": {"samples": K, "max_tokens": 8}, "data": {"max_prompt_tokens": 8}}
    values |= {"experience": {"start_pass_rate": 0.0, "ratio": 0.5}, "optimizer": {"minibatches": 2}}
    engine = ScriptedEngine(skill, free_log_prob=free_log_prob)
    config = configured(values, sections)
    policy = RecordingPolicy(config.rollout.temperature)
    return Trainer(config, question_set(len(skill)), policy, rollout_worker(engine))


def half(count: int) -> dict[int, float]:
    return dict.fromkeys(range(count), 0.5)


def updated(trainer: Trainer) -> list[SimpleNamespace]:
    """The rows of all optimiser steps that the policy remembers."""
    return [row for minibatch, _ in trainer.policy.updates for row in rows_of(minibatch.batch)]
