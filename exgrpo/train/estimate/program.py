"""Does a recipe fit, and how long does a step take?

    python -m exgrpo.train.estimate --recipe recipes/paper.yaml --gpus 8 --gpu H100

Nothing is launched and no weights are read. Options of the configuration may follow (`--rollout.max_tokens 4096`).
Every number is an estimate from data sheets, the model's shape and stated assumptions; none was measured.
"""

from collections.abc import Sequence

import tyro
from rich.console import Console

from exgrpo.train.command_line import check_names, one_line
from exgrpo.train.config import Config
from exgrpo.train.errors import ExgrpoError, print_error
from exgrpo.train.estimate.options import Options, assumptions_of, hardware_of
from exgrpo.train.process import quiet
from exgrpo.train.recipe import RecipeArgument, parse_args

PROGRAM = "python -m exgrpo.train.estimate"


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
        assumptions_of(options, config)
        # transformers and DeepSpeed: only for what can be right
        from exgrpo.train.estimate.shape import read_shape
        from exgrpo.train.estimate.tables import show

        shape = read_shape(config.policy.path, options.config_json, config.policy.overrides)
    except ExgrpoError as error:
        return print_error(error)
    console = Console()
    show(config, shape, hardware, options, lambda value: console.print(value, highlight=False))
    return 0
