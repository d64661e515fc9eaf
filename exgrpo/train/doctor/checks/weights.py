"""Do new weights reach the rollout engine, and does it have them after sleep?"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from exgrpo.train.doctor.check import Check, CheckFailedError, Given
from exgrpo.train.doctor.machine import device
from exgrpo.train.doctor.tiny import open_inputs, tiny_run
from exgrpo.train.estimate.parts import GIB

if TYPE_CHECKING:
    from torch import Tensor

    from exgrpo.train.rollout import RolloutEngine

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
    seconds, freed = exercise(engine, list(model.named_parameters()))
    sleeps = choice.name == "vllm" and world.device.type == "cuda" and config.rollout.sleep_level > 0
    if sleeps and freed < config.rollout.kv_cache_gib * GIB / 2:
        raise CheckFailedError(f"asleep, vLLM gave only {freed / GIB:.2f} GiB back. {REMEDY}")
    told = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in seconds.items())
    return f"{choice.name}: {told}" + (f"; asleep it gave {freed / GIB:.2f} GiB back" if sleeps else "")


def exercise(engine: "RolloutEngine", weights: "list[tuple[str, Tensor]]") -> tuple[dict[str, float], float]:
    """Push weights that are not the engine's, and see that it has them then and after sleep.

    Returns:
        the seconds of each action by its name, and the bytes of the GPU that sleep gave back.

    Raises:
        CheckFailedError: it has other weights, or does not know which it has.
    """
    if not engine.differing(weights):
        raise CheckFailedError(f"the engine does not notice that its weights differ. {REMEDY}")
    seconds = {"push": _seconds(lambda: engine.push_weights(weights))}
    _same(engine.differing(weights), "after a push")
    awake = _free()
    seconds["sleep"] = _seconds(engine.sleep)
    freed = _free() - awake
    seconds["wake"] = _seconds(engine.wake)
    _same(engine.differing(weights), "after sleep")
    return seconds, freed


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
