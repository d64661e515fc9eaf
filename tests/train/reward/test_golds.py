"""Gold answers that no response can earn."""

import json

import pytest

from exgrpo.train.config.options import RewardConfig
from exgrpo.train.data.selection import unearnable
from exgrpo.train.reward.pool import Grader
from tests.train.reward.test_grading import SHARED_DATA, published

SOUND = ["72", "-3.5", "1,000", "3/4", "\\frac{3}{4}", "$69$, $84$", "[0, 1)", "50\\%", "(C)", "x^2 + 1", "\\boxed{5}"]
WORDLESS = ["proof", "Proof", "notfound", "NaN", "nan", "None", "N/A", ""]


def test_what_says_that_there_is_no_answer_and_what_no_box_can_hold_is_never_earned():
    broken = ["\\frac{1}{2", "{", "1}"]
    assert unearnable([*SOUND, *WORDLESS, *broken, *SOUND], RewardConfig()) == {*WORDLESS, *broken}


@pytest.mark.parametrize(
    ("form", "lost"),
    [("boxed", []), ("tags", []), ("line", ["a\nb", "x" * 400]), ("hashes", ["a\nb", "x" * 400, "x + y", "(C)"])],
)
def test_a_gold_answer_has_to_fit_the_form_that_is_read(form, lost):
    others = ["x + y", "a\nb", "x" * 400, "(C)"]
    found = unearnable(["72", "1,000", "3/4", "\\frac{3}{4}", *others], RewardConfig(form=form))
    assert found == set(lost)


@pytest.mark.parametrize("form", ["auto", "boxed", "tags", "line", "hashes"])
def test_what_is_left_can_be_earned(form):
    """By a grader of a run, from the least response in that form."""
    written = {"tags": "<answer>%s</answer>", "line": "Answer: %s", "hashes": "#### %s"}.get(form, "\\boxed{%s}")
    decimals = {"3/4": "0.75", "\\frac{3}{4}": "0.75", "50\\%": "50"} if form == "hashes" else {}
    earnable = [gold for gold in SOUND if gold not in unearnable(SOUND, RewardConfig(form=form))]
    assert "\\frac{3}{4}" in earnable
    if form == "hashes":  # digits alone
        earnable = [gold for gold in earnable if gold in ("72", "-3.5", "1,000", *decimals)]
    with Grader.of(["math_no_think"], RewardConfig(form=form, workers=1)) as grader:
        given = [(f"So it is\n{written % decimals.get(gold, gold)}", gold) for gold in earnable]
        assert grader.grade(given).reward == (1.0,) * len(earnable)


@pytest.mark.skipif(not SHARED_DATA.exists(), reason=f"{SHARED_DATA} is not there")
def test_published_gold_answers_can_be_earned_but_for_four_that_cannot_be_read():
    rows = [json.loads(line) for line in (SHARED_DATA / "gsm8k_train.jsonl").open()]
    of_gsm8k = [row["answer"].rpartition("####")[2].strip() for row in rows]
    unread = {
        "np.arcsin(10/13)",
        r"\frac{dM}{dt}=\frac{10^{5} L_{\odot}}{0.007 c^{2} M_{\odot}^{6}} M^{6}",
        "$t(0,4]$",
        r"$m_{\max }=n^{2}-n-1$",
    }
    found = unearnable([*of_gsm8k, *published("math_benchmarks")], RewardConfig())
    assert found == unread  # only their own text would be right
