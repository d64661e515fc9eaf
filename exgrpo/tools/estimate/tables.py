"""An estimate as tables and sentences, and what to change in a recipe: so that it fits, is faster, and takes less."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from exgrpo.tools.estimate.budget import cpu_memory, disk, phases, work
from exgrpo.tools.estimate.parts import GIB, Amount, Assumptions, Hardware, Phase
from exgrpo.train.config.options import Config
from exgrpo.train.config.recipe import changed
from exgrpo.train.policy.shape import ModelShape
from exgrpo.train.rollout.vllm.engine import cache_gib
from exgrpo.train.run.memory import MOMENTS, MemoryItem, engine_of, gpu_memory, peak, slots

MOST_GPUS = 1024
SMALLEST_CACHE_GIB = 0.25
"""Advice goes no further than these."""
SAVES_TIME_FROM = {"colouring": 1.5, "countdown": 2.1, "arithmetic": 7.7}
"""Seconds of a generated token over those of a token trained on, from which the efficient recipe reached the end of
GRPO of one pass in less time: `studies/results/token_efficiency.md`."""
ENGINES = {
    "transformers": "transformers",
    "vllm": "vLLM (--rollout.engine transformers where it is not installed)",
    "server": "vLLM servers on as many GPUs again",
}


@dataclass(frozen=True)
class Estimate:
    """What a recipe takes. Memory per GPU, everything else of all ranks together; bytes and seconds."""

    memory: tuple[MemoryItem, ...]
    available: float
    cpu: tuple[Amount, ...]
    disk: tuple[Amount, ...]
    phases: tuple[Phase, ...]

    @property
    def peak(self) -> float:
        """Bytes per GPU at the moment that takes most."""
        return max(peak(self.memory, moment) for moment in MOMENTS)

    @property
    def fits(self) -> bool:
        """Whether that is there."""
        return self.peak <= self.available

    @property
    def seconds(self) -> float:
        """Of one step."""
        return sum(phase.seconds for phase in self.phases)


def estimate(config: Config, shape: ModelShape, hardware: Hardware, assumptions: Assumptions) -> Estimate:
    """What the recipe takes on these GPUs."""
    return Estimate(
        memory=gpu_memory(config, shape, hardware.gpus, hardware.device),
        available=hardware.memory,
        cpu=cpu_memory(config, shape, hardware.gpus, assumptions),
        disk=disk(config, shape, assumptions),
        phases=phases(config, shape, hardware, assumptions),
    )


def lines(
    config: Config, shape: ModelShape, hardware: Hardware, assumptions: Assumptions, reserve_gib: float
) -> Iterator[str | Table]:
    """The estimate with its assumptions, to be printed; `reserve_gib` of each GPU or process is what no tensor gets."""
    found = estimate(config, shape, hardware, assumptions)
    yield f"{config.policy.path}: {shape.total:,} parameters in {config.policy.dtype} on {hardware.words}"
    yield _memory_table(found, hardware.kind)
    verdict = f"peak {found.peak / GIB:.1f} GiB of {found.available / GIB:.1f} GiB usable per {hardware.kind}"
    margin = (found.available - found.peak) / GIB
    if found.fits:
        yield f"It fits: {verdict}, {margin:.1f} GiB to spare."
    else:
        yield f"It does not fit: {verdict}, {-margin:.1f} GiB short. {advise(config, shape, hardware)}"
    yield _amounts_table(found)
    yield _time_table(found, config.steps)
    yield _generation(config, shape, hardware, assumptions)
    yield _token_ratio(config, assumptions, found)
    yield from _assumptions(assumptions, hardware.kind, reserve_gib)


def _generation(config: Config, shape: ModelShape, hardware: Hardware, assumptions: Assumptions) -> str:
    """How much is generated."""
    fresh = work(config, assumptions).fresh
    rows = slots(config, shape, hardware.gpus, assumptions.prompt_tokens)
    tokens = fresh * assumptions.response_tokens
    return (
        f"A step generates {tokens:,.0f} tokens, the whole run {tokens * config.steps:,.0f}: {fresh} answers, "
        f"{rows} at once per {hardware.kind} by {ENGINES[engine_of(config)]}."
    )


def _token_ratio(config: Config, assumptions: Assumptions, found: Estimate) -> str:
    """What a generated token costs beside one that is trained on, and what follows for replay.

    A token is scored once because it was generated; a stored one is scored because it is trained on.
    """
    seconds = {phase.name: phase.seconds for phase in found.phases}
    of_step = work(config, assumptions)
    generated = (seconds["rollout"] + seconds["score"]) / of_step.fresh
    trained = (seconds["select"] + seconds["update"]) / (of_step.rows * config.optimizer.passes)
    points = ", ".join(f"{ratio:g} ({task})" for task, ratio in SAVES_TIME_FROM.items())
    return (
        f"A generated token takes {generated / trained:.2g} times as long as a token trained on. With tiny models, the "
        f"efficient recipe took less time than GRPO of one pass over a batch from {points} on: docs/when_to_replay.md."
    )


def _memory_table(found: Estimate, kind: str) -> Table:
    table = Table(f"GiB per {kind}", *MOMENTS)
    for column in table.columns[1:]:
        column.justify = "right"
    for item in found.memory:
        sizes = [getattr(item, moment) for moment in MOMENTS]
        table.add_row(item.name, *(f"{size / GIB:.2f}" if size else "-" for size in sizes))
    table.add_section()
    table.add_row("together", *(f"{peak(found.memory, moment) / GIB:.2f}" for moment in MOMENTS))
    return table


def _amounts_table(found: Estimate) -> Table:
    table = Table("of all ranks together", "GiB")
    table.columns[1].justify = "right"
    for place, amounts in (("CPU memory", found.cpu), ("disk", found.disk)):
        for amount in amounts:
            table.add_row(f"{place}: {amount.name}", f"{amount.bytes / GIB:.2f}" if amount.bytes else "-")
    return table


def _time_table(found: Estimate, steps: int) -> Table:
    table = Table("phase of a step", "TFLOP", "time", "share", f"{steps} steps")
    for column in table.columns[1:]:
        column.justify = "right"
    for phase in (*found.phases, Phase("together", found.seconds, sum(phase.flops for phase in found.phases))):
        if phase.name == "together":
            table.add_section()
        table.add_row(
            phase.name,
            f"{phase.flops / 1e12:,.3g}" if phase.flops else "-",
            duration(phase.seconds),
            f"{phase.seconds / found.seconds:.0%}",
            duration(phase.seconds * steps),
        )
    return table


def duration(seconds: float) -> str:
    """A time to read: in seconds, minutes, hours or days."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def _assumptions(assumptions: Assumptions, kind: str, reserve_gib: float) -> Iterator[str]:
    yield (
        f"Assumed: prompts of {assumptions.prompt_tokens:g} and responses of {assumptions.response_tokens:g} tokens on "
        f"average (--prompt-tokens, --response-tokens), {assumptions.success_rate:g} of them right, "
        f"{assumptions.candidates:g} stored successes of a replayed question, replay under way in every step and no "
        "question retired; response lengths distributed exponentially."
    )
    host = f"{assumptions.host_bandwidth / 1e9:g} GB/s to CPU memory, " if kind == "GPU" else ""
    yield (
        f"Utilisation: {assumptions.mfu:g} of the peak FLOP/s (--mfu), {assumptions.bandwidth_use:g} of the memory "
        f"bandwidth, {1e6 * assumptions.layer_launch:g} us per layer to launch a decoding step, "
        f"{1e6 * assumptions.engine_step:g} us of vLLM's own work for one, {host}"
        f"{reserve_gib:g} GiB of each {kind} reserved (--reserve-gib)."
    )
    yield (
        "Not in the times: grading, evaluations, checkpoints, the optimiser's own arithmetic, start-up. The options in "
        "parentheses are those of `exgrpo estimate`."
    )


def advise(config: Config, shape: ModelShape, hardware: Hardware) -> str:
    """One sentence: the first change that makes a recipe fit which does not.

    Each change is tried alone, cheap ones first; then all of them together; then, with them, more GPUs.
    """
    on_gpus = hardware.kind == "GPU"
    changes = [values for values in _changes(config) if on_gpus or "distributed.offload_optimizer" not in values]
    for values in changes:
        found = _peak_with(config, values, shape, hardware)
        if found <= hardware.memory:
            return f"It fits with {as_options(values)}: {found / GIB:.1f} GiB."
    together = {key: value for values in changes for key, value in values.items()}
    gpus = hardware.gpus
    while gpus <= (MOST_GPUS if on_gpus else hardware.gpus):
        found = _peak_with(config, together, shape, replace(hardware, gpus=gpus))
        if found <= hardware.memory:
            options = f" with {as_options(together)}" if together else ""
            return f"It fits{options}{f' on {gpus} GPUs' if on_gpus else ''}: {found / GIB:.1f} GiB."
        gpus *= 2
    if not on_gpus:
        return "No option makes it fit: take a smaller model, fewer processes or a machine with more memory."
    return f"No option makes it fit, nor do {MOST_GPUS} GPUs: a rank's rollout engine needs GPUs with more memory."


def _changes(config: Config) -> Iterator[dict[str, Any]]:
    """Changes that lower the peak, by dotted key; those of a size end with the smallest that is valid."""
    longest, on_vllm = config.longest, engine_of(config) == "vllm"
    if on_vllm and config.rollout.sleep_level == 0:
        yield {"rollout.sleep_level": 2}
    if not config.policy.checkpointing:
        yield {"policy.gradient_checkpointing": True}
    for key, size in (
        ("optimizer.micro_batch_tokens", config.pass_tokens),
        ("rollout.batch_tokens", 0 if on_vllm else config.rollout.batch_tokens),
    ):
        while size > longest:
            size = max(longest, size // 2)
            yield {key: size}
    cache = cache_gib(config.rollout, None)
    while on_vllm and cache > SMALLEST_CACHE_GIB:
        cache = max(SMALLEST_CACHE_GIB, cache / 2)
        yield {"rollout.kv_cache_gib": cache}
    if not config.distributed.offload_optimizer:
        yield {"distributed.offload_optimizer": True}


def as_options(values: dict[str, Any]) -> str:
    """Changes as options of the command line."""
    return " ".join(f"--{key} {value}" for key, value in values.items())


def _peak_with(config: Config, values: dict[str, Any], shape: ModelShape, hardware: Hardware) -> float:
    memory = gpu_memory(changed(config, values), shape, hardware.gpus, hardware.device)
    return max(peak(memory, moment) for moment in MOMENTS)
