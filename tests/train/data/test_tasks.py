"""What holds for every built-in task, its splits, difficulties, reward and model; the problems of the default run."""

import inspect
from hashlib import sha256

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from exgrpo.train.common.errors import DataError
from exgrpo.train.common.functions import find_module, model_names, module_names
from exgrpo.train.config.recipe import load_recipe
from exgrpo.train.data import tasks
from exgrpo.train.data.files import TASKS
from exgrpo.train.data.tasks import split_of_key
from exgrpo.train.data.tasks.arithmetic import LEVELS, _canonical, generate, worked_solution
from exgrpo.train.reward import grading
from exgrpo.train.reward.names import resolve_reward

NAMES = module_names(TASKS, "generate")
SPLITS = ("pretrain", "train", "test")
DIFFICULTIES = (1, 2, 3, 4)


@pytest.fixture(params=NAMES)
def task(request):
    return find_module(TASKS, request.param, "generate")


def meaning(problem):
    """The same for two problems that differ by order alone: of numbers, of edges, of the ends of an edge."""
    if expression := getattr(problem, "expression", None):
        first, operator, second, *rest = expression.split()
        operands = sorted([first, second]) if operator in "+*" and rest[:1] != ["*"] else [first, second]
        return (operator, *operands, *rest)
    first, *rest = problem.answer.split()
    return first, *sorted("".join(sorted(word)) if word.isalpha() else word for word in rest)


def test_every_task_has_a_model():
    assert model_names() == NAMES


def test_the_seed_decides(task):
    assert task.generate("train", 50, 1) == task.generate("train", 50, 1)
    assert task.generate("train", 50, 1) != task.generate("train", 50, 2)
    default = inspect.signature(task.generate).parameters["difficulty"].default
    assert task.generate("train", 50, 1) == task.generate("train", 50, 1, difficulty=default)


@pytest.mark.parametrize("difficulty", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3, 4))])
def test_every_difficulty_has_enough_problems(task, difficulty):
    problems = task.generate("train", 6000, 0, difficulty=difficulty)
    assert len({problem.question for problem in problems}) == 6000


@pytest.mark.parametrize("difficulty", [1, 4, None])
def test_splits_share_nothing_not_even_in_another_order(task, difficulty):
    given = {} if difficulty is None else {"difficulty": difficulty}
    problems = {split: task.generate(split, 600, 0, **given) for split in SPLITS}
    seen = {split: set(map(meaning, of_split)) for split, of_split in problems.items()}
    assert {len({problem.question for problem in of_split}) for of_split in problems.values()} == {600}
    assert hasattr(problems["test"][0], "expression") or {len(of_split) for of_split in seen.values()} == {600}
    assert not seen["pretrain"] & seen["train"]
    assert not seen["pretrain"] & seen["test"]
    assert not seen["train"] & seen["test"]


@pytest.mark.parametrize("difficulty", [0, 5, -1])
def test_an_unknown_difficulty_is_a_clear_error(task, difficulty):
    with pytest.raises(DataError, match=f"difficulty is one of 1, 2, 3, 4, not {difficulty}"):
        task.generate("train", 1, 0, difficulty=difficulty)
    with pytest.raises(DataError, match="there is no split 'validation'; there is pretrain, train, test"):
        task.generate("validation", 1, 0)


def test_too_many_problems_is_a_clear_error(task, monkeypatch):
    monkeypatch.setattr(tasks, "DRAWS_PER_PROBLEM", 1)
    with pytest.raises(DataError, match="the test split has too few different problems for a count of 500: ask for"):
        task.generate("test", 500, 0)


def test_the_model_answers_in_the_format_and_some_of_the_time_right(task):
    reward = resolve_reward(task.REWARD)
    recipe = load_recipe(task.MODEL_FOLDER / "recipe.yaml")
    assert recipe.reward.function is None, "the task brings its own"
    assert sum(file.stat().st_size for file in task.MODEL_FOLDER.iterdir()) < 4e6
    tokenizer = AutoTokenizer.from_pretrained(task.MODEL_FOLDER)
    model = AutoModelForCausalLM.from_pretrained(task.MODEL_FOLDER)
    problems = task.generate("test", 128, 11)
    tokenizer.padding_side = "left"
    messages = [[{"role": "user", "content": problem.question}] for problem in problems]
    padded = {"padding": True, "return_tensors": "pt", "return_dict": True}
    prompts = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **padded)
    torch.manual_seed(0)
    output = model.generate(**prompts, do_sample=True, max_new_tokens=recipe.rollout.max_tokens)
    texts = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    assert sum("\\boxed{" in text and text.endswith("}") for text in texts) > 0.9 * len(texts)
    rewards = [reward(text, problem.answer) for text, problem in zip(texts, problems, strict=True)]
    assert 0 < sum(rewards) < len(rewards)


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_questions_fit_and_survive_the_tokenizer(task, difficulty):
    tokenizer = AutoTokenizer.from_pretrained(task.MODEL_FOLDER)
    for problem in task.generate("train", 100, 5, difficulty=difficulty):
        messages = [{"role": "user", "content": problem.question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert len(prompt) <= task.MAX_PROMPT_TOKENS
        assert problem.question in tokenizer.decode(prompt)
    for text in ("Grüße, 数学!\n\t x≠y", "</think> then \\boxed{12}"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


@pytest.mark.parametrize("name", ["", "nothing", "files", "questions", "..pool", "math:math", "arithmetic.generate"])
def test_what_is_no_task_is_not_found(name):
    assert find_module(TASKS, name, "generate") is None


@pytest.mark.parametrize("split", SPLITS)
def test_answers_are_right_and_problems_differ(split):
    problems = generate(split, 600, seed=3)
    assert len({problem.expression for problem in problems}) == 600
    assert {problem.level for problem in problems} == set(LEVELS)
    for problem in problems:
        assert problem.expression in problem.question
        assert int(problem.answer) == eval(problem.expression, {"__builtins__": {}}) >= 0
        assert split_of_key(_canonical(problem.expression)) == split


def test_the_default_problems_stay_those_that_the_shipped_model_was_made_from():
    digest = sha256()
    for split in SPLITS:
        for seed in (0, 7):
            problems = [(p.question, p.answer, p.expression, p.level) for p in generate(split, 1000, seed)]
            digest.update(repr(problems).encode())
    assert digest.hexdigest() == "bad2743232b521c8fbee582cc1c65d87ea804c355b3f21d1b006b5a0736d19db"


def test_a_greater_difficulty_has_higher_levels():
    levels = [[p.level for p in generate("train", 400, 3, difficulty=difficulty)] for difficulty in (1, 2, 3, 4)]
    means = [sum(of_difficulty) / 400 for of_difficulty in levels]
    assert means == sorted(means)
    assert [set(of_difficulty) for of_difficulty in levels] == [{1, 2}, set(LEVELS), set(LEVELS), {3, 4}]


@given(st.integers(0, 10_000))
def test_worked_solutions_are_right_and_those_with_slips_follow_from_them(seed):
    (problem,) = generate("train", 1, seed=seed)
    solution = worked_solution(problem.expression)
    assert grading.math(solution, problem.answer) == 1.0
    for column in solution.removeprefix("<think>").split("</think>")[0].replace("; ", ", ").split(", "):
        left, _, right = column.split(": ")[-1].partition(" = ")
        assert eval(left, {"__builtins__": {}}) == int(right)
    # A slip in every column shows in some column, whatever becomes of the result.
    assert worked_solution(problem.expression, lambda: True) != solution
