"""Configurations from YAML recipes and the command line."""

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
"""What has no default: a model and questions."""
IN_RECIPES = ("data.sources", "evaluation.sets")
"""What a command line has no good form for."""
MOST_BASES = 100
"""In a chain of recipes, each of which names the next one as its base; Python reads no chain of a thousand."""
GONE = (("objective", "shift"),)
"""Options that have left, without an effect on runs that go on: those of earlier versions have them stored."""


def validate(values: dict[str, Any], origin: str) -> Config:
    """Check nested plain values; `origin` (a file or "command line") opens every error message."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, Config, origin)) from None


def validate_stored(values: dict[str, Any], origin: str) -> Config:
    """Return the configuration that a checkpoint holds; raises as `validate`."""
    kept = {
        name: {key: value for key, value in section.items() if (name, key) not in GONE}
        if isinstance(section, dict)
        else section
        for name, section in values.items()
    }
    return validate(kept, origin)


def changed(config: Config, values: dict[str, Any]) -> Config:
    """A configuration with other values, by dotted key."""
    return validate(merged(config.model_dump(), values), ", ".join(values))


def load_recipe(path: Path) -> Config:
    """Read a YAML recipe of a run; see `read_recipe`."""
    return validate(read_recipe(path), str(path))


def load_stored(path: Path) -> Config:
    """Read the config.yaml of a run; raises as `load_recipe`."""
    return validate_stored(read_recipe(path), str(path))


def unfinished(values: dict[str, Any], origin: str, needed: Sequence[str] = ()) -> Config:
    """The configuration of a recipe that may leave `NAMED` keys out: the `needed` ones to the command line."""
    config = validate(merged(dict.fromkeys(NAMED, ""), values), origin)
    for key in needed:
        section, name = key.split(".")
        if name not in values.get(section, {}):
            open_section = getattr(config, section).model_copy(update={name: tyro.MISSING})
            config = config.model_copy(update={section: open_section})
    return config


def read_recipe(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The values of a YAML recipe, nested. Its keys may be nested or dotted ("experience.ratio: 0.25").

    A recipe may name another under the key `base` (builtin:NAME, or a path relative to its own) and then holds only
    what differs. An empty mapping, such as `policy.overrides: {}`, takes back all that the base has there.
    `seen` are the recipes that led to this one.

    Raises:
        ConfigError: it is missing or not a mapping, its bases lead back to it, or a section holds a plain value.
    """
    if path in seen:
        raise ConfigError(f"{path}: its chain of `base` recipes leads back to itself")
    if len(seen) > MOST_BASES:
        raise ConfigError(f"{path}: {MOST_BASES} recipes lead to it by their `base`: name it in one of the first ones")
    with os_errors_as(ConfigError, f"{path} cannot be read"):
        if not path.is_file():
            raise ConfigError(f"{path}: no such recipe")
        with path.open("rb") as file:
            content = file.read(4 * LONGEST + 1)  # a character has four bytes at most; what is longer is refused
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
    """Nested values of several layers, keys nested or dotted; later layers beat earlier ones.

    Raises:
        ConfigError: a key has a plain value and keys of its own, too.
    """
    values: dict[str, Any] = {}
    for layer in layers:
        _merge(values, layer)
    return values


def _merge(into: dict[str, Any], values: dict[str, Any], depth: int = 0) -> None:
    for key, value in values.items():
        # Keys within the value of an option, as the names in reward.parts, may hold dots.
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
        raise ConfigError(f"{name} is a section of keys, and the value {shown(section)} stands in its place: remove it")
    return section


def read_recipes(paths: Sequence[Path]) -> dict[str, Any]:
    """The values of several recipes, of which later ones beat earlier ones; see `read_recipe`."""
    return merged(*(read_recipe(path) for path in paths))


def origin_of(paths: Sequence[Path]) -> str:
    """The names of recipes, for messages."""
    return " with ".join(map(str, paths))


class RecipeArgument(BaseModel):
    """The one option that is not part of a configuration."""

    recipe: Annotated[
        tuple[Path, ...],
        UseAppendAction,
        arg(help="YAML recipe, or builtin:NAME, that replaces the defaults below; of several the later ones win."),
    ] = ()


def split_recipe(argv: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The recipes that a command line names, and its other arguments."""
    # The deepspeed launcher adds --local_rank; ranks are read from the environment.
    argv = [argument for argument in argv if not argument.startswith("--local_rank")]
    with one_line(RecipeArgument, PROGRAM):
        chosen, rest = tyro.cli(RecipeArgument, args=argv, return_unknown_args=True, add_help=False)
    return [recipe_path(path) for path in chosen.recipe], rest


def recipe_path(path: Path, folder: Path = Path()) -> Path:
    """Where the recipe of a built-in task is, if a path is its name, builtin:NAME; other paths begin at the folder.

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
    """Resolve `[--recipe FILE]* [--section.field VALUE ...]` into a configuration, on top of `default`.

    Without a recipe and a default it is the default run's, unless a model or questions are named. `needed` are those
    of the `NAMED` keys that must be given then.

    Raises:
        ConfigError: the recipe is wrong, an option is unknown (the message names the near one) or one of `IN_RECIPES`,
            or a value is impossible.
    """
    recipes, rest = split_recipe(argv)
    settled = default.lora if default else None
    options = set(names(rest))
    if refused := [option for option in options if option.startswith(IN_RECIPES)]:
        raise ConfigError(f"--{refused[0]}: {' and '.join(IN_RECIPES)} stand in recipes only")
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
            f"{' and '.join(IN_RECIPES)} stand in recipes only.",
            use_underscores=True,
        )
    # The options of a run that goes on are settled.
    return config if config.lora == settled else config.model_copy(update={"lora": with_saved(config.lora)})


def to_yaml(config: Config) -> str:
    """The resolved configuration as a recipe that repeats the run."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
