"""Questions and verifiers of reasoning-gym, with the real package."""

import json

import pytest

from exgrpo.train.common.distributed import ALONE
from exgrpo.train.common.errors import DataError
from exgrpo.train.config.options import RewardConfig
from exgrpo.train.data import gym
from exgrpo.train.data.files import from_hub, read_rows
from exgrpo.train.reward.form import Graded, elsewhere
from exgrpo.train.reward.pool import Grader
from exgrpo.train.reward.worker import hashed

MADE = gym._made
SOURCE = "reasoning_gym:countdown?max_numbers=3&min_numbers=3"


def rows(source, split="train", limit=20, seed=0):
    return read_rows(source, split=split, limit=limit, seed=seed)


def test_a_missing_package_is_named_with_the_extra(monkeypatch):
    monkeypatch.setattr(gym, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"countdown: .* reasoning-gym: pip install 'exgrpo\[tasks\]'"):
        rows("reasoning_gym:countdown")


def test_a_source_needs_a_limit_and_a_known_split():
    with pytest.raises(DataError, match="needs a limit"):
        rows(SOURCE, limit=None)
    with pytest.raises(DataError, match="there is no split 'validation'; there is train, test"):
        rows(SOURCE, split="validation")
    assert not from_hub(SOURCE)


reasoning_gym = pytest.importorskip("reasoning_gym", reason="the extra `tasks` is not installed")


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Questions are made in this process, which has imported the package."""
    monkeypatch.setattr(gym, "_made", lambda _, order: gym.reply(order))


def test_arguments_shape_the_questions():
    found = rows(SOURCE)
    assert len(found) == len({row.question for row in found}) == 20
    assert {(row.source, row.reward) for row in found} == {(SOURCE, gym.REWARD)}
    assert all(
        len(json.loads(row.gold)["entry"].partition("'numbers': [")[2].partition("]")[0].split(",")) == 3
        for row in found
    )
    assert rows(SOURCE) == found != rows(SOURCE, seed=1)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("reasoning_gym:countdwn", "reasoning-gym has no data set 'countdwn'; did you mean reasoning_gym:countdown?"),
        ("reasoning_gym:countdown?max_number=4", "unknown argument 'max_number'; did you mean 'max_numbers'?"),
        ("reasoning_gym:countdown?seed=4", "unknown argument 'seed'"),
        ("reasoning_gym:countdown?max_numbers=four", "max_numbers: Input should be a valid integer (got 'four')"),
        ("reasoning_gym:countdown?max_numbers=2", "reasoning-gym refuses the arguments: max_numbers must be >= min_"),
        ("reasoning_gym:composite", "reasoning-gym refuses the arguments: Must specify at least one dataset"),
    ],
)
def test_what_is_wrong_is_named(source, message):
    with pytest.raises(DataError) as error:
        rows(source)
    assert str(error.value).startswith(f"{source}: ")
    assert message in str(error.value)


def test_the_splits_share_no_question_even_where_there_are_few_and_too_few_are_told():
    """Some tosses of a coin make so few questions that the draws of both splits hold equal ones."""
    source = "reasoning_gym:coin_flip?min_trials=3&max_trials=6"
    train, test = (
        {row.question for row in rows(source, split, 4, seed)} for split, seed in (("train", 0), ("test", 1))
    )
    assert all(gym.in_split(question, "train") and not gym.in_split(question, "test") for question in train)
    assert not train & test
    with pytest.raises(DataError, match=r"only [0-9]+ different questions in the test split, and the limit is 500"):
        rows(source, "test", 500)


def test_every_process_has_the_same_questions(monkeypatch):
    """word_ladder walks through sets of texts, whose order depends on PYTHONHASHSEED."""
    monkeypatch.setattr(gym, "_made", MADE)
    found = []
    for seed in ("1", "12345"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        found.append(rows("reasoning_gym:word_ladder", limit=5))
    assert found[0] == found[1]


def test_the_verifier_takes_the_answer_from_what_follows_the_thinking():
    """Those of arc_agi tell tuples from lists."""
    with Grader(gym.REWARD, workers=1, time_limit=60) as grader:
        for name in ("countdown", "arc_agi", "word_ladder", "spell_backward"):
            (row,) = rows(f"reasoning_gym:{name}", limit=1)
            answer = json.loads(row.gold)["answer"]
            responses = {
                f"<think>hm</think>\n{answer}\n": True,
                f"<think>hm</think>It is \\boxed{{{answer}}}.": True,
                f"\\boxed{{{answer}}}": True,
                f"\\boxed{{nothing}}</think>{answer}": True,
                f"<think>hm</think>\n<answer>{answer}</answer>": True,
                f"<answer>no</answer> \\boxed{{no}} <answer>\n{answer}\n</answer> \\boxed{{no}}": True,
                f"<answer>{answer}</answer><answer>no</answer>": False,
                f"<answer>{answer}</answer></think>": False,
                f"\\boxed{{{answer}}}</think>\\boxed{{nothing}}": False,
                f"<think>hm</think>\\boxed{{{answer}": False,
                f"{answer}</think>": False,
            }
            grades = grader.grade([(response, row.gold) for response in responses])
            assert [reward == 1.0 for reward in grades.reward] == list(responses.values()), name
            assert grades.failed == 0
            assert set(grades.key[:6]) == {hashed(" ".join(answer.split()))}
            assert grades.key[-2:] == (0, 0)
        stated = Graded(f"Answer: {answer}", row.gold, gym.REWARD)
        assert elsewhere(RewardConfig(workers=1, time_limit=60), [stated], ALONE) == ("line", 1)
        (row,) = rows("reasoning_gym:prime_factorization", limit=1)
        grades = grader.grade([("no number", row.gold)])
        assert (grades.reward, grades.failed) == ((0.0,), 0), "what a verifier cannot read is wrong and no failure"
