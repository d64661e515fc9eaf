"""What generating the answers of a step takes, by rollout engine: memory while it is awake and asleep, and seconds.

`rollout.engine` auto is taken for vLLM, which it is wherever vLLM is installed. Servers are taken to have as many GPUs
of the same kind as the trainer.
"""

import math
from typing import Literal

from exgrpo.train.config import Config
from exgrpo.train.estimate.parts import GIB, NF4_BYTES, Assumptions, Hardware, MemoryItem
from exgrpo.train.estimate.shape import FP32, ModelShape
from exgrpo.train.pretrained.tokenizer import DTYPES
from exgrpo.train.rollout.transformers.cache import grown
from exgrpo.train.rollout.transformers.decode import KEPT
from exgrpo.train.rollout.transformers.shared import shares_policy

PREFILL_TOKENS = 8192
"""Prompt tokens that vLLM computes at once."""
ADAPTED_LAUNCHES = 2
"""So many times the kernels of a layer are launched where its adapters are computed beside it."""


def engine_of(config: Config) -> Literal["transformers", "vllm", "server"]:
    """The engine that is reckoned with."""
    if config.rollout.servers:
        return "server"
    return "transformers" if config.rollout.engine == "transformers" else "vllm"


def rollout_memory(config: Config, shape: ModelShape, gpus: int) -> tuple[MemoryItem, ...]:
    """The engine's copy of the model, if it has one, and what generation adds, per GPU of the trainer."""
    engine = engine_of(config)
    if engine == "server":
        return ()
    item = DTYPES[config.policy.dtype].itemsize
    rows = _slots(config, gpus, config.data.max_prompt_tokens)
    if engine == "vllm":
        ranks = config.rollout.tensor_parallel
        weights, cache = item * shape.total / ranks, config.rollout.kv_cache_gib * GIB
        prompts = PREFILL_TOKENS * shape.gradient_bytes(item)
    else:
        tokens = min(config.rollout.batch_tokens, _answers(config, gpus) * longest_sequence(config))
        held = _room(config) / longest_sequence(config) * shape.kv_bytes(item)
        weights = 0 if shares_policy(config, gpus) else item * shape.total
        cache = tokens * (held + shape.kv_working_bytes(item))
        prompts = rows * config.data.max_prompt_tokens * shape.gradient_bytes(item)
    asleep = weights if engine == "vllm" and config.rollout.sleep_level == 0 else 0
    idle = asleep and cache
    return (
        MemoryItem("rollout engine, weights", weights, asleep, asleep, asleep),
        MemoryItem("rollout engine, key/value cache", cache, idle, idle, idle),
        MemoryItem("rollout engine, prompts and sampling", max(prompts, 3 * FP32 * rows * shape.vocabulary)),
    )


def asleep_bytes(config: Config, shape: ModelShape, gpus: int) -> float:
    """CPU memory that all engines together take while they sleep."""
    return gpus * shape.total * DTYPES[config.policy.dtype].itemsize if _sleeps_in_cpu_memory(config, gpus) else 0


def push_seconds(config: Config, shape: ModelShape, gpus: int, assumptions: Assumptions) -> float:
    """Seconds for new weights to reach the engine through CPU memory; gathered on the GPUs they take next to none.

    The copy of a sleeping engine takes them, it wakes and falls asleep again: three copies of all weights.
    """
    weights = DTYPES[config.policy.dtype].itemsize * shape.total
    return 3 * weights / assumptions.host_bandwidth if _sleeps_in_cpu_memory(config, gpus) else 0


def _sleeps_in_cpu_memory(config: Config, gpus: int) -> bool:
    if engine_of(config) == "vllm":
        return config.rollout.sleep_level == 1
    return engine_of(config) == "transformers" and not shares_policy(config, gpus)


def longest_sequence(config: Config) -> int:
    """Tokens of the longest prompt and response."""
    return config.data.max_prompt_tokens + config.rollout.max_tokens


def _room(config: Config) -> int:
    """Tokens that a row of the cache has room for at the end of the longest answer."""
    room = grown(config.data.max_prompt_tokens)
    while room < longest_sequence(config):
        room = grown(room + 1)
    return room


def _answers(config: Config, gpus: int) -> int:
    """Answers that the busiest rank generates in a step."""
    return math.ceil(config.questions / gpus) * config.rollout.samples


def _slots(config: Config, gpus: int, prompt_tokens: float) -> int:
    """Answers that a rank generates at once where the cache has room for them."""
    rows = int(config.rollout.batch_tokens // (prompt_tokens + config.rollout.max_tokens))
    return min(_answers(config, gpus), max(1, rows))


def rows_at_once(config: Config, shape: ModelShape, gpus: int, assumptions: Assumptions) -> int:
    """Answers that a rank generates at once: transformers' in padded batches, vLLM's as its cache has room for them."""
    if engine_of(config) == "transformers":
        return _slots(config, gpus, assumptions.prompt_tokens)
    slots = _slots(config, gpus, config.data.max_prompt_tokens)
    held = shape.kv_bytes(DTYPES[config.policy.dtype].itemsize) * _mean_context(assumptions)
    return max(1, min(slots, int(config.rollout.kv_cache_gib * GIB // held)))


def _mean_context(assumptions: Assumptions) -> float:
    return assumptions.prompt_tokens + assumptions.response_tokens / 2


def rollout_seconds(config: Config, shape: ModelShape, hardware: Hardware, assumptions: Assumptions) -> float:
    """Seconds that the busiest rank generates.

    Lengths are taken to be exponentially distributed and cut at the limit, so the longest of n has on average
    1 + 1/2 + ... + 1/n times the mean length. A batch of transformers goes on until its longest answer ends; of rows
    that have ended it leaves some in. vLLM fills the place of each ended answer with the next one; the longest of all
    still takes as many steps as it has tokens. All read a prompt once for its answers.
    """
    rows = rows_at_once(config, shape, hardware.gpus, assumptions)
    answers = _answers(config, hardware.gpus)
    tokens = answers * assumptions.response_tokens
    if engine_of(config) == "transformers":
        steps = math.ceil(answers / rows) * _longest(rows, config, assumptions)
        adapted = config.lora.rank and shares_policy(config, hardware.gpus)
        busy = min(rows, 2 * tokens / steps / (1 + KEPT))
        launch = assumptions.layer_launch * (ADAPTED_LAUNCHES if adapted else 1)
    else:
        steps = max(tokens / rows, _longest(answers, config, assumptions))
        busy, launch = tokens / steps, 0.0  # a whole step is one CUDA graph
    prompts = answers / config.rollout.samples
    prefill = prompts * shape.decoder_flops(assumptions.prompt_tokens) / (hardware.flops * assumptions.mfu)
    bound = _step_seconds(shape, busy, _mean_context(assumptions), config, hardware, assumptions)
    return prefill + steps * max(bound, shape.layers * launch)


def _longest(answers: int, config: Config, assumptions: Assumptions) -> float:
    harmonic = sum(1 / i for i in range(1, answers + 1))
    return min(config.rollout.max_tokens, assumptions.response_tokens * harmonic)


def _step_seconds(
    shape: ModelShape, rows: float, context: float, config: Config, hardware: Hardware, assumptions: Assumptions
) -> float:
    """Seconds of one decoding step of `rows` sequences by what bounds it, traffic or arithmetic.

    With tensor parallelism n GPUs read the weights together, for n ranks' sequences. Attention reads keys and values
    where they lie. Weights in 4 bits are read, and written and read again in the compute dtype.
    """
    item = DTYPES[config.policy.dtype].itemsize
    ranks = 1 if engine_of(config) == "transformers" else config.rollout.tensor_parallel
    weights = item * shape.read_per_token / ranks
    if config.lora.quantised != "none" and shares_policy(config, hardware.gpus):
        weights += (NF4_BYTES + item) * shape.linear
    traffic = weights + rows * context * shape.kv_bytes(item)
    flops = rows * (2 * shape.linear + shape.head_flops(1))
    return max(traffic / (hardware.bandwidth * assumptions.bandwidth_use), flops / (hardware.flops * assumptions.mfu))
