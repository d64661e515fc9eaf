"""Whatever stands in a recipe, it is a configuration or one line of a sane length that says what is wrong."""

import math
import os

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from exgrpo.train.common import errors
from exgrpo.train.common.errors import ConfigError, cut, shown
from exgrpo.train.common.limits import MOST_ANSWERS
from exgrpo.train.common.plain import parse_yaml
from exgrpo.train.config.options import Config
from exgrpo.train.config.policy import from_arguments
from exgrpo.train.config.recipe import DEFAULT_RUN, load_recipe, parse_args, to_yaml, validate
from exgrpo.train.config.section import flat, known_keys
from exgrpo.train.data.prompts import PromptFormat
from exgrpo.train.data.rows import parse_row
from exgrpo.train.policy.source import explained
from exgrpo.train.reward.names import resolve_reward
from tests.train.configs import configured
from tests.train.values import ANY, ANY_TEXT, tried

KEYS = known_keys(Config)
SOUND = flat(load_recipe(DEFAULT_RUN).model_dump(mode="json"))
BOMB = "a: &x0 [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"b{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]\n" for i in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("policy: &a {path: *a}", "holds itself by an alias"),
        ("[" * 5000 + "]" * 5000, "nested too deeply"),
        (BOMB, "more than 100000 values"),
        ("x: 2024-13-45", "not valid YAML: month must be in 1..12"),
        ("a: !!timestamp x", "not valid YAML"),
        ("steps: " + "9" * 5000, "not valid YAML: Exceeds the limit"),
        ('base: "\\0"', "holds a character that no file or program can take"),
        ("base: 5", "base is the path of one recipe, not a int"),
        ("steps: 1\nsteps: 2", "the key 'steps' comes twice"),
        ("a: [" + "1," * 2**18 + "]", "has more than 262144 characters"),
        ("0", "a recipe is a mapping of keys to values, not a int"),
        ("policy.dtype: " + "x" * 100_000, r"policy.dtype: .*got 'xxx.*xxx'"),
        ("? " + "x" * 100_000 + "\n: 1", "unknown key"),
        ("\n".join(f"key{i}: 1" for i in range(50)), "and 42 more$"),
    ],
)
def test_hostile_recipes_are_named_in_one_short_line(tmp_path, text, message):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load_recipe(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-le", "cp037"])
def test_a_recipe_is_in_utf_8(tmp_path, encoding):
    path, text = tmp_path / "recipe.yaml", to_yaml(configured(seed=3))
    path.write_bytes(text.encode(encoding))
    with pytest.raises(ConfigError, match=r"recipe\.yaml"):
        load_recipe(path)
    path.write_bytes(text.encode("utf-8-sig"))
    assert load_recipe(path).seed == 3


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return tmp_path_factory.mktemp("drawn") / "recipe.yaml"


@given(key=st.sampled_from(KEYS) | ANY_TEXT, value=ANY)
def test_any_value_is_an_error_or_a_configuration_that_its_own_recipe_gives_again(recipe, key, value):
    text = yaml.safe_dump(SOUND | {key: value}, sort_keys=False)
    recipe.write_bytes(text.encode("utf-8", "surrogatepass"))
    config, error = tried(lambda: load_recipe(recipe), ConfigError)
    assert "\n" not in error
    assert error or validate(yaml.safe_load(to_yaml(config)), "its own recipe") == config


WORD = ANY_TEXT.map(lambda text: os.fsdecode(text.replace("\x00", "").encode("utf-8", "surrogatepass")))
"""What a system can hand over."""


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(KEYS) | WORD, WORD), min_size=1, max_size=2), st.booleans())
def test_any_words_on_a_command_line_are_an_error_or_a_configuration(pairs, joined):
    argv = [word for key, value in pairs for word in ([f"--{key}={value}"] if joined else [f"--{key}", value])]
    config, error = tried(lambda: parse_args(argv), ConfigError)
    assert len(error) < errors.LONGEST
    assert error or validate(yaml.safe_load(to_yaml(config)), "its own recipe") == config


def test_values_that_are_merged_may_be_replaced():
    assert parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}") == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}}
    assert parse_yaml("{1: a, '1': b}") == {1: "a", "1": "b"}


def test_a_chain_of_bases_has_an_end(tmp_path):
    for number in range(101):
        (tmp_path / f"{number}.yaml").write_text(f"base: {number + 1}.yaml\n")
    (tmp_path / "101.yaml").write_text("policy.path: m\ndata.train: q\n")
    load_recipe(tmp_path / "1.yaml")
    with pytest.raises(ConfigError, match="100 recipes lead"):
        load_recipe(tmp_path / "0.yaml")


def _default(key):
    value = configured().model_dump()
    for name in key.split("."):
        value = value[name]
    return value


def test_no_number_is_without_bounds():
    numbers = [key for key in KEYS if type(_default(key)) in (int, float)]
    assert len(numbers) > 40
    for key in numbers:
        for value in (math.nan, math.inf, -1e308, 10**400):
            with pytest.raises(ConfigError, match=key):
                configured({key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in ("experience.max_age", "evaluation.every") for value in (10**12, -1, 0)),
        ("objective.clip", [math.nan, 0.2]),
        ("objective.clip", [0.2, 1e308]),
        ("objective.beta", None),
        ("objective.trigger", 0),
        ("experience.band", [0.2, 1.5]),
        ("optimizer.betas", [0.9, 1.0]),
        ("optimizer.betas", [-1, 0.9]),
        ("rollout.temperature", 1e-300),
        ("experience.sigma", 1e-300),
    ],
)
def test_values_that_no_computation_survives_are_refused(key, value):
    with pytest.raises(ConfigError, match=key):
        configured({key: value})


def test_a_step_of_more_answers_than_fit_into_memory_is_refused():
    assert configured(questions=64, rollout={"samples": 2**14}).rollout.samples * 64 == MOST_ANSWERS
    with pytest.raises(ConfigError, match="exceed 1048576 answers per step"):
        configured(questions=65, rollout={"samples": 2**14})
    with pytest.raises(ConfigError, match="rollout.samples: Input should be less than"):
        configured(rollout={"samples": 10**9})


def test_a_run_has_the_name_of_one_folder():
    for name in ("", ".", "..", "../x", "/tmp/x", "x" * 256, "é" * 128):
        with pytest.raises(ConfigError, match=r"output.name: a run's name is that of one folder"):
            configured({"output.name": name})
    assert configured({"output.name": "é" * 127}).output.name == "é" * 127


def test_names_within_a_value_may_hold_dots(tmp_path):
    config = configured({"reward": {"parts": {"format.tags": 0.2}}})
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_recipe(tmp_path / "config.yaml") == config


def test_overrides_that_are_no_values_are_one_line():
    for argument in ("KEY=[", "KEY=!!bool x", "KEY=2024-13-45", "KEY=" + "[" * 5000, "=", "x" * 100_000):
        with pytest.raises(ConfigError) as error:
            from_arguments([argument])
        assert len(str(error.value)) < 600
    with pytest.raises(ConfigError) as error:
        parse_args(["--policy.overrides", "KEY=["])
    assert "\n" not in str(error.value)


def test_what_a_message_shows_is_short_and_on_one_line(capsys):
    assert shown("a\nb") == r"'a\nb'"
    for value in ("x" * 100_000, ["x"] * 100_000, 10**4000, ValueError("x" * 100_000), [[[[[[[[1]]]]]]]]):
        assert 0 < len(shown(value)) <= errors.SHOWN
    long = cut("head" + "x" * 1000 + "tail", 100)
    assert (len(long), long[:4], long[-4:]) == (100, "head", "tail")
    assert errors.printable("é \n\x1b[2J\u202e\ud800") == "é \n\\x1b[2J\\u202e\\ud800"
    errors.print_error(ConfigError("x" * 100_000 + ": do this"))
    printed = capsys.readouterr().err
    assert len(printed) < 5000
    assert printed.endswith("xxx: do this\n")


def test_what_is_long_in_data_and_models_is_cut(tmp_path):
    long = "x" * 100_000
    causes = [
        lambda: PromptFormat(chat=False, max_prompt_tokens=1, prompt_format=long).check_settings(),
        lambda: PromptFormat(chat=False, max_prompt_tokens=1, prompt_format="{" + long + "}").check_settings(),
        lambda: parse_row({long: 1}, "source"),
        lambda: resolve_reward(long),
    ]
    for cause in causes:
        with pytest.raises(errors.ExgrpoError) as error:
            cause()
        assert len(str(error.value)) < 1000
    assert len(str(explained(ValueError(long), long))) < 1000
