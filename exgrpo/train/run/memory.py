"""Predict the memory of each rank's GPU, by moment of a step, from a configuration and a model's shape.

Used by the memory plan (`exgrpo.train.run.plan`) and the dry run (`exgrpo.tools.costs`). `rollout.engine` auto counts
as vLLM, which it selects wherever vLLM is installed.
"""

import math
from dataclasses import dataclass
from typing import Literal

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from exgrpo.train.config.options import Config
from exgrpo.train.policy.engine import deepspeed_settings
from exgrpo.train.policy.layout import LONG
from exgrpo.train.policy.shape import FP32, ModelShape
from exgrpo.train.policy.tokenizer import DTYPES
from exgrpo.train.rollout.transformers.decode import grown
from exgrpo.train.rollout.transformers.engine import shares_policy
from exgrpo.train.rollout.vllm.engine import GIB, cache_gib, sequences

MOMENTS = ("rollout", "loss", "backward", "step")
"""Moments when memory peaks: generation; the head, after the last layer; a layer's backward; AdamW's step."""
NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8
"""Bytes of a 4-bit weight: each block of 64 has an 8-bit scale, and 256 scales share a 32-bit one."""
PREFILL_TOKENS = 8192
"""Prompt tokens that vLLM computes at once."""


@dataclass(frozen=True)
class MemoryItem:
    """Bytes per GPU of one item at each of the `MOMENTS`."""

    name: str
    rollout: float = 0
    loss: float = 0
    backward: float = 0
    step: float = 0


def peak(items: tuple[MemoryItem, ...], moment: str) -> float:
    """Return the bytes per GPU at a moment."""
    return sum(float(getattr(item, moment)) for item in items)


def gpu_memory(config: Config, shape: ModelShape, gpus: int, device: str = "cuda") -> tuple[MemoryItem, ...]:
    """Return every allocation of a rank on its GPU, in bytes.

    Args:
        gpus: number of GPUs, with one rank each.
        device: type of device: "cuda", or "cpu" for processes that share a CPU.
    """
    states = _whole_states(config, shape) if gpus == 1 else _sharded_states(config, shape, gpus)
    return (*states, *_passes(config, shape, gpus, device), *rollout_memory(config, shape, gpus))


def _whole_states(config: Config, shape: ModelShape) -> tuple[MemoryItem, ...]:
    """Return the states of a single process: 18 bytes per 16-bit parameter, and 16 in fp32, which needs no master.

    Adapters are in fp32. A gradient exists until it is added to the fp32 sums, that of a tied head for longest.
    """
    trained = FP32 * shape.trained(config.lora, 1)
    adapters = trained if config.lora.rank else 0
    quantised = shape.linear if config.lora.quantised != "none" else 0
    own = NF4_BYTES * quantised + DTYPES[config.policy.dtype].itemsize * (shape.total - quantised)
    on_gpu = 0 if config.distributed.offload_optimizer else trained
    copied = config.policy.dtype != "fp32" and not adapters
    largest = 0 if adapters else DTYPES[config.policy.dtype].itemsize * max(shape.parameters)
    return (
        _always("weights", own + adapters),
        _always("fp32 master weights", on_gpu if copied else 0),
        _always("AdamW moments", 2 * on_gpu),
        MemoryItem("gradients, fp32", loss=on_gpu, backward=on_gpu, step=on_gpu),
        MemoryItem("gradient of one parameter", backward=largest),
        _always("reference", _reference(config, own, on_gpu)),
    )


def _sharded_states(config: Config, shape: ModelShape, gpus: int) -> tuple[MemoryItem, ...]:
    """Return the states of ZeRO-3, and the copies of its optimizer step."""
    zero = _zero(config)
    item = DTYPES[config.policy.dtype].itemsize
    reduced = FP32 if config.policy.dtype == "fp16" else item
    on_gpu = 0 if config.distributed.offload_optimizer else FP32 * shape.trained(config.lora, gpus)
    whole = shape.whole(config.distributed.persistence_threshold)
    shard = shape.sharded(gpus) + (shape.trained(config.lora, gpus) if config.lora.rank else 0)
    # The gradients of a group of parameters are copied together, and AdamW makes one more tensor of their size.
    group = 2 * min(on_gpu, FP32 * zero.sub_group_size)
    return (
        _always("weights, sharded", item * (shard + whole)),
        _always("fp32 master weights, sharded", on_gpu),
        _always("AdamW moments, sharded", 2 * on_gpu),
        _always("gradients, fp32, sharded", on_gpu),
        _always("gradient reduction bucket", reduced * zero.reduce_bucket_size),
        MemoryItem("AdamW's own copies", step=group),
        _always(
            "reference, sharded",
            _reference(config, item * (shape.sharded(gpus) + whole), FP32 * shape.trained(config.lora, gpus)),
        ),
    )


def _reference(config: Config, model: float, adapters: float) -> float:
    if not config.objective.compared:
        return 0
    return adapters if config.lora.rank else model


def _passes(config: Config, shape: ModelShape, gpus: int, device: str) -> tuple[MemoryItem, ...]:
    """Return the allocations of a micro-batch: gathered weights, activations, the head, a layer's backward."""
    item = DTYPES[config.policy.dtype].itemsize
    tokens, checkpointing = config.pass_tokens, config.policy.checkpointing
    eager = config.longest if config.policy.attention == "eager" else 0
    # ZeRO-3 keeps weights gathered that it needs again within max_reuse_distance elements.
    gathered = item * min(shape.total, int(_zero(config).max_reuse_distance) + max(shape.parameters))
    if gpus == 1:  # nothing is gathered, but 4-bit weights are dequantized one matrix at a time
        gathered = item * shape.width * shape.mlp if config.lora.quantised != "none" else 0
    saved = tokens * shape.saved_bytes(item, checkpointing=checkpointing, eager_length=eager)
    again = shape.layer_bytes(item, eager_length=eager) if checkpointing else 0
    generating = gathered if shares_policy(config, gpus) else 0
    packed = _packed(config, shape) * (1 if checkpointing else shape.layers) if device == "cuda" else 0
    # The kernel adds the head's gradient directly to that of its fp32 master.
    added = gpus == 1 and config.policy.dtype == "bf16" and not config.lora.rank
    added = added and not config.distributed.offload_optimizer
    frozen = config.lora.rank > 0 and not config.lora.head
    head = shape.head_bytes(item, tokens, device, frozen=frozen or added, memory=config.policy.kernel_memory)
    return (
        MemoryItem("gathered weights", rollout=generating, loss=gathered, backward=gathered),
        MemoryItem("saved activations", loss=saved, backward=saved),
        MemoryItem("rows of packed attention", loss=0 if checkpointing else tokens * packed, backward=tokens * packed),
        MemoryItem("fused head", loss=head),
        MemoryItem("backward of one layer", backward=tokens * (again + shape.gradient_bytes(item))),
    )


def _packed(config: Config, shape: ModelShape) -> float:
    """Return the bytes per token that packed attention adds to a layer, for full groups that share their prompt."""
    if config.policy.attention != "sdpa":
        return 0
    prompt, answers = config.data.max_prompt_tokens, config.rollout.samples
    answer = min(config.rollout.max_tokens, LONG)
    keys = (prompt + answers * (prompt + answer)) / (prompt + answers * answer)
    return shape.packed_bytes(DTYPES[config.policy.dtype].itemsize, keys, prompt + answer)


def _always(name: str, size: float) -> MemoryItem:
    return MemoryItem(name, size, size, size, size)


def _zero(config: Config) -> DeepSpeedZeroConfig:
    return DeepSpeedZeroConfig(**deepspeed_settings(config)["zero_optimization"])


def engine_of(config: Config) -> Literal["transformers", "vllm", "server"]:
    """Return the engine to predict for."""
    if config.rollout.servers:
        return "server"
    return "transformers" if config.rollout.engine == "transformers" else "vllm"


def rollout_memory(config: Config, shape: ModelShape, gpus: int) -> tuple[MemoryItem, ...]:
    """Return the engine's copy of the model, if it has one, and the allocations of generation, per GPU."""
    engine = engine_of(config)
    if engine == "server":
        return ()
    item = DTYPES[config.policy.dtype].itemsize
    rows = slots(config, shape, gpus, config.data.max_prompt_tokens)
    if engine == "vllm":
        ranks = config.rollout.tensor_parallel
        weights, cache = item * shape.total / ranks, _cache(config)
        prompts = PREFILL_TOKENS * shape.gradient_bytes(item)
    else:
        tokens = min(config.rollout.batch_tokens, answers_of_rank(config, gpus) * config.longest)
        held = _room(config) / config.longest * shape.kv_bytes(item)
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


def _room(config: Config) -> int:
    """Return the capacity in tokens of a row of the cache at the end of the longest answer."""
    room = grown(config.data.max_prompt_tokens)
    while room < config.longest:
        room = grown(room + 1)
    return room


def answers_of_rank(config: Config, gpus: int) -> int:
    """Return the number of answers that the busiest rank generates in a step."""
    return math.ceil(config.questions / gpus) * config.rollout.samples


def _cache(config: Config) -> float:
    return cache_gib(config.rollout, None) * GIB


def slots(config: Config, shape: ModelShape, gpus: int, prompt_tokens: float) -> int:
    """Return the concurrent answers of a rank: a padded batch of transformers, or as many as vLLM's cache can hold."""
    if engine_of(config) == "transformers":
        rows = max(1, int(config.rollout.batch_tokens // (prompt_tokens + config.rollout.max_tokens)))
    else:
        per_token = shape.kv_bytes(DTYPES[config.policy.dtype].itemsize)
        rows = sequences(config.rollout, config.data.max_prompt_tokens, _cache(config), per_token)
    return min(answers_of_rank(config, gpus), rows)
