"""Recipes and overrides: what is accepted, and what the errors say."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from exgrpo.train.common.errors import ConfigError
from exgrpo.train.config.options import Config, ExperienceConfig, held_out_sets
from exgrpo.train.config.recipe import IN_RECIPES, load_recipe, parse_args, read_recipe, to_yaml, validate_stored
from exgrpo.train.config.section import flat, known_keys
from exgrpo.train.reward.names import DEFAULT, resolve_reward
from tests.train.configs import configured


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


DEFAULT_RUN = Path(__file__).parents[3] / "exgrpo" / "assets" / "arithmetic" / "recipe.yaml"
OWN = ["--policy.path=my/model", "--data.train", "mine.jsonl"]


def test_without_arguments_it_is_the_default_run():
    assert parse_args([]) == parse_args(["--local_rank=3"]) == load_recipe(DEFAULT_RUN)
    assert parse_args(["--experience.ratio=0"]).data.train_limit == 6000


def test_an_own_model_takes_nothing_from_the_default_run():
    """Whatever the default run's recipe says, but for its model and questions, is not so in another run."""
    own, written = parse_args(OWN), load_recipe(DEFAULT_RUN).model_dump()
    for key, value in flat(read_recipe(DEFAULT_RUN)).items():
        section, _, name = key.rpartition(".")
        assert (written[section][name] if section else written[name]) in (value, (value,))
        assert getattr(getattr(own, section) if section else own, name) != value, key


def test_an_own_model_is_asked_for_what_its_reward_reads():
    """The README's command: no question is left out, and the prompt asks for the box that is graded."""
    own = parse_args(OWN)
    assert (own.data.train_limit, own.data.test) == (None, None)
    answer = r"So it is \boxed{" + "7}."
    assert resolve_reward(own.reward.function or DEFAULT)(answer, "7") == 1.0
    assert own.data.prompt_format.format(question="What is 3 + 4?").startswith("What is 3 + 4?")
    assert r"\boxed{}" in own.data.prompt_format.format(question="")


def test_one_source_or_several(tmp_path):
    recipe = tmp_path / "r.yaml"
    for text, arguments, train, test in (
        ("data: {train: a}", [], ("a",), None),
        ("data: {train: [a, b], test: c, train_weights: [1, 3]}", [], ("a", "b"), ("c",)),
        ("data: {train_weights: [1, 3]}", ["--data.train", "a", "b", "--data.test", "c", "d"], ("a", "b"), ("c", "d")),
        ("data: {train: a, test: b}", ["--data.test=None"], ("a",), None),
        ("data: {train: a}", ["--data.train=b?x=1&y=2"], ("b?x=1&y=2",), None),
    ):
        recipe.write_text(f"policy.path: m\n{text}\n")
        config = parse_args([f"--recipe={recipe}", *arguments])
        assert (config.data.train, config.data.test) == (train, test)
        (tmp_path / "config.yaml").write_text(to_yaml(config))
        assert load_recipe(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("missing", [OWN[:1], OWN[1:]])
def test_an_own_run_needs_a_model_and_questions(missing):
    name = "--data.train" if missing == OWN[:1] else "--policy.path"
    with pytest.raises(ConfigError, match=rf"^missing: {name} \(see exgrpo train --help\)$"):
        parse_args(missing)


def test_a_parsers_message_has_no_frame_where_the_output_is_not_in_unicode():
    """A text without an encoding is such an output."""
    with contextlib.redirect_stdout(io.StringIO()):
        with pytest.raises(ConfigError, match=r"^Error parsing --steps: .*: 'x' \(see exgrpo train --help\)$"):
            parse_args(["--steps", "x"])
        with pytest.raises(ConfigError, match=r"^missing: --data.train \(see exgrpo train"):
            parse_args(OWN[:1])


def test_what_is_sampled_from_in_training_changes_no_evaluation(tmp_path):
    config = load_recipe(write(tmp_path, f"base: {DEFAULT_RUN}\nrollout.top_p: 0.9"))
    assert config.rollout.cut == {"top_p": 0.9, "top_k": 0, "min_p": 0.0, "allowed_tokens": True}
    assert {asked.top_p for asked in held_out_sets(config).values()} == {1.0}
    assert parse_args(["--evaluation.top_p", "0.9"]).rollout.cut == {}
    assert parse_args(["--rollout.top_k", "20", "--rollout.engine", "vllm"]).rollout.cut["top_k"] == 20


def test_latex_is_no_line_break_and_a_tilde_is_the_home_folder(tmp_path):
    text = "base: builtin:countdown\noutput.folder: ~/runs\nexperience.folder: ~/tokens\npreflight: off\n"
    config = load_recipe(write(tmp_path, text + "data.prompt_format: '{question} with $a \\neq b$'"))
    assert config.data.prompt_format == "{question} with $a \\neq b$"
    assert (config.data.train, config.preflight) == (("builtin:countdown",), "off")
    assert (config.output.folder, config.experience.folder) == (Path.home() / "runs", Path.home() / "tokens")


def test_overrides_beat_the_recipe_and_the_recipe_beats_the_defaults(tmp_path):
    recipe = write(tmp_path, f"base: {DEFAULT_RUN}\nsteps: 7\nexperience.ratio: 0.25\noptimizer.lr: 1.0e-6\n")
    config = parse_args(["--recipe", str(recipe), "--experience.ratio", "0.75", "--objective.clip", "None"])
    assert (config.steps, config.experience.ratio, config.optimizer.lr) == (7, 0.75, 1e-6)
    assert config.objective.clip is None
    assert config.experience.mu == ExperienceConfig().mu


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("experience.rato: 0.3", "unknown key 'experience.rato'; did you mean 'experience.ratio'?"),
        ("stepz: 3", "unknown key 'stepz'; did you mean 'steps'?"),
        ("experience: {ratio: 3}", r"experience.ratio: Input should be less than or equal to 1 \(got 3\)"),
        ("rollout.stop: ['\\nQ:']", r"rollout.stop.0: it has a backslash and an n .* break: write \$'"),
        ("data.answer_prefix: <think>\\n", "data.answer_prefix: it has a backslash and an n in the place"),
        ("policy.dtype: fp8", "policy.dtype: Input should be 'fp32', 'bf16' or 'fp16'"),
        ("optimizer.minibatches: 65", r"optimizer.minibatches \(65\) exceeds questions \(64\)"),
        ("optimizer.min_lr: 1.0e-5", r"min_lr \(1e-05\): a linear or cosine schedule falls to it from lr \("),
        ("optimizer.micro_batch_tokens: 100", "optimizer.micro_batch_tokens .* one sequence must fit"),
        ("rollout.max_tokens: 70000", "rollout.batch_tokens .* one sequence must fit"),
        ("objective.train_on: hard\nexperience.bucket_by: reward_deviation", "objective.train_on=hard is a band of"),
    ],
)
def test_bad_values_are_named(tmp_path, text, message):
    recipe = write(tmp_path, f"base: {DEFAULT_RUN}\n{text}")
    with pytest.raises(ConfigError, match=message) as error:
        load_recipe(recipe)
    assert str(recipe) in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not valid YAML"),
        ("base: recipe.yaml", "leads back to itself"),
        ("base: other.yaml", "other.yaml: no such recipe"),
        ("rollout: {servers: [5]}", r"rollout.servers.0: Input should be a valid string \(got 5\)"),
        ("policy: 5\ndata.train: d", r"policy: Input should be a valid mapping \(got 5\)"),
        (f"base: {DEFAULT_RUN}\nrollout.stop: x", r"rollout.stop: Input should be a valid list \(got 'x'\)"),
        ("policy: 5\npolicy.path: m", "policy is a section of keys, and not the value 5"),
        ("policy: [m]\npolicy.overrides: {rope_theta: 5}", r"policy is a section of keys, and not the value \['m'\]"),
        ("policy.overrides:\npolicy: {overrides: {a: 1}}", "overrides is a section of keys, and not the value None"),
        ("steps: 3", "policy is missing; data is missing"),
    ],
)
def test_recipes_that_cannot_be_read_are_named(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as error:
        load_recipe(write(tmp_path, text))
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--experience.rati", "0.3"], "unknown option --experience.rati; did you mean --experience.ratio?"),
        (["--rollout.sample=3"], "unknown option --rollout.sample; did you mean --rollout.samples?"),
        (["--max-tokens", "3"], "unknown option --max_tokens; did you mean --rollout.max_tokens?"),
        (["--recip", "r.yaml"], "unknown option --recip; did you mean --recipe?"),
        (["--reward", "math"], "--reward is a section: give one of its options, --reward.function, --reward.form, "),
        (["--optimizer.lr", "fast"], "--optimizer.lr"),
        (["--optimizer.lr=-1"], "command line: optimizer.lr: Input should be greater than 0"),
        (["--optimizer.minibatches", "65"], "exceeds questions"),
        (
            ["--data.train_weights", "1", "2"],
            "data.train_weights has 2 numbers and data.train 1 sources: give one number",
        ),
        (["--data.train_weights", "0"], "data.train_weights.0: Input should be greater than or equal to"),
        (["--data.test"], "data.test: Value should have at least 1 item"),
        (["--rollout.min_p", "0.1", "--rollout.servers", "http://a:1"], "which servers do not return: leave them out"),
        (["--rollout.top_p", "0.9", "--rollout.engine", "vllm"], "need rollout.top_k with vLLM"),
        (["--rollout.top_p", "0"], "rollout.top_p: Input should be greater than 0"),
        (["--rollout.min_p", "1"], "rollout.min_p: Input should be less than 1"),
    ],
)
def test_bad_options_are_told_in_one_line(capsys, arguments, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        parse_args(arguments)
    assert "\n" not in str(error.value)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["--rollout.max_tokens", "--rollout.max-tokens"])
def test_dashes_and_underscores_are_the_same(name):
    assert parse_args([name, "60"]).rollout.max_tokens == parse_args([f"{name}=60"]).rollout.max_tokens == 60


def test_help_explains_every_field_of_a_command_line_with_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    shown = capsys.readouterr().out
    leaves = [key for key in known_keys(Config) if "." in key or key in ("seed", "steps", "questions")]
    for key in IN_RECIPES:
        leaves.remove(key)
        assert key in shown
    for key in leaves:
        assert f"--{key}" in shown
    assert shown.count("(default:") >= len(leaves)


def test_an_option_that_was_stored_under_its_old_name_keeps_its_value():
    stored = configured().model_dump()
    stored["output"]["stories"] = stored["output"].pop("tracked_questions") + 3
    assert validate_stored(stored, "test").output.tracked_questions == 7
