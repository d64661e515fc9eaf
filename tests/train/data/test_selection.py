"""The rows that are trained on: those whose gold answer can be earned, one for each question."""

import json
from contextlib import ExitStack

import pytest

from exgrpo.tools import dry_run
from exgrpo.train.common.errors import DataError
from exgrpo.train.config.options import RewardConfig
from exgrpo.train.data.selection import unearnable
from exgrpo.train.reward.pool import Grader
from exgrpo.train.run.startup_checks import check_startup
from tests.train.configs import configured
from tests.train.files import write_rows
from tests.train.reward.test_grading import SHARED_DATA, published

SYSTEM = {"role": "system", "content": "Be brief."}


def write(path, *rows):
    return write_rows(path, rows)


def asked(question, answer="1", **more):
    return {"question": question, "answer": answer, **more}


def checked(train, test=None, *, reward="math_no_think", **data):
    """What the startup checks find, and its lines of a dry run."""
    values = {"train": train, "test": test, "train_limit": None, "test_limit": None, **data}
    config = configured({"data": values, "reward": {"function": reward, "workers": 1}})
    with ExitStack() as resources:
        found = check_startup(config, resources)
        return found, dry_run.plan(config, found, None, 1)


def questions(found):
    return [[(row.question, row.gold) for row in rows] for rows in found.train]


BAD = [asked("b", "proof"), asked("c", None), asked("d", ""), asked("e", "\\frac{1}{2"), asked("f", "N/A")]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_whose_gold_answer_cannot_be_earned_are_told_and_left_out(tmp_path, suffix):
    path = write(tmp_path / f"mine.{suffix}", asked("a"), *BAD, asked("g", "#### 5"))
    found, plan = checked(path)
    assert questions(found) == [[("a", "1"), ("g", "5")]]
    place = f"{path} {'row' if suffix == 'parquet' else 'line'} 2"
    begin = f"5 of 7 gold answers cannot be read or can never be earned, the first, 'proof', in {place}: "
    line = f"{begin}their rows are left out; --data.keep_unreadable True trains on them"
    assert found.notes == (line,)
    assert line in plan
    kept, plan = checked(path, keep_unreadable=True)
    assert len(kept.train[0]) == 7
    assert kept.notes == (f"{begin}they are trained on",)


def test_without_a_gold_answer_there_is_nothing_to_train_on(tmp_path):
    sound, bad = write(tmp_path / "a.jsonl", asked("a")), write(tmp_path / "b.jsonl", *BAD)
    with pytest.raises(DataError, match=r"b.jsonl' has no gold answer that can be earned: 5 of 6 .*--data.columns"):
        checked([sound, bad])
    assert [len(rows) for rows in checked([sound, bad], keep_unreadable=True)[0].train] == [1, 5]


def test_only_a_reward_of_its_own_knows_what_it_reads(tmp_path):
    (tmp_path / "mine.py").write_text("def score(response, gold):\n    return 1.0\n")
    path = write(tmp_path / "mine.jsonl", asked("a"), *BAD)
    found, _ = checked(path, reward=f"{tmp_path}/mine.py:score")
    assert [gold for _, gold in questions(found)[0]] == ["1", "proof", "\\frac{1}{2", "N/A"]
    assert found.notes[0].startswith("2 of 6 gold answers")


def test_held_out_rows_stay_and_count_as_wrong(tmp_path):
    train, test = write(tmp_path / "a.jsonl", asked("x")), write(tmp_path / "b.jsonl", asked("a"), *BAD, asked("a"))
    found, plan = checked(train, test)
    assert len(found.held_out["test"][0]) == 7
    assert found.notes == (
        f"test: 5 of 7 gold answers cannot be read or can never be earned, the first, 'proof', in {test} line 2: "
        "answers to them count as wrong",
    )
    assert found.notes[0] in plan


def test_rows_that_ask_the_same_are_one_question(tmp_path):
    rows = [asked(f"q{i}", str(i), level=j) for j in range(20) for i in range(20)]
    found, plan = checked(write(tmp_path / "mine.jsonl", *rows))
    assert questions(found) == [[(f"q{i}", str(i)) for i in range(20)]]
    assert found.counted == "400 rows, "
    assert any("there are 400 rows, 20 questions, before over-long ones are left out" in line for line in plan)
    once, _ = checked(write(tmp_path / "once.jsonl", *rows[:20]))
    assert (once.counted, once.notes, found.notes) == ("", (), ())


def test_what_differs_in_turns_system_message_gold_answer_or_a_column_that_is_taken_is_another_question(tmp_path):
    turns = [{"role": "user", "content": "A number?"}, {"role": "assistant", "content": "6"}]
    last = {"role": "user", "content": "q"}
    rows = [asked("q"), *map(asked, ([last], [*turns, last], [SYSTEM, last])), asked("q", "2"), asked("q", tests=[2])]
    path = write(tmp_path / "mine.jsonl", *rows, *rows)

    def golds(**options):
        return [(len(row.turns), row.system, row.gold) for row in checked(path, **options)[0].train[0]]

    assert golds() == [(0, None, "1"), (2, None, "1"), (0, None, "2")]
    assert golds(keep_system=True) == [(0, None, "1"), (2, None, "1"), (0, "Be brief.", "1"), (0, None, "2")]
    (tmp_path / "mine.py").write_text("def score(response, gold, *, tests=None):\n    return 1.0\n")
    (of_tests,) = checked(path, reward=f"{tmp_path}/mine.py:score")[0].train
    assert [row.columns for row in of_tests] == [{}, {}, {}, {"tests": [2]}]


def test_a_question_of_two_sources_belongs_to_the_first_unless_they_ask_in_another_way(tmp_path):
    a = write(tmp_path / "a.jsonl", asked("p"), asked("q"))
    b = write(tmp_path / "b.jsonl", asked("q"), asked("r"), asked("r"))
    c = write(tmp_path / "c.jsonl", asked("r"), asked("p"))

    def of_sources(*sources, **options):
        found, plan = checked(list(sources), **options)
        texts = [[row.question for row in rows] for rows in found.questions]
        assert any(f"there are {found.counted}{sum(map(len, texts))} questions" in line for line in plan)
        return texts, found.counted

    assert of_sources(a, b) == ([["p", "q"], ["r"]], "5 rows, ")
    assert of_sources(a, b, c) == ([["p", "q"], ["r"], []], "7 rows, ")
    assert of_sources(a, c) == ([["p", "q"], ["r"]], "4 rows, ")
    other = [{"source": b, "prompt_format": "{question}!"}]
    assert of_sources(a, b, sources=other) == ([["p", "q"], ["q", "r"]], "5 rows, ")
    with pytest.raises(DataError, match=r"train_weights: all questions of '.*c.jsonl' are among those of the sources"):
        checked([a, b, c], train_weights=[1, 2, 3])


def test_training_questions_among_the_held_out_ones_are_counted(tmp_path):
    train = write(tmp_path / "a.jsonl", asked("p"), asked("q  r"), asked("s"), asked("q  r"))
    test = write(tmp_path / "b.jsonl", asked("q r", "7"), asked("s"), asked("t"))
    found, plan = checked(train, test)
    line = "2 training questions are among the held-out ones of test, the first 'q  r': "
    assert found.notes[0].startswith(line)
    assert found.notes[0] in plan
    (note,) = checked(train, write(tmp_path / "c.jsonl", asked("s")))[0].notes
    assert note.startswith("1 training question is among")
    assert checked(train, write(tmp_path / "d.jsonl", asked("t")))[0].notes == ()


SOUND = ["72", "-3.5", "1,000", "3/4", "\\frac{3}{4}", "$69$, $84$", "[0, 1)", "50\\%", "(C)", "x^2 + 1", "\\boxed{5}"]
WORDLESS = ["proof", "Proof", "notfound", "NaN", "nan", "None", "N/A", ""]


def test_what_says_that_there_is_no_answer_and_what_no_box_can_hold_is_never_earned():
    broken = ["\\frac{1}{2", "{", "1}"]
    assert unearnable([*SOUND, *WORDLESS, *broken, *SOUND], RewardConfig()) == {*WORDLESS, *broken}


@pytest.mark.parametrize(
    ("form", "lost"),
    [("auto", 0), ("boxed", 0), ("tags", 0), ("line", 2), ("hashes", 3)],
)
def test_a_gold_answer_has_to_fit_the_form_that_is_read_and_what_is_left_can_be_earned(form, lost):
    """By a grader of a run, from the least response in that form."""
    others = ["a\nb", "x" * 400, "x + y"]
    found = unearnable([*SOUND, *others], RewardConfig(form=form))
    assert found & set(others) == set(others[:lost])
    assert ("(C)" in found) == (form == "hashes")
    assert not found & {"72", "1,000", "3/4", "\\frac{3}{4}"}
    written = {"tags": "<answer>%s</answer>", "line": "Answer: %s", "hashes": "#### %s"}.get(form, "\\boxed{%s}")
    decimals = {"3/4": "0.75", "\\frac{3}{4}": "0.75", "50\\%": "50"} if form == "hashes" else {}
    earnable = [gold for gold in SOUND if gold not in found]
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
