"""Choose a rollout engine by name or automatically, and open it."""

from collections.abc import Callable
from dataclasses import dataclass

from exgrpo.train.common.distributed import World
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.policy.check import check_positions
from exgrpo.train.rollout.engine import EngineSettings, RolloutEngine
from exgrpo.train.rollout.server.engine import ServerEngine
from exgrpo.train.rollout.transformers.engine import TransformersEngine
from exgrpo.train.rollout.vllm import availability
from exgrpo.train.rollout.vllm.engine import VllmEngine

ENGINES: dict[str, Callable[[EngineSettings, World], RolloutEngine]] = {
    "server": ServerEngine,
    "transformers": TransformersEngine,
    "vllm": VllmEngine,
}
"""Constructor for each name that `RolloutConfig.engine` allows."""


@dataclass(frozen=True)
class Choice:
    """Name of an engine, and the reason if it is not the one that `auto` prefers."""

    name: str
    reason: str | None = None

    def __str__(self) -> str:
        return self.name + (f" ({self.reason})" if self.reason else "")


def choose_engine(settings: EngineSettings, world: World) -> Choice:
    """Choose the engine for the machines of all ranks; a collective call.

    Raises:
        ConfigError: vLLM is requested, by name or by `tensor_parallel`, and cannot run here, `tensor_parallel` does
            not divide processes or heads, or the model has too few positions.
    """
    prompt, response = settings.max_prompt_tokens, settings.rollout.max_tokens
    check_positions(settings.source, settings.length, f"max_prompt_tokens + max_tokens ({prompt} + {response})")
    choice = _choose(settings, world)
    ranks = settings.rollout.tensor_parallel
    if ranks == 1:
        return choice
    if choice.name != "vllm":
        raise ConfigError(
            f"tensor_parallel ({ranks}) is for vLLM in the trainer's process, and the engine is "
            f"{choice}: take tensor_parallel 1"
        )
    heads, path = settings.source.config.get_text_config().num_attention_heads, settings.source.path
    for what, number in (("processes of this run", world.size), (f"attention heads of {path}", heads)):
        if number % ranks:
            raise ConfigError(f"tensor_parallel ({ranks}) does not divide the {number} {what}: take one that does")
    return choice


def _choose(settings: EngineSettings, world: World) -> Choice:
    asked = "server" if settings.rollout.servers else settings.rollout.engine
    if asked == "auto" and world.device.type == "cpu" and settings.rollout.tensor_parallel == 1:
        return Choice("transformers")
    if asked not in ("auto", "vllm"):
        return Choice(asked)
    obstacle = next(filter(None, world.gather(availability.obstacle(settings, world))), None)  # one for all ranks
    if obstacle is None:
        return Choice("vllm")
    if asked == "auto":
        return Choice("transformers", obstacle)
    raise ConfigError(f"engine: {obstacle}; or take the engine transformers")


def open_engine(choice: Choice, settings: EngineSettings, world: World) -> RolloutEngine:
    """Load the model into the chosen engine; a collective call."""
    return ENGINES[choice.name](settings, world)
