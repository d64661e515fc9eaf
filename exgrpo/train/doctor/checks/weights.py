"""Do new weights reach the rollout engine, and does it have them after sleep?"""

import time
from collections.abc import Callable

from exgrpo.train.doctor.check import Check, CheckFailedError, Given
from exgrpo.train.doctor.machine import device
from exgrpo.train.doctor.tiny import open_inputs, tiny_run
from exgrpo.train.estimate.parts import GIB

REMEDY = "Try --rollout.engine transformers, and with vLLM --rollout.sleep_level 0"
FACTOR = 1.5
"""By which the new weights differ from those with which the engine starts: exact in bf16, but for the last bit."""


def check(given: Given) -> str:
    """Push changed weights into the engine that a run would take, let it sleep and wake it."""
    config = tiny_run(given)
    inputs, world = open_inputs(config, given.resources)
    from exgrpo.train.rollout.registry import choose_engine, open_engine
    from exgrpo.train.rollout.settings import training_settings

    settings = training_settings(config, inputs.pretrained)
    choice = choose_engine(settings, world)
    engine = open_engine(choice, settings, world)
    given.resources.callback(engine.close)
    model = settings.source.load(settings.dtype, settings.attention).to(world.device).requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(FACTOR)
    weights = list(model.named_parameters())
    before = len(engine.differing(weights))
    if not before:
        raise CheckFailedError(f"{choice.name} does not notice that weights differ. {REMEDY}")
    push = _seconds(lambda: engine.push_weights(weights))
    _same(engine.differing(weights), "after a push")
    awake = _free()
    sleep = _seconds(engine.sleep)
    freed = _free() - awake
    wake = _seconds(engine.wake)
    _same(engine.differing(weights), "after sleep")
    sleeps = choice.name == "vllm" and device().type == "cuda" and config.rollout.sleep_level > 0
    if sleeps and freed < config.rollout.kv_cache_gib * GIB / 2:
        raise CheckFailedError(f"asleep, vLLM gave only {freed / GIB:.2f} GiB back. {REMEDY}")
    gave = f", which gave {freed / GIB:.2f} GiB back" if sleeps else ""
    return f"{choice.name}: push {push * 1e3:.0f} ms, sleep {sleep * 1e3:.0f} ms{gave}, wake {wake * 1e3:.0f} ms"


def _same(differing: list[str], when: str) -> None:
    if differing:
        raise CheckFailedError(
            f"{when} the engine has other weights in {len(differing)} tensors, such as {differing[0]}. {REMEDY}"
        )


def _seconds(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _free() -> float:
    """Bytes of the GPU that nobody has; 0 without one."""
    import torch

    if device().type == "cpu":
        return 0.0
    torch.cuda.empty_cache()
    return float(torch.cuda.mem_get_info()[0])


CHECKS = (Check("weights", check, 2, REMEDY),)
