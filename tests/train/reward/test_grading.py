"""The grades of several hundred answers, by families, and the form that the rewards ask for."""

from pathlib import Path

import pyarrow.parquet
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exgrpo.train.reward import grading
from exgrpo.train.reward.notation import understand

CASES = Path(__file__).with_name("grading_cases.txt")
WORTH = {"right": 1.0, "wrong": 0.0, "refused": 0.0, "accepted": 1.0}
SHARED_DATA = Path(__file__).parents[4] / "shared" / "data"


def cases():
    """Of each family: verdict, gold, response, and whether it is graded with thinking."""
    families = {}
    for line in CASES.read_text().splitlines():
        if line.startswith("["):
            family, _, kind = line.strip("[]").partition(": ")
            families[family] = []
        elif line and not line.startswith("#"):
            verdict, _, case = line.partition(" ")
            gold, response = (part.strip(" ") for part in f"{case} ".split(" ::"))
            response = response.replace("⏎", "\n") if kind else f"So it is $\\boxed{{{response}}}$."
            families[family].append((verdict, gold, response, kind == "thinking"))
    return families


@pytest.mark.parametrize("family", cases())
def test_grades(family):
    table = cases()[family]
    assert {"right", "wrong"} <= {verdict for verdict, *_ in table} <= set(WORTH)
    off = [
        f"{verdict} {gold} :: {response}"
        for verdict, gold, response, thinking in table
        if (grading.math if thinking else grading.math_no_think)(response, gold) != WORTH[verdict]
    ]
    assert off == []


def test_the_grade_depends_on_the_final_answer_alone():
    table = [case for family in cases().values() for case in family if not case[3]]
    for _, _, response, _ in table:
        answer = grading.final_answer(response)
        assert grading.final_answer(answer) == answer
    for verdict, gold, response, _ in table[::4]:
        assert grading.math_no_think(grading.final_answer(response), gold) == WORTH[verdict]


@example("\\boxed{ and } and \\boxed{}")
@given(st.text(alphabet="ab\\{} $,\n5") | st.lists(st.sampled_from(["\\boxed{", "}", " and ", "5", "x"])).map("".join))
def test_final_answer_is_idempotent_and_decides(text):
    answer = grading.final_answer(text)
    assert grading.final_answer(answer) == answer
    assert grading.math_no_think(text, "5") == grading.math_no_think(answer, "5")


@given(st.integers(-(10**12), 10**12), st.integers(-3, 3))
def test_integers_are_graded_as_math_verify_grades_them(gold, difference):
    from math_verify import parse, verify

    answer = gold + difference
    expected = verify(parse(f"${gold}$"), parse(f"$\\boxed{{{answer}}}$"))
    assert grading.math_no_think(f"\\boxed{{{answer}}}", str(gold)) == float(expected)


def published(name):
    """The gold answers of a data set."""
    path = SHARED_DATA / f"{name}.parquet"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    column = pyarrow.parquet.read_table(path, columns=["reward_model"])["reward_model"].to_pylist()
    return sorted({row["ground_truth"] for row in column})


@pytest.mark.parametrize("name", ["math_benchmarks", "arc_challenge"])
def test_real_gold_answers_equal_themselves_also_when_parsed(name):
    golds = published(name)
    assert all(grading.math(f"</think>\\boxed{{{gold}}}", gold) == 1.0 for gold in golds)
    # Without its dollar signs and with a full stop it is another text, so this goes through the parser.
    sample = golds[::4]
    parsed = [grading.math(f"</think>\\boxed{{{_restyled(gold)}}}", gold) for gold in sample]
    assert sum(parsed) >= 0.98 * len(sample)


def _restyled(gold):
    return gold.replace("\\$", "").replace("$", "").replace("\\frac", "\\dfrac").rstrip(".") + "."


def test_a_gold_answer_is_right_when_it_is_stated_without_a_box():
    golds = published("math_benchmarks")
    refused = [gold for gold in golds if grading.math_no_think(f"The answer is {gold}", gold) != 1.0]
    # A sentence of its own, which is read up to the first comma.
    assert [gold for gold in refused if "where" not in gold] == []
    assert len(refused) <= 1


SAYS_NONE = ["", " ", "None", "nan", "N/A", "n/a.", "proof", "Not found", "\\text{None}", "null"]
READABLE = ["no solution", "0", "N", "nano", "\\emptyset", "C", "3 hours 20 minutes", "yes"]
UNREADABLE = ["7 2", "\\frac{1}{0}", "\\frac{1}{", "f''(x)'", "1 +"]


@pytest.mark.parametrize("gold", [*SAYS_NONE, *READABLE, *UNREADABLE])
def test_a_gold_answer_that_says_that_there_is_none_and_one_that_can_be_read(gold):
    assert grading.no_answer(gold) == (gold in SAYS_NONE)
    assert grading.readable_gold(gold) == (gold in READABLE)
    assert gold not in SAYS_NONE or grading.math_no_think(f"\\boxed{{{gold}}}", gold) == 0.0


HAS_FORM = (
    *("\\boxed{5}", "So $x = \\boxed{\\frac{1}{2}}$, I think.", "\\boxed{anything at all}", "#### 5"),
    *("The answer is 5.", "The answer is 72 clips.", "**Answer:** $\\frac{1}{2}$", "The answer is Evelyn."),
    "The correct answer is option C.",
)
HAS_NONE = (
    *("", "5", "$5$", "\\boxed{}", "\\boxed{ }", "\\boxed{5", "\\boxed{5} and \\boxed{6", "We add 2 and 3 and get 5"),
    *("2 + 3 = 5", "I do not know the answer", "The answer is"),
    "The answer is one of those that nobody could ever find without a table of 5 logarithms",
)


@pytest.mark.parametrize("response", HAS_FORM + HAS_NONE)
def test_form(response):
    form = float(response in HAS_FORM)
    for gold in ("5", "6", "\\text{Evelyn}"):
        assert grading.math_no_think_form(response, gold) == form
        assert grading.math_form(f"<think>\\boxed{{7}}</think>\n{response}", gold) == form
        assert grading.math_form(response, gold) == 0.0
        assert grading.math_form(f"<think>{response}", gold) == 0.0
        assert grading.math_form(f"<think>{response}</think>", gold) == 0.0


@pytest.mark.parametrize("text", ["1,", "ab ", "\\text{a} ", "x'", "^", "**", "1.(", "{\\choose ", "\\quad ", "km/h "])
def test_a_long_box_is_taken_apart_in_linear_time(text):
    assert understand(text * (200_000 // len(text))) is not None


@pytest.mark.parametrize("text", [" ", "answer ", "answer is ", "$", "$1 ", "\\(", "#", "a ", "1 ", ",", "{", "5 , "])
def test_long_nonsense_is_read_in_linear_time(text):
    # The trainer's own process reads it, without a time limit: what is not linear hangs here.
    for begin in ("", "The answer is 5"):
        nonsense = begin + text * (400_000 // len(text))
        assert grading.math_no_think_form(nonsense, "5") in (0.0, 1.0)
        assert len(grading.final_answer(nonsense)) <= len(nonsense) + len("\\boxed{}")
