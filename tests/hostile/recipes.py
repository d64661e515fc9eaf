"""Hostile recipes: a sound one, changed in a way of which is known whether it is still sound."""

import json
import math
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st
from hypothesis.strategies import sampled_from as of

from exgrpo.train.config.options import Config
from exgrpo.train.config.recipe import DEFAULT_RUN, load_recipe, read_recipe, to_yaml, validate
from exgrpo.train.config.section import flat, known_keys
from tests.hostile.judge import Trial
from tests.hostile.values import ANY, ANY_TEXT, Draw, damaged, some

SOUND = validate(read_recipe(DEFAULT_RUN), "sound")
VALUES = flat(SOUND.model_dump(mode="json"))
KEYS = known_keys(Config)
NUMBERS = [key for key, value in VALUES.items() if type(value) in (int, float)]
SWITCHES = [key for key, value in VALUES.items() if type(value) is bool]
NO_NUMBERS: tuple[Any, ...] = ("text", [1], {"a": 1}, math.nan, math.inf, -math.inf, 10**400, 1e308, -1e308, "")
NO_SWITCHES: tuple[Any, ...] = ("maybe", 7, [True], math.nan, {"a": True}, "")
LONG = 2**20
HOLDS_ITSELF = ("policy: &a {path: *a}", "a: &a [*a]", "&a ? *a : 1", "a: &a {<<: *a}", "&a [*a, *a]")
DEPTHS = (21, 100, 1000, 5000, 100_000)
TOO_LONG = (b"a: [" + b"1," * LONG + b"]", b"# " + b"x" * 8 * LONG, b"a: b\n" * LONG, b"\x00" * LONG)


def repeated(config: Config) -> str:
    """What is wrong with a configuration that was read: its own recipe must give it again."""
    if not isinstance(config, Config):
        return f"a {type(config).__name__} instead of a configuration"
    again = validate(yaml.safe_load(to_yaml(config)), "its own recipe")
    return "" if again == config else "its own recipe is another configuration"


def trial(what: str, content: str | bytes, folder: Path, **expected: Any) -> Trial:
    """One recipe; `expected` is that of the `Trial`."""
    path = folder / "recipe.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return Trial(what, lambda: load_recipe(path), **{"wrong": repeated, **expected})


def refused(what: str, content: str | bytes, folder: Path, *names: str) -> Trial:
    """One recipe that is wrong."""
    return trial(what, content, folder, expected="refused", names=names)


def with_value(key: str, value: Any) -> str:
    """The sound recipe, with dotted keys, and one value changed."""
    return yaml.safe_dump(VALUES | {key: value}, sort_keys=False)


def _sound(draw: Draw, folder: Path) -> Trial:
    seed = some(draw, 0, 2**31 - 1)
    changed = SOUND.model_copy(update={"seed": seed})
    shuffled = dict(draw(st.permutations(list((VALUES | {"seed": seed}).items()))))
    written = (
        yaml.safe_dump(shuffled, sort_keys=False, allow_unicode=draw(st.booleans())),
        json.dumps(changed.model_dump(mode="json"), indent=draw(of((None, 1, 4)))),
        b"\xef\xbb\xbf" + with_value("seed", seed).encode(),
    )
    other = lambda config: "" if config == changed else f"another configuration than {changed!r:.100}"  # noqa: E731
    return trial("sound", draw(of(written)), folder, expected="right", wrong=other)


def _wrong_value(draw: Draw, folder: Path) -> Trial:
    keys, values = draw(of(((NUMBERS, NO_NUMBERS), (SWITCHES, NO_SWITCHES))))
    key = draw(of(keys))
    return refused("no number or switch", with_value(key, draw(of(values))), folder, key)


def _any_value(draw: Draw, folder: Path) -> Trial:
    return trial("any value", with_value(draw(of(KEYS)), draw(ANY)), folder)


def _unknown(draw: Draw, folder: Path) -> Trial:
    key = draw(of(KEYS))
    place = some(draw, 0, len(key) - 1)
    unknown = key[:place] + draw(of("qxzQ#é")) + key[place:]
    return refused("unknown key", with_value(unknown, 1), folder, unknown, unknown.partition(".")[0])


def _odd_key(draw: Draw, folder: Path) -> Trial:
    key = draw(of((None, 7, True, 1.5, "")) | ANY_TEXT)
    return trial("odd key", yaml.safe_dump({**VALUES, key: draw(ANY)}, sort_keys=False), folder)


def _damaged(draw: Draw, folder: Path) -> Trial:
    content = yaml.safe_dump(SOUND.model_dump(mode="json")).encode()
    for _ in range(some(draw, 1, 3)):
        content = damaged(draw, content)
    return trial("damaged text", content, folder)


def _chain(draw: Draw, folder: Path) -> Trial:
    """Bases of bases: sound up to a length that nobody needs, or a cycle."""
    length, closed = draw(of((1, 3, 10, 300, 1500))), draw(st.booleans())
    for number in range(length):
        after = 0 if closed and number == length - 1 else number + 1
        (folder / f"{number}.yaml").write_text(f"base: {after}.yaml\n")
    (folder / f"{length}.yaml").write_text(with_value("seed", 0))
    expected = "refused" if closed or length > 100 else "right"
    names = ("back to itself", "`base`")
    return trial("chain of bases", "base: 0.yaml\n", folder, expected=expected, names=names)


def _refused(draw: Draw, folder: Path) -> Trial:
    """A key that stands twice, texts that are too deep or too long, no YAML, no base."""
    key, (start, depth) = draw(of(NUMBERS + SWITCHES)), draw(st.tuples(of(("a: [", "a: {a: ", "- ")), of(DEPTHS)))
    width, levels = some(draw, 2, 12), some(draw, 3, 40)
    aliases = [f"a{i}: &x{i} [{', '.join([f'*x{i - 1}'] * width)}]" for i in range(1, levels)]
    bases = (".", "none.yaml", "/dev/zero", "x" * 5000, "a/" * 3000, "recipe.yaml", "~", "\n")
    contents: dict[str, Any] = {
        "a key twice": with_value(key, VALUES[key]) + f"{key}: {json.dumps(VALUES[key])}\n",
        "another encoding": with_value("seed", 1).encode(draw(of(("utf-16", "utf-32", "utf-16-le", "cp037")))),
        "deep": start + start.removeprefix("a: ") * depth + "1",
        "deep and whole": f"a: {'[' * depth}1{']' * depth}",
        "aliases of aliases": "\n".join([f"a0: &x0 [{', '.join('1' * width)}]", *aliases]),
        "holds itself": draw(of(HOLDS_ITSELF)),
        "no base": f"base: {json.dumps(draw(of(bases)))}\nsteps: 1\n",
        "long": draw(of(TOO_LONG)),
    }
    what = draw(of(sorted(contents)))
    return refused(what, contents[what], folder, *([key] if what == "a key twice" else [str(folder)]))


WAYS = (
    *(_wrong_value, _wrong_value, _any_value, _any_value, _any_value, _unknown, _odd_key, _damaged, _damaged) * 4,
    *(_sound, _sound, _sound, *(_refused,) * 6, _chain),
)
"""All ways; those of which no two cases are alike come more often."""
