"""What a study's report says."""

import re
from xml.etree import ElementTree

import pytest

import studies.report
from exgrpo.train.errors import ReportError
from studies.findings import Findings
from studies.page import tables
from studies.results import ResultFile
from studies.study import load_study
from tests.studies.plans import PLAN, result, write
from tests.train.report.pages import Page

CURVES = {"without": (0.1, 0.2, 0.3), "with": (0.1, 0.3, 0.5)}


def results_of(study, path, arms=("without", "with"), spread=0.01):
    file = ResultFile(path)
    for task in study.plan.tasks:
        for arm in arms:
            for seed in study.plan.seeds:
                heights = [height + spread * seed for height in CURVES.get(arm, (0.1, 0.1, 0.1))]
                file.add(result(study.planned(task, arm, seed, {}).key, *heights))
    return file


def test_tables_say_what_the_runs_came_to(tmp_path):
    study = load_study(write(tmp_path, seeds=[0, 1, 2, 3]))
    end, cost, equal = tables(Findings.of(study, results_of(study, tmp_path / "r.jsonl")))
    assert end.headings[:4] == ["arm", "Pass@1", "less without", "Pass@8"]
    without, replayed = end.rows
    assert without[:3] == ["without", "0.315 (0.300 to 0.330)", ""]
    assert replayed[1].startswith("0.515 ")
    assert re.fullmatch(r"\*\*\+0\.200 \(\+0\.1\d\d to \+0\.2\d\d\)\*\*", replayed[2])
    assert replayed[7] == "1.000 (1.000 to 1.000)"
    without, replayed = cost.rows
    assert without[:3] == ["without", "200", "200"]
    # Its mean curve reaches 0.315 after 100 of 200 tokens.
    assert replayed[3].startswith("**0.50 (")
    assert equal.headings[:4] == [
        "arm",
        "Pass@1 at 50% of the tokens",
        "Pass@8 at 50% of the tokens",
        "Pass@1 at 100% of the tokens",
    ]
    (replayed,) = equal.rows
    assert replayed[1].startswith("**+0.100 ")
    assert replayed[3].startswith("**+0.200 ")
    assert equal.headings[7:] == ["Pass@1 at 100% of the seconds", "Pass@8 at 100% of the seconds"]
    assert replayed[5:7] == replayed[1:3], "in these results seconds are tokens"
    assert replayed[7].startswith("**+0.200 ")


def test_several_tasks_have_a_table_together(tmp_path):
    tasks = {**PLAN["tasks"], "colouring": {"recipes": ["builtin:colouring"]}}
    study = load_study(write(tmp_path, tasks=tasks))
    titles = [table.title for table in tables(Findings.of(study, results_of(study, tmp_path / "r.jsonl")))]
    assert titles[0] == "All tasks"
    assert len(titles) == 7


def test_arms_that_are_not_complete_are_left_out_and_named(tmp_path):
    study = load_study(write(tmp_path, arms={**PLAN["arms"], "third": {"settings": {"experience.mu": 0.25}}}))
    file = results_of(study, tmp_path / "r.jsonl")
    findings = Findings.of(study, file)
    assert [arm.name for arm in findings.arms] == ["without", "with"]
    assert findings.missing == ["third"]
    with pytest.raises(ReportError, match="no seed of the baseline, without, has been run on all tasks"):
        Findings.of(study, ResultFile(tmp_path / "nothing.jsonl"))


def test_the_program_writes_a_page_and_a_table(tmp_path, capsys):
    arms = {"<script>alert(1)</script>": {"text": "<b>"}, **PLAN["arms"]}
    path = write(tmp_path, arms=arms, title="A <i>trial</i>")
    study = load_study(path)
    results_of(study, tmp_path / "r.jsonl", arms=list(study.plan.arms))
    arguments = [str(path), "--results", str(tmp_path / "r.jsonl"), "--output", str(tmp_path / "out")]
    assert studies.report.main(arguments) == 0
    *shown, page, table, picture = capsys.readouterr().out.splitlines()
    assert [page, table, picture] == [f"{tmp_path}/out/trial{ending}" for ending in (".html", ".md", ".svg")]
    assert any(re.match("│ with  .*│ +0.505 ", line) for line in shown)
    page = Page(tmp_path / "out" / "trial.html")
    assert all(place.startswith("#") for place in page.loads)
    assert len(set(page.ids)) == len(page.ids)
    described = page.figures["Pass@1 against generated tokens"]["text"]
    assert "with: 0.105 at token 0, 0.505" in described
    assert "at token 200" in described
    assert "**" not in page.source
    text = (tmp_path / "out" / "trial.md").read_text()
    assert "| with | 0.505 " in text
    assert "commit c0ffee" in text
    picture = ElementTree.parse(tmp_path / "out" / "trial.svg")
    shown = {element.text for element in picture.iter() if element.tag.endswith("text")}
    assert {"countdown", "Pass@1", "Pass@8", "generated tokens", "with", "without"} <= shown


def test_an_error_is_one_line(tmp_path, capsys):
    assert studies.report.main([str(write(tmp_path)), "--results", str(tmp_path / "none.jsonl")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert studies.report.main([str(write(tmp_path)), "--outptu", "here"]) == 2
    assert "did you mean --output?" in capsys.readouterr().err
