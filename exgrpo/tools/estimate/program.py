"""Does a recipe fit, and how long does a step take?

    python -m exgrpo.tools.estimate --recipe recipes/paper.yaml --gpus 8 --gpu H100

Nothing is launched and no weights are read. Options of the configuration may follow (`--rollout.max_tokens 4096`).
Every number is an estimate from data sheets, the model's shape and stated assumptions; none was measured.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro
from pydantic import Field
from rich.console import Console

from exgrpo.tools.estimate.parts import GIB, GPUS, MODELS, Assumptions, Hardware
from exgrpo.train.common.errors import ConfigError, ExgrpoError, print_error
from exgrpo.train.common.limits import RESERVED_GIB
from exgrpo.train.common.process import quiet
from exgrpo.train.config.command_line import check_names, one_line
from exgrpo.train.config.options import Config, Section
from exgrpo.train.config.recipe import RecipeArgument, parse_args

if TYPE_CHECKING:
    from exgrpo.train.policy.shape import ModelShape

PROGRAM = "python -m exgrpo.tools.estimate"


class Options(Section):
    """Estimate memory and time of a recipe. --recipe FILE and every option of training are understood as well."""

    gpus: int = Field(8, ge=1, description="Number of GPUs, one rank each.")
    gpu: str = Field("H100", description=f"{', '.join(GPUS)}; or any name with the three figures below.")
    memory_gib: float | None = Field(None, gt=0, description="Memory of a GPU in GiB; None: of its data sheet.")
    tflops: float | None = Field(
        None, gt=0, description="Its dense peak TFLOP/s in the recipe's dtype; None: likewise."
    )
    bandwidth: float | None = Field(None, gt=0, description="Its memory bandwidth in GB/s; None: likewise.")
    reserve_gib: float = Field(
        RESERVED_GIB,
        ge=0,
        description="GiB of it that no tensor gets: CUDA context, NCCL, library workspaces, fragmentation.",
    )
    prompt_tokens: float | None = Field(
        None, ge=1, description="Mean prompt length; None: a quarter of data.max_prompt_tokens."
    )
    response_tokens: float | None = Field(
        None, ge=1, description="Mean response length; None: a quarter of rollout.max_tokens."
    )
    mfu: float = Field(
        0.32,
        gt=0,
        le=1,
        description="Share of the peak that passes through the model reach (0.315 was measured on one H100); across "
        "slow links expect less.",
    )


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
            "name one of them or give --memory_gib, --tflops and --bandwidth"
        )
    of_sheet = (sheet.memory, sheet.fp32 if dtype == "fp32" else sheet.bf16, sheet.bandwidth) if sheet else own
    memory, tflops, bandwidth = (float(mine or theirs or 0) for mine, theirs in zip(own, of_sheet, strict=True))
    usable = (memory - options.reserve_gib) * GIB
    origin = "Estimates from data sheets and stated utilisations; nothing here was measured."
    words = f"{options.gpus} x {options.gpu}. {origin}"
    return Hardware(options.gpus, usable, tflops * 1e12, bandwidth * 1e9, words=words)


def assumptions_of(options: Options, config: Config) -> Assumptions:
    """The assumptions with their defaults filled in.

    Raises:
        ConfigError: a mean length exceeds what the recipe allows.
    """
    lengths = []
    for key, mean, limit_key, limit in (
        ("prompt_tokens", options.prompt_tokens, "data.max_prompt_tokens", config.data.max_prompt_tokens),
        ("response_tokens", options.response_tokens, "rollout.max_tokens", config.rollout.max_tokens),
    ):
        if mean is not None and mean > limit:
            raise ConfigError(f"{key}: {mean:g} exceeds {limit_key} ({limit}): lower the one or raise the other")
        lengths.append(max(1.0, limit / 4) if mean is None else mean)
    prompt, response = lengths
    return Assumptions(prompt, response, options.mfu)


def read_shape(path: str, overrides: Mapping[str, Any] | None = None) -> "ModelShape":
    """The shape of a model; no weights are read.

    Args:
        path: folder with a config.json or hub name of the model, or builtin:NAME. The models of the recipes need not be
            at hand.
        overrides: values of its configuration that are changed.

    Raises:
        ModelError: there is no such model, or it is not of the family that is counted here.
        ConfigError: an override does not suit it.
    """
    from transformers import AutoConfig

    from exgrpo.train.policy.shape import shape_of
    from exgrpo.train.policy.source import find_model, overridden

    shipped = MODELS.get(path)
    if not shipped or Path(path).exists():
        return shape_of(find_model(path, overrides).config)
    known = AutoConfig.for_model(**shipped)
    return shape_of(overridden(known, shipped, overrides) if overrides else known)


def main(argv: Sequence[str]) -> int:
    """Run the program; returns its exit status."""
    quiet()
    try:
        check_names(argv, Options, Config, RecipeArgument)
        with one_line(Options, PROGRAM):
            options, rest = tyro.cli(
                Options, args=list(argv), return_unknown_args=True, prog=PROGRAM, use_underscores=True
            )
        config = parse_args(rest, needed=["policy.path"])
        hardware = hardware_of(options, config.policy.dtype)  # a wrong name is told before a model is looked for
        assumptions = assumptions_of(options, config)
        # transformers and DeepSpeed: only for what can be right
        from exgrpo.tools.estimate.tables import lines
        from exgrpo.train.run.plan import make_plan

        shape = read_shape(config.policy.path, config.policy.overrides)
        plan = make_plan(config, shape, hardware.gpus, hardware.memory)
    except ExgrpoError as error:
        return print_error(error)
    console = Console()
    console.print(str(plan), highlight=False)
    for line in lines(plan.config, shape, hardware, assumptions, options.reserve_gib):
        console.print(line, highlight=False)
    return 0
