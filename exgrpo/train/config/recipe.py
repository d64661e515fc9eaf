"""Build configurations from YAML recipes and the command line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
import yaml
from pydantic import BaseModel, ValidationError
from tyro.conf import UseAppendAction, arg

from exgrpo.train.common.errors import ConfigError, os_errors_as, shown
from exgrpo.train.common.functions import ASSETS, DEFAULT_TASK, PREFIX, model_names
from exgrpo.train.common.plain import LONGEST, parse_yaml
from exgrpo.train.config.command_line import check_names, names, one_line
from exgrpo.train.config.options import Config
from exgrpo.train.config.policy import with_saved
from exgrpo.train.config.section import explain

PROGRAM = "exgrpo train"
DEFAULT_RUN = ASSETS / DEFAULT_TASK / "recipe.yaml"
NAMED = ("policy.path", "data.train")
"""Options without a default: a model and questions."""
IN_RECIPES = ("data.sources", "evaluation.sets")
"""Options that only recipes can set: command lines have no good syntax for them."""
MOST_BASES = 100
"""Longest chain of `base` recipes; Python's recursion limit allows less than a thousand."""
RENAMED = {("output", "stories"): "tracked_questions", ("objective", "shift"): None}
"""New names of options that checkpoints of earlier versions contain, by section and old name; None: without effect."""


def validate(values: dict[str, Any], origin: str) -> Config:
    """Validate nested plain values; `origin` (a file or "command line") opens every error message."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, Config, origin)) from None


def validate_stored(values: dict[str, Any], origin: str) -> Config:
    """Return the configuration of a checkpoint; raises as `validate`."""
    kept = {
        name: {new: value for key, value in section.items() if (new := RENAMED.get((name, key), key))}
        if isinstance(section, dict)
        else section
        for name, section in values.items()
    }
    return validate(kept, origin)


def changed(config: Config, values: dict[str, Any]) -> Config:
    """Return a configuration with other values, by dotted key."""
    return validate(merged(config.model_dump(), values), ", ".join(values))


def load_recipe(path: Path) -> Config:
    """Read the configuration of a YAML recipe; raises as `read_recipe`."""
    return validate(read_recipe(path), str(path))


def load_stored(path: Path) -> Config:
    """Read the config.yaml of a run; raises as `load_recipe`."""
    return validate_stored(read_recipe(path), str(path))


def unfinished(values: dict[str, Any], origin: str, needed: Sequence[str] = ()) -> Config:
    """Return the configuration of a recipe that may lack `NAMED` keys; the command line must give the `needed` ones."""
    config = validate(merged(dict.fromkeys(NAMED, ""), values), origin)
    for key in needed:
        section, name = key.split(".")
        if name not in values.get(section, {}):
            open_section = getattr(config, section).model_copy(update={name: tyro.MISSING})
            config = config.model_copy(update={section: open_section})
    return config


def read_recipe(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read the nested values of a YAML recipe. Its keys may be nested or dotted ("experience.ratio: 0.25").

    The key `base` may name another recipe (builtin:NAME, or a path relative to this one), which this one then
    overrides. An empty mapping, such as `policy.overrides: {}`, removes all that the base has there. `seen` are the
    recipes that led to this one.

    Raises:
        ConfigError: the file is missing or not a mapping, its bases form a cycle, or a section has a plain value.
    """
    if path in seen:
        raise ConfigError(f"{path}: its chain of `base` recipes leads back to itself")
    if len(seen) > MOST_BASES:
        raise ConfigError(f"{path}: {MOST_BASES} recipes lead to it by their `base`: name it in one of the first ones")
    with os_errors_as(ConfigError, f"{path} cannot be read"):
        if not path.is_file():
            raise ConfigError(f"{path}: no such recipe")
        with path.open("rb") as file:
            content = file.read(4 * LONGEST + 1)  # UTF-8 has at most 4 bytes per character; longer files are rejected
    try:
        raw = parse_yaml(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid YAML: {error.reason} at byte {error.start}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    raw = {} if raw is None else raw
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of keys to values, not a {type(raw).__name__}")
    base = raw.pop("base", "")
    if not isinstance(base, str | None):
        raise ConfigError(f"{path}: base is the path of one recipe, not a {type(base).__name__}")
    inherited = read_recipe(recipe_path(Path(base), path.parent).resolve(), (*seen, path)) if base else {}
    try:
        return merged(inherited, raw)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def merged(*layers: dict[str, Any]) -> dict[str, Any]:
    """Merge nested values, keys nested or dotted; later layers override earlier ones.

    Raises:
        ConfigError: a key has a plain value and also keys of its own.
    """
    values: dict[str, Any] = {}
    for layer in layers:
        _merge(values, layer)
    return values


def _merge(into: dict[str, Any], values: dict[str, Any], depth: int = 0) -> None:
    for key, value in values.items():
        # Keys inside an option's value, such as names in reward.parts, may contain dots.
        *sections, name = str(key).split(".") if depth < 2 else [str(key)]
        target = into
        for section in sections:
            target = _section(target, section)
        if isinstance(value, dict) and value:
            _merge(_section(target, name), value, depth + len(sections) + 1)
        else:
            target[name] = value


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    section = values.setdefault(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{name} is a section of keys, and not the value {shown(section)}: remove it")
    return section


def read_recipes(paths: Sequence[Path]) -> dict[str, Any]:
    """Read and merge several recipes, later ones overriding earlier ones; raises as `read_recipe`."""
    return merged(*(read_recipe(path) for path in paths))


def origin_of(paths: Sequence[Path]) -> str:
    """Format the names of recipes for messages."""
    return " with ".join(map(str, paths))


class RecipeArgument(BaseModel):
    """The command-line option that is not part of a configuration."""

    recipe: Annotated[
        tuple[Path, ...],
        UseAppendAction,
        arg(help="YAML recipe, or builtin:NAME, that replaces the defaults below; of several the later ones win."),
    ] = ()


def split_recipe(argv: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the recipes named on a command line, and its other arguments."""
    # The deepspeed launcher adds --local_rank; ranks are read from the environment instead.
    argv = [argument for argument in argv if not argument.startswith("--local_rank")]
    with one_line(RecipeArgument, PROGRAM):
        chosen, rest = tyro.cli(RecipeArgument, args=argv, return_unknown_args=True, add_help=False)
    return [recipe_path(path) for path in chosen.recipe], rest


def recipe_path(path: Path, folder: Path = Path()) -> Path:
    """Return the path of a recipe: a built-in task's for builtin:NAME, otherwise relative to the folder.

    Raises:
        ConfigError: there is no such task.
    """
    name = str(path).removeprefix(PREFIX)
    if name == str(path):
        return folder / path
    if name not in model_names():
        raise ConfigError(
            f"unknown recipe {shown(str(path))}; there are {', '.join(PREFIX + n for n in model_names())}"
        )
    return ASSETS / name / "recipe.yaml"


def parse_args(argv: list[str], default: Config | None = None, *, needed: Sequence[str] = NAMED) -> Config:
    """Parse `[--recipe FILE]* [--section.field VALUE ...]` into a configuration, on top of `default`.

    Without a recipe and a default it starts from the default run, unless a model or questions are named; the keys of
    `NAMED` in `needed` must then be given.

    Raises:
        ConfigError: the recipe is wrong, an option is unknown (the message suggests a near one) or one of `IN_RECIPES`,
            or a value is impossible.
    """
    recipes, rest = split_recipe(argv)
    settled = default.lora if default else None
    options = set(names(rest))
    if refused := [option for option in options if option.startswith(IN_RECIPES)]:
        raise ConfigError(f"--{refused[0]}: {' and '.join(IN_RECIPES)} are for recipes only")
    check_names(rest, Config, RecipeArgument)
    if recipes or default is None:
        own = recipes or ([] if options & set(NAMED) else [DEFAULT_RUN])
        default = unfinished(read_recipes(own), origin_of(own), needed)
    with one_line(Config, PROGRAM):
        config = tyro.cli(
            Config,
            args=rest,
            default=default,
            prog=PROGRAM,
            config=(tyro.conf.FlagConversionOff,),  # --policy.gradient_checkpointing True, as in a recipe
            description=f"{Config.__doc__} --recipe FILE, once or more, is read before the options below are applied; "
            f"{' and '.join(IN_RECIPES)} are for recipes only.",
            use_underscores=True,
        )
    # A resumed run keeps its adapters.
    return config if config.lora == settled else config.model_copy(update={"lora": with_saved(config.lora)})


def to_yaml(config: Config) -> str:
    """Return the resolved configuration as a recipe that repeats the run."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
