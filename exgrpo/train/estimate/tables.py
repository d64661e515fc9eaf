"""An estimate as tables and sentences on the console."""

from collections.abc import Callable, Iterator
from typing import Any

from rich.table import Table

from exgrpo.train.config import Config
from exgrpo.train.estimate.advice import advise, as_options, beside_gpus, changed, fastest_generation
from exgrpo.train.estimate.budget import work
from exgrpo.train.estimate.estimation import Estimate, estimate
from exgrpo.train.estimate.options import Options, assumptions_of
from exgrpo.train.estimate.parts import GIB, MOMENTS, Assumptions, Hardware, Phase, peak
from exgrpo.train.estimate.rollout import engine_of, rows_at_once
from exgrpo.train.estimate.shape import ModelShape

ENGINES = {
    "transformers": "transformers",
    "vllm": "vLLM (--rollout.engine transformers where it is not installed)",
    "server": "vLLM servers on as many GPUs again",
}


def show(config: Config, shape: ModelShape, hardware: Hardware, options: Options, say: Callable[[Any], None]) -> None:
    """Print the estimate with its assumptions."""
    assumptions = assumptions_of(options, config)
    found = estimate(config, shape, hardware, assumptions)
    say(f"{config.policy.path}: {shape.total:,} parameters in {config.policy.dtype} on {hardware.words}")
    say(_memory_table(found, hardware.kind))
    verdict = f"peak {found.peak / GIB:.1f} GiB of {found.available / GIB:.1f} GiB usable per {hardware.kind}"
    margin = (found.available - found.peak) / GIB
    if found.fits:
        say(f"It fits: {verdict}, {margin:.1f} GiB to spare.")
    else:
        say(f"It does not fit: {verdict}, {-margin:.1f} GiB short. {advise(config, shape, hardware)}")
    say(_amounts_table(found))
    for line in beside_gpus(config, shape, hardware.gpus, assumptions):
        say(line)
    say(_time_table(found, config.steps))
    say(_generation(config, shape, hardware, assumptions, found))
    for line in _assumptions(options, assumptions, hardware.kind):
        say(line)


def _generation(
    config: Config, shape: ModelShape, hardware: Hardware, assumptions: Assumptions, found: Estimate
) -> str:
    """How much is generated, and what generating more answers at once would bring."""
    fresh = work(config, assumptions).fresh
    rows = rows_at_once(config, shape, hardware.gpus, assumptions)
    tokens = fresh * assumptions.response_tokens
    text = (
        f"A step generates {tokens:,.0f} tokens, the whole run {tokens * config.steps:,.0f}: {fresh} answers, "
        f"{rows} at once per {hardware.kind} by {ENGINES[engine_of(config)]}."
    )
    better = fastest_generation(config, shape, hardware, assumptions)
    if not better:
        return text
    faster = estimate(changed(config, better), shape, hardware, assumptions)
    return (
        f"{text} With {as_options(better)} generation fits too and a step takes "
        f"{duration(faster.seconds)} instead of {duration(found.seconds)}."
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


def _assumptions(options: Options, assumptions: Assumptions, kind: str) -> Iterator[str]:
    yield (
        f"Assumed: prompts of {assumptions.prompt_tokens:g} and responses of {assumptions.response_tokens:g} tokens on "
        f"average (--prompt-tokens, --response-tokens), {assumptions.success_rate:g} of them right, "
        f"{assumptions.candidates:g} stored successes of a replayed question, replay under way in every step and no "
        "question retired; response lengths distributed exponentially."
    )
    host = f"{options.host_gbs:g} GB/s to CPU memory (--host-gbs), " if kind == "GPU" else ""
    yield (
        f"Utilisation: {assumptions.mfu:g} of the peak FLOP/s (--mfu), {assumptions.bandwidth_use:g} of the memory "
        f"bandwidth (--bandwidth-use), {options.launch_us:g} us per layer to launch a decoding step (--launch-us), "
        f"{host}{options.reserve_gib:g} GiB of each {kind} reserved."
    )
    yield (
        "Not in the times: grading, evaluations, checkpoints, the optimiser's own arithmetic, start-up. The options in "
        "parentheses are those of `exgrpo estimate`."
    )
