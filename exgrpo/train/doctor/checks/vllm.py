"""Does vLLM generate in the trainer's process?"""

import time

from exgrpo.train.doctor.check import Check, CheckFailedError, Given, Skipped
from exgrpo.train.doctor.tiny import open_inputs, tiny_run

REMEDY = "--rollout.engine transformers does without vLLM"


def check(given: Given) -> str:
    """Answer questions with the small model, and see that some answers are right."""
    config = tiny_run(given, {"rollout.engine": "vllm"})
    inputs, world = open_inputs(config, given.resources)
    from exgrpo.train.answers import Answerer
    from exgrpo.train.preflight import QUESTIONS, preflight
    from exgrpo.train.rollout import Sampling
    from exgrpo.train.rollout.registry import Choice, open_engine
    from exgrpo.train.rollout.settings import training_settings
    from exgrpo.train.rollout.vllm.availability import BUILDS, installed_version, obstacle

    settings = training_settings(config, inputs.pretrained)
    reason, kind = obstacle(settings, world), world.device.type
    if reason and (kind not in BUILDS or installed_version(kind) is None):
        raise Skipped(reason)
    if reason:
        raise CheckFailedError(f"{reason}; {REMEDY}")
    engine = open_engine(Choice("vllm"), settings, world)
    given.resources.callback(engine.close)
    answerer = Answerer(engine, inputs.grader, inputs.pretrained.tokenizer.decode, world)
    start = time.perf_counter()
    questions = inputs.train_set.first(QUESTIONS)
    result = preflight(config, answerer, questions, Sampling(max_tokens=config.rollout.max_tokens))
    seconds = time.perf_counter() - start
    if not result.right:  # the model answers four in ten rightly
        raise CheckFailedError(f"{result}: vLLM computes another model. One ends: {result.example!r}. {REMEDY}")
    return f"{result.right} of {result.answers} answers are right; {answerer.tokens / seconds:.0f} tokens/s"


CHECKS = (Check("vllm", check, 1, REMEDY),)
