"""Hostile recipes: a sound one, changed in a way of which is known whether it is still sound."""

import json
import math
import random
from pathlib import Path
from typing import Any

import yaml

from exgrpo.train.config import Config
from exgrpo.train.recipe import DEFAULT_RUN, load_recipe, read_recipe, to_yaml, validate
from exgrpo.train.section import flat, known_keys
from tests.hostile import texts
from tests.hostile.judge import Trial

SOUND = validate(read_recipe(DEFAULT_RUN), "sound")
VALUES = flat(SOUND.model_dump(mode="json"))
KEYS = known_keys(Config)
NUMBERS = [key for key, value in VALUES.items() if type(value) in (int, float)]
SWITCHES = [key for key, value in VALUES.items() if type(value) is bool]
NO_NUMBERS: tuple[Any, ...] = ("text", [1], {"a": 1}, math.nan, math.inf, -math.inf, 10**400, 1e308, -1e308, "")
NO_SWITCHES: tuple[Any, ...] = ("maybe", 7, [True], math.nan, {"a": True}, "")
LONG = 2**20


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


def with_value(key: str, value: Any) -> str:
    """The sound recipe, with dotted keys, and one value changed."""
    return yaml.safe_dump(VALUES | {key: value}, sort_keys=False)


def drawn(rng: random.Random, folder: Path) -> Trial:
    """One of them."""
    return rng.choice(WAYS)(rng, folder)


def _sound(rng: random.Random, folder: Path) -> Trial:
    items = list(VALUES.items())
    rng.shuffle(items)
    content = yaml.safe_dump(dict(items), sort_keys=False, allow_unicode=rng.random() < 0.5)
    return trial("in another order", content, folder, expected="right", wrong=_other_than(SOUND))


def _json(rng: random.Random, folder: Path) -> Trial:
    content = json.dumps(SOUND.model_dump(mode="json"), indent=rng.choice((None, 1, 4)))
    return trial("as JSON", content, folder, expected="right", wrong=_other_than(SOUND))


def _seed(rng: random.Random, folder: Path) -> Trial:
    seed = rng.randrange(2**31)
    changed = SOUND.model_copy(update={"seed": seed})
    return trial("another seed", with_value("seed", seed), folder, expected="right", wrong=_other_than(changed))


def _no_number(rng: random.Random, folder: Path) -> Trial:
    key = rng.choice(NUMBERS)
    return trial("no number", with_value(key, rng.choice(NO_NUMBERS)), folder, expected="refused", names=(key,))


def _no_switch(rng: random.Random, folder: Path) -> Trial:
    key = rng.choice(SWITCHES)
    return trial("no switch", with_value(key, rng.choice(NO_SWITCHES)), folder, expected="refused", names=(key,))


def _any_value(rng: random.Random, folder: Path) -> Trial:
    return trial("any value", with_value(rng.choice(KEYS), texts.value(rng)), folder)


def _unknown(rng: random.Random, folder: Path) -> Trial:
    key = rng.choice(KEYS)
    place = rng.randrange(len(key))
    unknown = key[:place] + rng.choice("qxzQ#é") + key[place:]
    return trial(
        "unknown key", with_value(unknown, 1), folder, expected="refused", names=(unknown, unknown.partition(".")[0])
    )


def _odd_key(rng: random.Random, folder: Path) -> Trial:
    key = rng.choice((texts.text(rng), None, 7, True, 1.5, ""))
    return trial("odd key", yaml.safe_dump({**VALUES, key: texts.value(rng)}, sort_keys=False), folder)


def _twice(rng: random.Random, folder: Path) -> Trial:
    key = rng.choice(NUMBERS + SWITCHES)
    line = f"{key}: {json.dumps(VALUES[key])}\n"
    content = with_value(key, VALUES[key]) + line
    return trial("a key twice", content, folder, expected="refused", names=(key,))


def _damaged(rng: random.Random, folder: Path) -> Trial:
    content = yaml.safe_dump(SOUND.model_dump(mode="json")).encode()
    for _ in range(rng.randint(1, 3)):
        content = texts.damaged(rng, content)
    return trial("damaged text", content, folder)


def _encoding(rng: random.Random, folder: Path) -> Trial:
    encoding = rng.choice(("utf-16", "utf-32", "utf-16-le", "cp037"))
    return trial(
        "another encoding", with_value("seed", 1).encode(encoding), folder, expected="refused", names=("YAML",)
    )


def _marked(rng: random.Random, folder: Path) -> Trial:
    content = b"\xef\xbb\xbf" + with_value("seed", 1).encode()
    changed = SOUND.model_copy(update={"seed": 1})
    return trial("byte order mark", content, folder, expected="right", wrong=_other_than(changed))


def _deep(rng: random.Random, folder: Path) -> Trial:
    depth = rng.choice((21, 100, 1000, 5000, 100_000))
    opening, closing = rng.choice((("[", "]"), ("{a: ", "}"), ("- ", "")))
    whole = rng.random() < 0.5
    content = "a: " * (opening != "- ") + opening * depth + "1" + closing * depth * whole
    return trial("deep", content, folder, expected="refused", names=("YAML", "nested", "characters"))


def _aliases(rng: random.Random, folder: Path) -> Trial:
    width, depth = rng.randint(2, 12), rng.randint(3, 40)
    lines = [f"a0: &x0 [{', '.join('1' * width)}]"]
    lines += [f"a{i}: &x{i} [{', '.join([f'*x{i - 1}'] * width)}]" for i in range(1, depth)]
    return trial("aliases of aliases", "\n".join(lines), folder, expected="refused")


def _itself(rng: random.Random, folder: Path) -> Trial:
    content = rng.choice(("policy: &a {path: *a}", "a: &a [*a]", "&a ? *a : 1", "a: &a {<<: *a}", "&a [*a, *a]"))
    return trial("holds itself", content, folder, expected="refused", names=("itself", "YAML", "values", "missing"))


def _chain(rng: random.Random, folder: Path) -> Trial:
    """Bases of bases: sound up to a length that nobody needs, or a cycle."""
    length, closed = rng.choice((1, 3, 10, 300, 3000)), rng.random() < 0.5
    for number in range(length):
        after = 0 if closed and number == length - 1 else number + 1
        (folder / f"{number}.yaml").write_text(f"base: {after}.yaml\n")
    (folder / f"{length}.yaml").write_text(with_value("seed", 0))
    names = ("back to itself", "`base`")
    expected = "refused" if closed or length > 100 else "right"
    return trial("chain of bases", "base: 0.yaml\n", folder, expected=expected, names=names)


def _base(rng: random.Random, folder: Path) -> Trial:
    (folder / "empty.yaml").touch()
    bad = (
        "none.yaml",
        ".",
        "/dev/zero",
        "/dev/stdin",
        "x" * 5000,
        "a/" * 3000,
        "recipe.yaml",
        "empty.yaml/x",
        "~",
        "\n",
    )
    content = f"base: {json.dumps(rng.choice(bad))}\nsteps: 1\n"
    return trial("no base", content, folder, expected="refused", names=("recipe", str(folder)))


def _no_file(rng: random.Random, folder: Path) -> Trial:
    path = rng.choice((folder, folder / "none.yaml", Path("/dev/zero"), folder / ("x" * 300), Path("/dev/null/x")))
    return Trial("no file", lambda: load_recipe(path), "refused", (str(path),))


def _long(rng: random.Random, folder: Path) -> Trial:
    content = rng.choice((b"a: [" + b"1," * LONG + b"]", b"# " + b"x" * 8 * LONG, b"a: b\n" * LONG, b"\x00" * LONG))
    return trial("long", content, folder, expected="refused", names=("recipe.yaml",))


def _other_than(right: Config) -> Any:
    return lambda config: "" if config == right else f"another configuration than {right!r:.100}"


WAYS = (
    *(_sound, _json, _seed, _no_number, _no_switch, _any_value, _unknown, _odd_key, _twice, _damaged, _encoding),
    *(_marked, _deep, _aliases, _itself, _chain, _base, _no_file),
    *(_no_number, _no_switch, _any_value, _any_value, _any_value, _unknown, _odd_key, _damaged, _damaged, _damaged) * 4,
    _long,
)
"""All ways; those of which no two cases are alike come more often."""
