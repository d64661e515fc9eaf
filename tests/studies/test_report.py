"""What the file of results and a study's report say."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

import studies.report
from exgrpo.train.common.errors import OutputError, ReportError
from exgrpo.train.metrics.report.runs import load_run
from studies.findings import Findings
from studies.page import tables
from studies.results import ResultFile, curves_of
from studies.study import load_study
from studies.summary import headline
from tests.studies.plans import PLAN, result, write
from tests.tools.report.pages import make_run

CURVES = {"without": (0.1, 0.2, 0.3), "with": (0.1, 0.3, 0.5)}


def results_of(study, path, arms=("without", "with"), spread=0.01, curves=CURVES, **spent):
    file = ResultFile(path)
    for task in study.plan.tasks:
        for arm in arms:
            for seed in study.plan.seeds:
                heights = [height + spread * seed for height in curves.get(arm, (0.1, 0.1, 0.1))]
                file.add(result(study.planned(task, arm, seed, {}).key, *heights, tokens=spent.get(arm, 100.0)))
    return file


def test_tables_say_what_the_runs_came_to(tmp_path):
    study = load_study(write(tmp_path, seeds=[0, 1, 2, 3, 4]))
    end, cost, equal = tables(Findings.of(study, results_of(study, tmp_path / "r.jsonl")))
    assert end.headings[:5] == ["task", "arm", "Pass@1", "less without", "Pass@8"]
    without, replayed = end.rows
    assert without[:4] == ["countdown", "without", "0.320 (0.307 to 0.337)", ""]
    assert replayed[2].startswith("0.520 ")
    assert re.fullmatch(r"\*\*\+0\.200 \(\+0\.1\d\d to \+0\.2\d\d\)\*\*", replayed[3])
    assert replayed[8] == "1.000 (1.000 to 1.000)"
    without, replayed = cost.rows
    assert without[:4] == ["countdown", "without", "200", "200"]
    # Its mean curve reaches 0.32 after 100 of 200 tokens.
    assert replayed[4].startswith("**0.50 (")
    assert equal.headings[2:5] == [f"Pass@{k} at {share}% of the tokens" for k, share in ((1, 50), (8, 50), (1, 100))]
    (replayed,) = equal.rows
    assert replayed[2].startswith("**+0.100 ")
    assert replayed[4].startswith("**+0.200 ")
    assert equal.headings[8:] == ["Pass@1 at 100% of the seconds", "Pass@8 at 100% of the seconds"]
    assert replayed[6:8] == replayed[2:4], "in these results seconds are tokens"
    assert replayed[8].startswith("**+0.200 ")


def test_below_five_seeds_nothing_is_in_bold_and_the_tables_say_why(tmp_path):
    claims = [{"text": "It helps", "arm": "with", "against": "without", "sign": 1}]
    for seeds in ([0], [0, 1], [0, 1, 2, 3]):
        study = load_study(write(tmp_path, seeds=seeds, claims=claims))
        file = results_of(study, tmp_path / f"{len(seeds)}.jsonl")
        claimed, end, *others = tables(Findings.of(study, file))
        cells = [cell for of in (claimed, end, *others) for row in of.rows for cell in row]
        assert not [cell for cell in cells if "**" in cell or " to " in cell]
        assert "with fewer than 5 seeds there is no interval, and nothing in bold" in end.text
        assert "95%" not in end.text
        assert claimed.rows[0][2:] == ["+0.200", "too few seeds"]
    file.by_key[study.planned("countdown", "with", 0, {}).key].curves["pass_at_1"][-1] = np.nan
    claimed, *_ = tables(Findings.of(study, file))
    assert claimed.rows[0][2:] == ["", "a run lacks the number"]
    study = load_study(write(tmp_path, seeds=[0, 1], arms={**PLAN["arms"], "with": {"seeds": [0, 1, 2, 3, 4]}}))
    file = results_of(study, tmp_path / "unequal.jsonl")
    for seed in (2, 3, 4):
        file.add(result(study.planned("countdown", "with", seed, {}).key, 0.1, 0.3, 0.5))
    end, *_ = tables(Findings.of(study, file))
    assert "(" in end.rows[1][2]
    assert "(" not in end.rows[1][3], "the baseline has two"
    assert "A difference in bold has an interval without 0. With fewer than 5 seeds there is no interval" in end.text


@pytest.mark.parametrize(
    ("curves", "spread", "seeds", "said"),
    [
        # Of 200 tokens, the arm has spent all 100 that it spends: there the baseline is at its middle, 0.2.
        ((0.1, 0.3, 0.5), 0, 1, "0.500 for “with” and 0.200 for “without”: “with” is ahead; one seed cannot tell that"),
        ((0.1, 0.1, 0.2), 0, 1, "0.200 for “with” and 0.200 for “without”: neither is ahead."),
        ((0.1, 0.3, 0.5), 0.01, 5, "0.520 for “with” and 0.220 for “without”: “with” is ahead, by +0.300 (+0.2"),
        ((0.1, 0.2, 0.19), 0.1, 5, "“with” is not ahead, but the difference, -0.010 (-0."),
    ],
)
def test_the_result_is_one_true_sentence(tmp_path, curves, spread, seeds, said):
    study = load_study(write(tmp_path, seeds=list(range(seeds))))
    file = results_of(study, tmp_path / "r.jsonl", spread=spread, curves={**CURVES, "with": curves}, **{"with": 50.0})
    sentence = headline(Findings.of(study, file))
    assert sentence.startswith("After 100 generated tokens, held-out Pass@1 is ")
    assert said in sentence
    assert sentence.endswith(".")


def test_the_sentence_of_several_arms_and_tasks_and_of_a_baseline_alone(tmp_path):
    tasks = {**PLAN["tasks"], "colouring": {"recipes": ["builtin:colouring"]}}
    arms = {**PLAN["arms"], "third": {"settings": {"experience.mu": 0.25}}}
    study = load_study(write(tmp_path, tasks=tasks, arms=arms))
    alone = headline(Findings.of(study, results_of(study, tmp_path / "alone.jsonl", ["without"])))
    assert alone == "Only “without” has been run: at the end, its held-out Pass@1 over 2 tasks is 0.305."
    findings = Findings.of(study, results_of(study, tmp_path / "r.jsonl", arms))
    end, cost, equal = tables(findings)
    assert [row[0] for row in end.rows] == [task for task in ("all", "countdown", "colouring") for _ in arms]
    assert [row[:2] for row in end.rows[3:]] == [row[:2] for row in cost.rows]
    assert [row[:2] for row in equal.rows] == [row[:2] for row in cost.rows if row[1] != "without"]
    sentence = headline(findings)
    assert sentence.startswith("After equally many generated tokens, held-out Pass@1 over 2 tasks is 0.505 for “with”")
    assert "the best of 2 arms (a choice that flatters it), and 0.305 for “without”" in sentence


def test_arms_that_are_not_complete_are_left_out_and_named(tmp_path):
    study = load_study(write(tmp_path, arms={**PLAN["arms"], "third": {"settings": {"experience.mu": 0.25}}}))
    file = results_of(study, tmp_path / "r.jsonl")
    findings = Findings.of(study, file)
    assert [arm.name for arm in findings.arms] == ["without", "with"]
    assert findings.missing == ["third"]
    with pytest.raises(ReportError, match="no seed of the baseline, without, has been run on all tasks"):
        Findings.of(study, ResultFile(tmp_path / "nothing.jsonl"))


def test_the_program_writes_tables_and_a_picture(tmp_path, capsys):
    arms = {"<script>alert(1)</script>": {"text": "<b>"}, **PLAN["arms"]}
    path = write(tmp_path, arms=arms, title="A <i>trial</i>")
    study = load_study(path)
    results_of(study, tmp_path / "r.jsonl", arms=list(study.plan.arms))
    arguments = [str(path), "--results", str(tmp_path / "r.jsonl"), "--output", str(tmp_path / "out")]
    assert studies.report.main(arguments) == 0
    *shown, table, picture = capsys.readouterr().out.splitlines()
    assert [table, picture] == [f"{tmp_path}/out/trial{ending}" for ending in (".md", ".svg")]
    assert any(re.match("│ with  .*│ +0.505 ", line) for line in shown)
    text = (tmp_path / "out" / "trial.md").read_text()
    assert shown[-1] in text
    assert "| countdown | with | 0.505 " in text
    assert "commit c0ffee" in text
    words = {"countdown", "Pass@1", "Pass@8", "generated tokens", "with", "without"}
    assert words <= texts(tmp_path / "out" / "trial.svg")
    assert studies.report.main([*arguments, "--scores", "pass_at_1"]) == 0
    assert words - texts(tmp_path / "out" / "trial.svg") == {"Pass@8"}


def texts(picture):
    return {element.text for element in ElementTree.parse(picture).iter() if element.tag.endswith("text")}


def test_an_error_is_one_line(tmp_path, capsys):
    assert studies.report.main([str(write(tmp_path)), "--results", str(tmp_path / "none.jsonl")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert studies.report.main([str(write(tmp_path)), "--outptu", "here"]) == 2
    assert "did you mean --output?" in capsys.readouterr().err


def test_a_result_comes_back(tmp_path):
    given = result("a", 0.123456789, 0.2, seed=3)
    file = ResultFile(tmp_path / "deep" / "runs.jsonl")
    file.add(given)
    (found,) = ResultFile(file.path).by_key.values()
    assert found.settings == {"evaluation.samples": 8, "seed": 3}
    for name in ("commit", "date", "processor", "versions"):
        assert getattr(found, name) == getattr(given, name)
    for name, curve in given.curves.items():
        np.testing.assert_allclose(found.curves[name], curve, rtol=5e-5)  # five digits are kept
        np.testing.assert_array_equal(file.by_key["a"].curves[name], found.curves[name])


def test_what_a_killed_program_did_not_finish_gives_way(tmp_path):
    path = tmp_path / "runs.jsonl"
    ResultFile(path).add(result("a", 0.1))
    whole = path.read_bytes()
    for rest in (whole[:-1], whole[: len(whole) // 2], b"\xff\xff"):
        path.write_bytes(whole + rest)
        file = ResultFile(path)
        assert list(file.by_key) == ["a"]
        file.add(result("b", 0.2))
        file.add(result("c", 0.3))
        assert list(ResultFile(path).by_key) == ["a", "b", "c"]


@pytest.mark.parametrize("line", ["{", "[]", '{"key": "a"}'])
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "runs.jsonl"
    path.write_text(f"{result('a', 0.1).to_line()}\n{line}\n")
    with pytest.raises(OutputError, match="line 2 is no result"):
        ResultFile(path)


def test_curves_are_costs_scores_and_means_between_evaluations(tmp_path):
    run = make_run(
        tmp_path / "run",
        [
            {"step": 0, "kind": "evaluation", "test/pass_rate": 0.1, "pass_at/4": 0.3, "distinct_at/4": 0.5},
            {"step": 1, "kind": "training", "generated_tokens": 10, "gradient_tokens": 4, "seconds": 2, "entropy": 1.0},
            {"step": 2, "kind": "training", "generated_tokens": 30, "gradient_tokens": 5, "seconds": 3, "entropy": 2.0},
            {"step": 2, "kind": "evaluation", "test/pass_rate": 0.2, "pass_at/4": 0.4, "distinct_at/4": 0.6},
            {"step": 3, "kind": "training", "generated_tokens": 60, "gradient_tokens": 6, "seconds": 4, "entropy": 4.0},
            {"step": 3, "kind": "evaluation", "test/pass_rate": 0.3, "pass_at/4": 0.5, "distinct_at/4": 0.7},
        ],
    )
    curves = curves_of(load_run(run, "run").columns, 4)
    expected = {
        "step": [0, 2, 3],
        "pass_at_1": [0.1, 0.2, 0.3],
        "pass_at_k": [0.3, 0.4, 0.5],
        "distinct_at_k": [0.5, 0.6, 0.7],
        "generated_tokens": [0, 30, 60],
        "gradient_tokens": [0, 9, 15],
        "seconds": [0, 5, 9],
        "train/entropy": [np.nan, 1.5, 4.0],
        "train/retired": [np.nan] * 3,
    }
    for name, values in expected.items():
        np.testing.assert_allclose(curves[name], values, err_msg=name)
