"""Environments: the calculator, that of docs/environments.md, what can be wrong with one, and replies as tokens."""

import copy
import json
import re
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exgrpo.train.common.distributed import ALONE
from exgrpo.train.common.errors import ConfigError, DataError, RolloutError
from exgrpo.train.config.recipe import load_recipe
from exgrpo.train.config.rollout import EnvironmentConfig
from exgrpo.train.data.questions import Question
from exgrpo.train.reward.names import resolve_reward
from exgrpo.train.rollout.answers import RolloutWorker
from exgrpo.train.rollout.engine import Sampling
from exgrpo.train.rollout.stops import Stops
from exgrpo.train.rollout.turns.conversations import Conversations
from exgrpo.train.rollout.turns.environments import encoding, find_environment
from exgrpo.train.run.startup_checks import check_startup
from tests.tools.experience.runs import pretrained
from tests.train.configs import configured
from tests.train.rollout.turns.test_conversations import Ended, ids, read

PAGE = Path(__file__).parents[4] / "docs" / "environments.md"


@pytest.fixture
def guess(tmp_path):
    """The example of the page, as a file."""
    path = tmp_path / "guess.py"
    path.write_text(re.search(r"```python\n(# guess\.py\n.*?)```", PAGE.read_text(), re.DOTALL)[1])
    return path


class Reading:
    """A grader that gives the reward to the answers of this process."""

    def __init__(self, reward):
        self.reward, self.seen = reward, []

    def begin(self):
        return self

    def add(self, response, gold, question, reward, columns):
        self.seen.append((response, columns["turns"], self.reward(response, gold, turns=columns["turns"])))


def test_the_example_of_the_page_is_played(guess):
    options = EnvironmentConfig(function=f"{guess}:game")
    environment = find_environment(options)
    assert environment.stop == ("</guess>",)
    conversations = Conversations(environment, options, lambda text, closed: ids(text), read)
    script = Ended(["<guess>3</guess>", "<guess>4</guess>", "yes."], ["<guess>9</guess>", " right ."])
    grader = Reading(resolve_reward(f"{guess}:score"))
    rollout_worker = RolloutWorker(script, grader, read, ALONE, conversations=conversations)
    script.ranks, script.wake, script.sleep, script.counts = 1, lambda: None, lambda: None, lambda: None
    question = Question(0, (80,), "Guess.", "4", "mine", columns={"tries": 2})
    sampling = Sampling(200, stop=Stops((), read))
    produced = rollout_worker.produce([question], [2], sampling, seed=0)
    assert produced.spent.broken == 0
    right = ["<guess>3</guess>", " no, and 1 tries are left ", "<guess>4</guess>", " right ", "yes."]
    # What the policy writes itself does not count.
    wrong = ["<guess>9</guess>", " no, and 1 tries are left ", " right ."]
    assert sorted(grader.seen) == sorted([("".join(right)[:-1], right, 1.0), ("".join(wrong)[:-1], wrong, 0.0)])


def test_the_columns_that_environment_and_reward_take_are_kept(guess, tmp_path):
    data = tmp_path / "mine.jsonl"
    data.write_text(
        "".join(json.dumps({"question": f"q{i}", "answer": str(i), "tries": i, "x": 1}) + "\n" for i in (1, 2))
    )
    values = {
        "data": {"train": [str(data)]},
        "reward": {"function": f"{guess}:score", "workers": 1},
        "environment": {"function": f"{guess}:game"},
    }
    with ExitStack() as resources:
        (rows,) = check_startup(configured(values), resources).train
    assert [row.columns for row in rows] == [{"tries": 1}, {"tries": 2}]
    needy = guess.read_text().replace("tries=3", "lives")
    guess.write_text(needy)
    message = r"has no column 'lives', which the reward '.*guess\.py:score' or the environment '.*guess\.py:game' takes"
    with ExitStack() as resources, pytest.raises(DataError, match=message):
        check_startup(configured(values), resources)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("calculater", "unknown environment function 'calculater'; did you mean 'calculator'"),
        ("{folder}/none.py:game", "there is no file .*none.py"),
        ("{folder}/guess.py:gone", "there is no 'gone' in it"),
        ("{folder}/guess.py:score", r"environment '.*' must take \(question, gold\), and columns .* as keyword-only"),
    ],
)
def test_a_mistake_is_one_clear_error(guess, name, message):
    guess.write_text(guess.read_text().replace("def score(response, gold, *, turns)", "def score(response)"))
    with pytest.raises((ConfigError, ValueError), match=message):
        find_environment(EnvironmentConfig(function=name.format(folder=guess.parent)))


@pytest.mark.parametrize(("body", "cause"), [("return 7", "it gave 7, which cannot"), ("return {}[gold]", "KeyError")])
def test_an_environment_that_cannot_begin_is_one_clear_error(tmp_path, body, cause):
    (tmp_path / "mine.py").write_text(f"def game(question, gold):\n    {body}\n")
    environment = find_environment(EnvironmentConfig(function=f"{tmp_path}/mine.py:game"))
    with pytest.raises(RolloutError, match=f"environment '.*mine.py:game' cannot begin an answer to 'Guess.': {cause}"):
        environment.begin(Question(0, (80,), "Guess.", "4", "mine"))


def test_several_processes_of_one_engine_are_refused(tmp_path):
    recipe = tmp_path / "run.yaml"
    recipe.write_text(
        "policy: {path: builtin:arithmetic}\ndata: {train: builtin:arithmetic, train_limit: 9}\n"
        "environment: {function: calculator}\nrollout: {engine: vllm, tensor_parallel: 2}\n"
    )
    with pytest.raises(ConfigError, match=r"environment\.function needs rollout\.tensor_parallel=1"):
        load_recipe(recipe)


def reply(turn):
    environment = find_environment(EnvironmentConfig(function="calculator"))
    assert environment.stop == ("=",)
    return environment.function("question", "gold")(turn)


OPERATIONS = st.tuples(st.sampled_from("+-*/"), st.integers(0, 999))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 999), st.lists(OPERATIONS, max_size=4), st.sampled_from(["", "first 7 and ", "12 + 3: ", "<b>"]))
def test_it_writes_the_value_of_the_expression_before_the_sign(first, operations, before):
    text = str(first) + "".join(f" {operator} {number}" for operator, number in operations)
    exact = "".join(f" {operator} Fraction({number})" for operator, number in operations)
    try:
        value = eval(f"Fraction({first}){exact}", {"Fraction": Fraction})
    except ZeroDivisionError:
        value = None
    expected = None if value is None or value.denominator != 1 else str(value)
    assert reply(f"{before}{text} =") == (None if expected is None else f" {expected}")
    assert reply(f"{before}{text} = ") == expected
    assert reply(f"{before}{text}=") == expected


@pytest.mark.parametrize("turn", ["", "=", "x =", "2 + =", "(1 + 2 =", "so it is 4", "9 ** 9 =", "1 2 =", "9 " * 300])
def test_there_is_no_reply_to_what_is_no_expression(turn):
    assert reply(turn) is None


def test_a_product_of_many_large_numbers_is_quick():
    assert reply(" * ".join(["999999"] * 20) + " =") == f" {999999**20}"


CHATML = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def tokenizer():
    own = copy.deepcopy(pretrained().tokenizer)
    own.chat_template = CHATML
    return own


def tokens_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("text", ["12 + 3", "", "no: 15"])
def test_a_conversation_is_what_the_template_writes_of_it(tokenizer, text, closed):
    encode = encoding(EnvironmentConfig(role="user"), tokenizer, (tokenizer.eos_token_id,))
    turns = [{"role": "user", "content": "What is 7 + 8?"}, {"role": "assistant", "content": "7 + 8 = 15"}]
    prompt = tokens_of(tokenizer, tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True))
    said = [*tokens_of(tokenizer, "7 + 8 = 15"), *([tokenizer.eos_token_id] if closed else [])]
    whole = tokenizer.apply_chat_template(
        [*turns, {"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    assert [*prompt, *said, *encode(text, closed).tolist()] == tokens_of(tokenizer, whole)


def test_text_stands_as_it_is(tokenizer):
    encode = encoding(EnvironmentConfig(), tokenizer, (tokenizer.eos_token_id,))
    for closed in (True, False):
        found = encode(" 15", closed)
        assert found.dtype == np.int32
        assert tokenizer.decode(found) == " 15"


def test_a_template_that_closes_an_answer_otherwise_is_refused(tokenizer):
    tokenizer.chat_template = CHATML.replace("+ eos_token", "+ ', '")
    with pytest.raises(ConfigError, match=r"environment\.role: the chat template closes an answer with"):
        encoding(EnvironmentConfig(role="user"), tokenizer, (tokenizer.eos_token_id,))
    tokenizer.chat_template = "{% if messages | length > 2 %}{{ raise_exception('two at most') }}{% endif %}x"
    with pytest.raises(ConfigError, match=r"refuses messages of tool: .*two at most"):
        encoding(EnvironmentConfig(role="tool"), tokenizer, (tokenizer.eos_token_id,))
