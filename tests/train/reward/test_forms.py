"""The forms in which answers are written, beside the functions of the projects whose forms they are."""

from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.train.common.distributed import ALONE
from exgrpo.train.common.errors import RewardError
from exgrpo.train.config.options import RewardConfig
from exgrpo.train.data.prompts import PROMPTS
from exgrpo.train.data.tasks import countdown
from exgrpo.train.reward.form import Graded, elsewhere, tell
from exgrpo.train.reward.grading import AUTO, FORMS, math, math_form, math_no_think, math_no_think_form
from exgrpo.train.reward.pool import Grader
from tests.train.reward.conftest import grade

MARKS = ("<answer>", "</answer>", "#### ", "Answer: ", "answer:", "\\boxed{", "1,234", "-7", *"{}x. \n")
TEXTS = st.lists(st.sampled_from(MARKS)).map("".join)
RIGHT = {
    "boxed": "So it is $\\boxed{72}$.",
    "tags": "<answer> 72 </answer>",
    "hashes": "6 * 12 = 72\n#### 72",
    "line": "6 * 12 is it.\nAnswer: 72",
}


@cache
def verl(name):
    """A file of verl's rewards, without what verl itself imports, ray among it."""
    if find_spec("verl") is None:
        pytest.skip("verl is not installed")
    file = Path(find_spec("verl").submodule_search_locations[0], "utils", "reward_score", f"{name}.py")
    spec = spec_from_file_location(f"of_verl_{name}", file)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_option_names_all_forms():
    assert set(RewardConfig.model_fields["form"].annotation.__args__) == {AUTO, *FORMS} == {AUTO, *RIGHT}


@given(TEXTS)
def test_tags_are_read_as_reasoning_gym_reads_them(text):
    gym = pytest.importorskip("reasoning_gym.utils", reason="the extra `tasks` is not installed")
    assert FORMS["tags"].read(text) == gym.extract_answer(text)


@given(TEXTS | st.integers(250, 350).map(lambda long: f"#### 5 #### 6 {'y' * long}"))
def test_hashes_are_read_as_verl_reads_gsm8k(text):
    of_verl = verl("gsm8k")
    assert FORMS["hashes"].read(text) == of_verl.extract_solution(text)


@given(TEXTS | st.integers(250, 350).map(lambda long: f"Answer: 5\n{'x' * long}\nAnswer: 6 {'y' * long}"))
def test_lines_are_read_as_verl_reads_dapo(text):
    of_verl = verl("math_dapo")
    read = FORMS["line"].read(text)
    _, predicted = of_verl.is_correct_minerva(text[-300:], "0")
    assert of_verl.normalize_final_answer("[INVALID]" if read is None else read) == predicted


@given(TEXTS)
def test_the_last_box_is_read_as_verl_reads_math_but_for_boxes_that_are_joined(text):
    of_verl = verl("math_reward")
    boxed = of_verl.last_boxed_only_string(text)
    read = FORMS["boxed"].read(text)
    if boxed is None:
        assert not read
    else:
        assert read.endswith(of_verl.remove_boxed(boxed).strip())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("thinking", ["", "<think>\\boxed{1} <answer>2</answer>\n#### 3\nAnswer: 4</think>\n"])
def test_a_right_answer_earns_1_in_every_form_and_is_read_in_the_one_that_is_forced(form, thinking):
    response = thinking + RIGHT[form]
    reward, has_form = (math, math_form) if thinking else (math_no_think, math_no_think_form)
    assert reward(response, "72") == has_form(response, "72") == 1.0
    assert reward(response, "71") == 0.0
    for name, place in FORMS.items():
        alone = place.alone(response)
        assert (alone is not None and math_no_think(alone, "72") == 1.0) == (name == form), name
        assert (alone is not None and alone.startswith("</think>")) == (name == form and bool(thinking))


@pytest.mark.parametrize(
    ("response", "gold", "worth"),
    [
        ("<answer>5 apples</answer>", "5", 1.0),
        ("First 3.\n<answer>4</answer> is <answer>The answer is 5, since 2 + 3 = 5.</answer>", "5", 1.0),
        ("<answer>\n\\frac{1}{2}\n</answer>", "0.5", 1.0),
        ("<answer>$\\boxed{5}$</answer>", "5", 1.0),
        ("The answer is 4. <answer>5</answer>", "5", 1.0),
        ("The answer is 5. <answer>4</answer>", "5", 0.0),
        ("The answer is 5. <answer></answer>", "5", 0.0),
        ("<answer>(C)</answer>", "C", 1.0),
        ("<answer>B or C</answer>", "C", 0.0),
        ("<answer>5", "5", 0.0),
    ],
)
def test_what_stands_in_tags_is_graded_like_any_answer(response, gold, worth):
    assert math_no_think(response, gold) == worth


def test_generated_tasks_read_tags_too():
    for answer, worth in (("(5 - 3) * 4", 1.0), ("5 - 3 + 4", 0.0)):
        assert countdown.reward(f"<think>\\boxed{{1}}</think><answer>{answer}</answer>", "8 3 4 5") == worth


def test_a_forced_form_is_the_only_one_that_counts(tmp_path):
    (tmp_path / "mine.py").write_text("def score(response, gold):\n    return float(response == gold)\n")
    own = f"{tmp_path}/mine.py:score"
    config = RewardConfig(form="tags", workers=1, time_limit=60)
    with Grader.of(["math_no_think", own], config) as grader:
        grades = grader.grade([(response, "72") for response in RIGHT.values()])
        assert grades.reward == (0.0, 1.0, 0.0, 0.0)
        whole = grade(grader, own, [(RIGHT["boxed"], RIGHT["boxed"])])
        assert whole.reward == (1.0,), "the user's own functions get the whole response"
    answers = [Graded(response, "72", "math_no_think") for response in RIGHT.values()]
    assert tell("form", config, answers, ALONE) == [False, True, False, False]
    with pytest.raises(RewardError, match=r"reward\.form=tags applies .*mine\.py:score' always gets the whole"):
        Grader.of([own], config)


def test_right_values_in_other_forms_are_counted(tmp_path):
    (tmp_path / "mine.py").write_text("def score(response, gold):\n    return float(response == gold)\n")
    own = f"{tmp_path}/mine.py:score"
    config, world = RewardConfig(workers=1, time_limit=60), ALONE
    tags, boxed, both = RIGHT["tags"], RIGHT["boxed"], "\\boxed{71} <answer>72</answer>"
    of_own = [Graded(response, "72", own) for response in (tags, tags, boxed, "72", "<answer>71</answer>")]
    assert elsewhere(config, of_own, world) == ("tags", 2)
    assert elsewhere(config, [Graded(both, "72", "math_no_think")] * 3, world) == ("tags", 3)
    assert elsewhere(config, [Graded("\\boxed{71}", "72", "math_no_think")], world) == ("", 0)
    hashes = RewardConfig(form="hashes", workers=1, time_limit=60)
    assert elsewhere(hashes, [Graded(boxed, "72", "math_no_think")], world) == ("boxed", 1)
    assert elsewhere(config, [], world) == ("", 0)


def test_the_prompt_of_reasoning_gym_is_its_own():
    gym = pytest.importorskip("reasoning_gym.utils", reason="the extra `tasks` is not installed")
    assert PROMPTS["reasoning_gym"] == ("{question}", gym.SYSTEM_PROMPTS["default"])
