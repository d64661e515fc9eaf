"""Does a recipe fit, and how long does a step take?

    python -m exgrpo.train.estimate --recipe recipes/paper.yaml --gpus 8 --gpu H100

Nothing is launched and no weights are read. Options of the configuration may follow (`--rollout.max_tokens 4096`).
Every number is an estimate from data sheets, the model's shape and stated assumptions; none was measured.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.table import Table

from exgrpo.train.config import Config
from exgrpo.train.errors import ConfigError, ExgrpoError, print_error
from exgrpo.train.estimate.budget import cpu_memory, disk, gpu_memory, phases, work
from exgrpo.train.estimate.parts import MOMENTS, Amount, Assumptions, Hardware, MemoryItem, Phase, peak
from exgrpo.train.estimate.rollout import GIB, engine_of, longest_sequence, rollout_seconds, rows_at_once
from exgrpo.train.estimate.shape import ModelShape, read_shape
from exgrpo.train.recipe import merged, parse_args, validate

ENGINES = {
    "transformers": "transformers",
    "vllm": "vLLM (--rollout.engine transformers where it is not installed)",
    "server": "vLLM servers on as many GPUs again",
}
MOST_GPUS = 1024
SMALLEST_CACHE_GIB = 0.25
"""Advice goes no further than these."""


@dataclass(frozen=True)
class Gpu:
    """A data sheet: memory in GiB, dense peaks in TFLOP/s (bf16 on tensor cores, fp32 without), bandwidth in GB/s."""

    memory: float
    bf16: float
    fp32: float
    bandwidth: float


GPUS = {
    "A100-40": Gpu(40, 312, 19.5, 1555),
    "A100-80": Gpu(80, 312, 19.5, 2039),
    "H100": Gpu(80, 989, 67, 3350),
    "H200": Gpu(141, 989, 67, 4800),
    "B200": Gpu(180, 2250, 75, 8000),
    "L40S": Gpu(48, 362, 91.6, 864),
    "A6000": Gpu(48, 155, 38.7, 768),
    "RTX4090": Gpu(24, 165, 82.6, 1008),
}
"""NVIDIA's figures, of the SXM boards where there are several. A sheet's gigabytes of memory are taken as GiB."""


class Options(BaseModel):
    """Estimate memory and time of a recipe. --recipe FILE and every option of training are understood as well."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    gpus: int = Field(8, ge=1, description="Number of GPUs, one rank each.")
    gpu: str = Field("H100", description=f"{', '.join(GPUS)}; or any name with the three figures below.")
    memory_gib: float | None = Field(None, gt=0, description="Memory of a GPU in GiB; None: of its data sheet.")
    tflops: float | None = Field(
        None, gt=0, description="Its dense peak TFLOP/s in the recipe's dtype; None: likewise."
    )
    bandwidth: float | None = Field(None, gt=0, description="Its memory bandwidth in GB/s; None: likewise.")
    reserve_gib: float = Field(
        4.0, ge=0, description="GiB of it that no tensor gets: CUDA context, NCCL, library workspaces, fragmentation."
    )
    config_json: Annotated[Path | None, tyro.conf.arg(name="model-config")] = Field(
        None, description="The model's config.json or its folder, where the model itself is not at hand."
    )
    prompt_tokens: float | None = Field(
        None, ge=1, description="Mean prompt length; None: a quarter of data.max_prompt_tokens."
    )
    response_tokens: float | None = Field(
        None, ge=1, description="Mean response length; None: a quarter of rollout.max_tokens."
    )
    success_rate: float = Field(0.5, ge=0, le=1, description="Share of fresh answers that are right and stored.")
    candidates: float = Field(4.0, ge=1, description="Mean number of stored successes of a replayed question.")
    mfu: float = Field(
        0.35,
        gt=0,
        le=1,
        description="Share of the peak that passes through the model reach, ZeRO-3's communication over NVLink "
        "included; across slow links expect less.",
    )
    bandwidth_use: float = Field(0.6, gt=0, le=1, description="Share of the memory bandwidth that decoding reaches.")
    launch_us: float = Field(
        700.0,
        ge=0,
        description="Microseconds to launch one layer's kernels in decoding: what bounds transformers' generate, which "
        "runs eagerly, on fast GPUs; 0: only traffic and arithmetic bound it.",
    )
    host_gbs: float = Field(10.0, gt=0, description="GB/s between GPU and CPU memory (pageable, as the engine sleeps).")


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


def hardware_of(options: Options, dtype: str) -> Hardware:
    """The GPUs that the options name.

    Raises:
        ConfigError: the name is unknown and its figures are not given.
    """
    sheet = {name.lower(): gpu for name, gpu in GPUS.items()}.get(options.gpu.lower().replace(" ", ""))
    own = (options.memory_gib, options.tflops, options.bandwidth)
    if sheet is None and None in own:
        raise ConfigError(
            f"gpu: {options.gpu!r} is not one of {', '.join(GPUS)}; "
            "name one of them or give --memory-gib, --tflops and --bandwidth"
        )
    of_sheet = (sheet.memory, getattr(sheet, dtype), sheet.bandwidth) if sheet else own
    memory, tflops, bandwidth = (float(mine or theirs or 0) for mine, theirs in zip(own, of_sheet, strict=True))
    return Hardware(options.gpus, (memory - options.reserve_gib) * GIB, tflops * 1e12, bandwidth * 1e9)


def assumptions_of(options: Options, config: Config) -> Assumptions:
    """The assumptions with their defaults filled in.

    Raises:
        ConfigError: a mean length exceeds what the recipe allows.
    """
    lengths = []
    for key, mean, limit_key, limit in (
        ("prompt-tokens", options.prompt_tokens, "data.max_prompt_tokens", config.data.max_prompt_tokens),
        ("response-tokens", options.response_tokens, "rollout.max_tokens", config.rollout.max_tokens),
    ):
        if mean is not None and mean > limit:
            raise ConfigError(f"{key}: {mean:g} exceeds {limit_key} ({limit}): lower the one or raise the other")
        lengths.append(max(1.0, limit / 4) if mean is None else mean)
    prompt, response = lengths
    return Assumptions(
        prompt_tokens=prompt,
        response_tokens=response,
        success_rate=options.success_rate,
        candidates=options.candidates,
        mfu=options.mfu,
        bandwidth_use=options.bandwidth_use,
        layer_launch=options.launch_us * 1e-6,
        host_bandwidth=options.host_gbs * 1e9,
    )


def estimate(config: Config, shape: ModelShape, hardware: Hardware, assumptions: Assumptions) -> Estimate:
    """What the recipe takes on these GPUs."""
    return Estimate(
        memory=gpu_memory(config, shape, hardware),
        available=hardware.memory,
        cpu=cpu_memory(config, shape, hardware.gpus, assumptions),
        disk=disk(config, shape, assumptions),
        phases=phases(config, shape, hardware, assumptions),
    )


def advise(config: Config, shape: ModelShape, hardware: Hardware) -> str:
    """One sentence: the first change that makes a recipe fit which does not.

    Each change is tried alone, cheap ones first; then all of them together; then, with them, more GPUs.
    """
    changes = list(_changes(config))
    for values in changes:
        found = _peak_with(config, values, shape, hardware)
        if found <= hardware.memory:
            return f"It fits with {_named(values)}: {found / GIB:.1f} GiB."
    together = {key: value for values in changes for key, value in values.items()}
    gpus = hardware.gpus
    while gpus <= MOST_GPUS:
        on_more = Hardware(gpus, hardware.memory, hardware.flops, hardware.bandwidth)
        found = _peak_with(config, together, shape, on_more)
        if found <= hardware.memory:
            options = f" with {_named(together)}" if together else ""
            return f"It fits{options} on {gpus} GPUs: {found / GIB:.1f} GiB."
        gpus *= 2
    return f"No option makes it fit, nor do {MOST_GPUS} GPUs: a rank's rollout engine needs GPUs with more memory."


def _changes(config: Config) -> Iterator[dict[str, Any]]:
    """Changes that lower the peak, by dotted key; those of a size end with the smallest that is valid."""
    longest = longest_sequence(config)
    if engine_of(config) == "vllm" and config.rollout.sleep_level == 0:
        yield {"rollout.sleep_level": 2}
    if not config.policy.gradient_checkpointing:
        yield {"policy.gradient_checkpointing": True}
    for key, size in (
        ("optimizer.micro_batch_tokens", config.optimizer.micro_batch_tokens),
        ("rollout.batch_tokens", config.rollout.batch_tokens),
    ):
        while size > longest:
            size = max(longest, size // 2)
            yield {key: size}
    cache = config.rollout.kv_cache_gib
    while engine_of(config) == "vllm" and cache > SMALLEST_CACHE_GIB:
        cache = max(SMALLEST_CACHE_GIB, cache / 2)
        yield {"rollout.kv_cache_gib": cache}
    if not config.distributed.offload_optimizer:
        yield {"distributed.offload_optimizer": True}


def _named(values: dict[str, Any]) -> str:
    return " ".join(f"--{key} {value}" for key, value in values.items())


def _changed(config: Config, values: dict[str, Any]) -> Config:
    return validate(merged(config.model_dump(), values), "advice")


def _peak_with(config: Config, values: dict[str, Any], shape: ModelShape, hardware: Hardware) -> float:
    memory = gpu_memory(_changed(config, values), shape, hardware)
    return max(peak(memory, moment) for moment in MOMENTS)


def fastest_generation(
    config: Config, shape: ModelShape, hardware: Hardware, assumptions: Assumptions
) -> dict[str, Any]:
    """What to change for the fastest generation there is room for, by dotted key: more answers at once.

    They share the reading of the weights, until the traffic of their keys and values outweighs it.
    """
    best: dict[str, Any] = {}
    best_seconds, values = rollout_seconds(config, shape, hardware, assumptions), _room(config)
    # Once all answers of a step are generated at once, no more tokens change anything.
    while values["rollout.batch_tokens"] < config.questions * config.rollout.samples * longest_sequence(config):
        values = {key: 2 * value for key, value in values.items()}
        wider = _changed(config, values)
        if peak(gpu_memory(wider, shape, hardware), "rollout") > hardware.memory:
            break
        seconds = rollout_seconds(wider, shape, hardware, assumptions)
        if seconds < best_seconds:
            best, best_seconds = values, seconds
    return best


def _room(config: Config) -> dict[str, Any]:
    """What limits the answers that are generated at once."""
    room: dict[str, Any] = {"rollout.batch_tokens": config.rollout.batch_tokens}
    return room | ({"rollout.kv_cache_gib": config.rollout.kv_cache_gib} if engine_of(config) == "vllm" else {})


def show(config: Config, shape: ModelShape, options: Options, say: Callable[[Any], None]) -> None:
    """Print the estimate with its assumptions."""
    hardware, assumptions = hardware_of(options, config.policy.dtype), assumptions_of(options, config)
    found = estimate(config, shape, hardware, assumptions)
    say(
        f"{config.policy.path}: {shape.total:,} parameters in {config.policy.dtype} on {options.gpus} x {options.gpu}. "
        "Estimates from data sheets and stated utilisations; nothing here was measured."
    )
    say(_memory_table(found))
    verdict = f"peak {found.peak / GIB:.1f} GiB of {found.available / GIB:.1f} GiB usable per GPU"
    margin = (found.available - found.peak) / GIB
    if found.fits:
        say(f"It fits: {verdict}, {margin:.1f} GiB to spare.")
    else:
        say(f"It does not fit: {verdict}, {-margin:.1f} GiB short. {advise(config, shape, hardware)}")
    say(_amounts_table(found))
    say(_time_table(found, config.steps))
    say(_generation(config, shape, hardware, assumptions, found))
    for line in _assumptions(options, assumptions):
        say(line)


def _generation(
    config: Config, shape: ModelShape, hardware: Hardware, assumptions: Assumptions, found: Estimate
) -> str:
    """How much is generated, and what generating more answers at once would bring."""
    fresh = work(config, assumptions).fresh
    rows = rows_at_once(config, shape, hardware.gpus, assumptions)
    tokens = fresh * assumptions.response_tokens
    said = (
        f"A step generates {tokens:,.0f} tokens, the whole run {tokens * config.steps:,.0f}: {fresh} answers, "
        f"{rows} at once per GPU by {ENGINES[engine_of(config)]}."
    )
    better = fastest_generation(config, shape, hardware, assumptions)
    if not better:
        return said
    faster = estimate(_changed(config, better), shape, hardware, assumptions)
    return (
        f"{said} With {_named(better)} generation fits too and a step takes "
        f"{duration(faster.seconds)} instead of {duration(found.seconds)}."
    )


def _memory_table(found: Estimate) -> Table:
    table = Table("GiB per GPU", *MOMENTS)
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
    table = Table("phase of a step", "PFLOP", "time", "share", f"{steps} steps")
    for column in table.columns[1:]:
        column.justify = "right"
    for phase in (*found.phases, Phase("together", found.seconds, sum(phase.flops for phase in found.phases))):
        if phase.name == "together":
            table.add_section()
        table.add_row(
            phase.name,
            f"{phase.flops / 1e15:,.1f}" if phase.flops else "-",
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


def _assumptions(options: Options, assumptions: Assumptions) -> Iterator[str]:
    yield (
        f"Assumed: prompts of {assumptions.prompt_tokens:g} and responses of {assumptions.response_tokens:g} tokens on "
        f"average (--prompt-tokens, --response-tokens), {assumptions.success_rate:g} of them right, "
        f"{assumptions.candidates:g} stored successes of a replayed question, replay under way in every step and no "
        "question retired; response lengths distributed exponentially."
    )
    yield (
        f"Utilisation: {assumptions.mfu:g} of the peak FLOP/s (--mfu), {assumptions.bandwidth_use:g} of the memory "
        f"bandwidth (--bandwidth-use), {options.launch_us:g} us per layer to launch a decoding step (--launch-us), "
        f"{options.host_gbs:g} GB/s to CPU memory (--host-gbs), {options.reserve_gib:g} GiB of each GPU reserved."
    )
    yield "Not in the times: grading, evaluations, checkpoints, the optimiser's own arithmetic, start-up."


def main(argv: Sequence[str]) -> int:
    """Run the program; returns its exit status."""
    options, rest = tyro.cli(Options, args=list(argv), return_unknown_args=True, prog="python -m exgrpo.train.estimate")
    try:
        config = parse_args(rest, needed=["policy.path"])
        hardware_of(options, config.policy.dtype)  # a wrong name is told before a model is looked for
        assumptions_of(options, config)
        shape = read_shape(config.policy.path, options.config_json, config.policy.overrides)
    except ExgrpoError as error:
        return print_error(error)
    console = Console()
    show(config, shape, options, lambda value: console.print(value, highlight=False))
    return 0
