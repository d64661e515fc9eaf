"""What a recipe takes beside the memory of its GPUs: CPU memory, disk, seconds by phase. Arithmetic, no measurement.

Pure functions of a configuration, a model shape, the hardware and stated assumptions. `rollout.engine` auto is taken
for vLLM, which it is wherever vLLM is installed. Servers are taken to have as many GPUs as the trainer, of its kind.
"""

import math

from exgrpo.tools.estimate.parts import Amount, Assumptions, Hardware, Phase, Work
from exgrpo.train.config.objective import SURROGATES
from exgrpo.train.config.options import Config
from exgrpo.train.policy.shape import FP32, ModelShape
from exgrpo.train.policy.tokenizer import DTYPES
from exgrpo.train.replay import rules
from exgrpo.train.replay.candidates import UNSCORED
from exgrpo.train.rollout.transformers.decode import KEPT
from exgrpo.train.rollout.transformers.engine import shares_policy
from exgrpo.train.run.memory import NF4_BYTES, answers_of_rank, engine_of, frozen_head, slots

TRAJECTORY_OVERHEAD = 700
"""Bytes of a stored trajectory beside its tokens: the object, two arrays, its place in a checkpoint."""
ADAPTED_LAUNCHES = 2
"""So many times the kernels of a layer are launched where its adapters are computed beside it."""


def _fused_loss(config: Config) -> bool:
    """Whether the head forms its gradients in the forward, and need not compute its logits again."""
    surrogate = SURROGATES.find(config.objective.surrogate)
    return getattr(surrogate, "fused", False) and config.objective.kl_coef == 0


def cpu_memory(config: Config, shape: ModelShape, gpus: int, assumptions: Assumptions) -> tuple[Amount, ...]:
    """What all ranks together hold in CPU memory beside the program itself."""
    # Masters, two moments, gradients; of ZeRO-3 as they arrive and as AdamW takes them.
    kept = (4 if gpus == 1 else 5) * FP32 * shape.trained(config.lora, gpus) * gpus
    offloaded = kept if config.distributed.offload_optimizer else 0
    return (
        Amount("rollout engines asleep, their copies of the weights", asleep_bytes(config, shape, gpus)),
        Amount("offloaded masters, moments and gradients", offloaded),
        Amount("experience buffer at the end, a copy per rank", gpus * buffer_bytes(config, assumptions)),
    )


def buffer_bytes(config: Config, assumptions: Assumptions) -> float:
    """Bytes of the experience buffer of one rank at the end of a run in which no solved question retires."""
    if config.experience.ratio == 0:
        return 0
    age = config.experience.max_age
    steps = config.steps if age is None else min(config.steps, age + 1)
    right = dict.fromkeys(("successes", "solutions"), assumptions.success_rate)
    admitted = {**right, "nothing": 0.0}.get(config.experience.admit, 1.0)
    stored = min(steps * work(config, assumptions).fresh * admitted, config.experience.capacity or math.inf)
    # Token id and log-prob, 4 bytes each.
    return stored * (8 * assumptions.response_tokens + TRAJECTORY_OVERHEAD)


def disk(config: Config, shape: ModelShape, assumptions: Assumptions) -> tuple[Amount, ...]:
    """Bytes that a run leaves on disk, and one checkpoint more: the oldest goes when the newest is complete."""
    item = DTYPES[config.policy.dtype].itemsize
    trained = shape.trained(config.lora, 1)
    checkpoint = 3 * FP32 * trained if config.checkpoint.every else 0
    saved = trained if config.lora.result == "adapters" else shape.total
    buffer = buffer_bytes(config, assumptions) if config.checkpoint.every else 0
    kept = config.checkpoint.keep
    exports = config.steps // config.output.export_every if config.output.export_every else 0
    more = exports + (2 if config.checkpoint.best else 0)  # a best model is written beside the one before
    models = "trained model" + (f", best and exported ones, {more} more" if more else "")
    return (
        Amount(f"checkpoints, {kept} kept and one being written", (kept + 1) * checkpoint),
        Amount("experience buffer at the end", buffer),
        Amount(models, item * saved * (config.output.save_model + more)),
    )


def work(config: Config, assumptions: Assumptions) -> Work:
    """The sequences of one step; as many questions are replayed as the ratio allows."""
    experience, samples = config.experience, config.rollout.samples
    rows = config.questions * samples
    questions = math.floor(experience.ratio * config.questions + 1e-9)
    most = {"mixed": samples - 1, "traced": samples - 1, "appended": math.inf}.get(experience.compose, 0)
    chosen = questions * int(min(experience.replayed, most))
    shared, asked = questions * samples, max(1, config.questions - questions) * samples
    fresh, trained, replayed = {
        **dict.fromkeys(("mixed", "traced"), (rows - chosen, rows, chosen)),
        "appended": (rows, rows + chosen, chosen),
        "beside": (rows, rows + shared, shared),
        **dict.fromkeys(("buffer", "returning"), (asked, rows, rows)),
        "in_place": (rows, rows, shared),
        "bapo": (rows + shared // 2, rows, shared),
    }.get(experience.compose, (rows, rows, 0))
    stored = min(assumptions.candidates, experience.max_per_question or math.inf)
    candidates = questions * stored if chosen and experience.trajectory not in UNSCORED else 0
    return Work(fresh, trained, candidates + _weighed(config, replayed))


def _weighed(config: Config, replayed: int) -> int:
    """Replayed answers that take a pass before the update, for the function `weigh`."""
    present = getattr(rules.find("weigh", config.objective.weigh), "present", None)
    return replayed if present == "values" or (present and config.optimizer.steps_per_batch > 1) else 0


def phases(config: Config, shape: ModelShape, hardware: Hardware, assumptions: Assumptions) -> tuple[Phase, ...]:
    """Seconds of one step by phase; the optimiser's own arithmetic, grading and evaluations are not counted.

    Every answer is taken to be trained on: the first optimiser step scores its own, if it may, and a pass the others.
    """
    sequence = assumptions.prompt_tokens + assumptions.response_tokens
    decoder, head = shape.decoder_flops(sequence), shape.head_flops(assumptions.response_tokens)
    of_step = work(config, assumptions)
    # Forward once, backward twice that, and with checkpointing the layers forward once more. The head needs three
    # products in all: its gradients are formed during the forward. Frozen matrices have no gradient to form.
    passes = (4 if config.policy.checkpointing else 3) - (config.lora.rank > 0)
    products = (2 if frozen_head(config) else 3) + (not _fused_loss(config))
    late = hasattr(rules.find("compose", config.experience.compose), "settle")  # chosen when the memory took them in
    told = 1 / config.optimizer.minibatches if config.update_scores and not late else 0
    compared = of_step.rows if config.objective.anchor == "start" else of_step.fresh
    scored = of_step.fresh * (1 - told) + compared * config.objective.compared
    flops = {
        "select": of_step.candidates * (decoder + head),
        "score": scored * (decoder + head),
        "update": of_step.rows * config.optimizer.passes * (passes * decoder + products * head),
    }
    speed = hardware.gpus * hardware.flops * assumptions.mfu
    passes_of = {name: Phase(name, value / speed, value) for name, value in flops.items()}
    push = Phase("push", push_seconds(config, shape, hardware.gpus, assumptions))
    rollout = Phase("rollout", rollout_seconds(config, shape, hardware, assumptions))
    return (passes_of["select"], rollout, passes_of["score"], passes_of["update"], push)


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


def rollout_seconds(config: Config, shape: ModelShape, hardware: Hardware, assumptions: Assumptions) -> float:
    """Seconds that the busiest rank generates.

    Lengths are taken to be exponentially distributed and cut at the limit, so the longest of n has on average
    1 + 1/2 + ... + 1/n times the mean length. A batch of transformers goes on until its longest answer ends; of rows
    that have ended it leaves some in. vLLM fills the place of each ended answer with the next one; the longest of all
    still takes as many steps as it has tokens. All read a prompt once for its answers.
    """
    rows = slots(config, shape, hardware.gpus, assumptions.prompt_tokens)
    answers = answers_of_rank(config, hardware.gpus)
    tokens = answers * assumptions.response_tokens
    if engine_of(config) == "transformers":
        steps = math.ceil(answers / rows) * _longest(rows, config, assumptions)
        adapted = config.lora.rank and shares_policy(config, hardware.gpus)
        busy = min(rows, 2 * tokens / steps / (1 + KEPT))
        launch, own = assumptions.layer_launch * (ADAPTED_LAUNCHES if adapted else 1), 0.0
    else:
        steps = max(tokens / rows, _longest(answers, config, assumptions))
        busy, launch, own = tokens / steps, 0.0, assumptions.engine_step  # the layers of a step are one CUDA graph
    prompts = answers / config.rollout.samples
    prefill = prompts * shape.decoder_flops(assumptions.prompt_tokens) / (hardware.flops * assumptions.mfu)
    context = assumptions.prompt_tokens + assumptions.response_tokens / 2
    bound = _step_seconds(shape, busy, context, config, hardware, assumptions)
    return prefill + steps * (own + max(bound, shape.layers * launch))


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
