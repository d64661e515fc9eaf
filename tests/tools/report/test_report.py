"""The page of one run and of several, its statistics, and what hostile, absent or damaged files do to it."""

import base64
import hashlib
import html
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import yaml

from exgrpo.tools.report import main
from exgrpo.train.common.errors import ReportError
from exgrpo.train.metrics.log_files import Sample, SampledAnswer, to_line
from exgrpo.train.metrics.report.page import FOLDER, write_report
from exgrpo.train.metrics.report.runs import ABSENT, group_runs, half_width, load_run
from tests.browser import ask, wait
from tests.browser import browser as browser
from tests.programs import python
from tests.tools.report.pages import SHORT, held_out, make_run, page_of, training_record, whole_run

BY_TOKENS = "Held-out Pass@1 by tokens"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return page_of(folder, make_run(folder / "one", whole_run()))


def test_the_page_of_a_run_says_what_its_metrics_say(page):
    # 12 of 32 groups had a replayed trajectory; 4 steps of 25 s; 2 updates skipped, 4 answers timed out.
    assert page.row("one") == ["4", "0.250", "0.750", "+0.500", "4,000", "1.7", "0.38", "6"]
    assert page.lines(BY_TOKENS) == {"one": ([0, 4000], [0.25, 0.75])}
    assert page.lines("Held-out Pass@1 by time")["one"][0] == pytest.approx([0, 100 / 60])
    assert page.lines("Held-out Pass@1 by set") == {"test": ([0, 4], [0.25, 0.75]), "hard": ([0, 4], [0.5, 0.5])}
    assert page.lines("Entropy")["fresh"] == ([1, 2, 3, 4], [1, 1 / 2, 1 / 3, 1 / 4])
    assert page.lines("Buckets").keys() == {"1", "2"}
    assert page.lines("Time by phase")["evaluation"] == ([0, 4], [6, 6])


def test_every_panel_has_its_numbers_in_a_complete_run_and_one_without_is_left_out(page, tmp_path):
    plan = yaml.safe_load((FOLDER / "panels.yaml").read_text())
    assert list(page.plots) == [panel["title"] for panels in plan.values() for panel in panels]
    assert all(section in page.texts for section in plan)
    little = page_of(tmp_path, make_run(tmp_path / "little", [training_record(1)]))
    assert "Held-out Pass@k" not in little.plots
    assert [trace["mode"] for trace in little.plots["Loss"]["data"]] == ["markers"]
    nothing = page_of(tmp_path, make_run(tmp_path / "nothing", [{"step": 1, "kind": "training", "new": 1.0}]))
    assert not nothing.plots
    assert not any(section in nothing.texts for section in plan)


def test_a_page_loads_nothing_and_runs_its_own_scripts_alone(page):
    scripts = re.findall("<script>(.*?)</script>", page.source, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{found}'" for found in hashes)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page.source)[1]
    assert policy.split("; ") == [
        "default-src 'none'", f"script-src {allowed}", "style-src 'unsafe-inline'", "img-src data:", "base-uri 'none'",
        "form-action 'none'",
    ]  # fmt: skip
    assert not {"src", "href"} & {name for element in page.elements for name in element}
    assert page.source.count("plotly.js v") == 1


def test_a_single_run_has_the_interval_over_its_held_out_questions(tmp_path):
    ends = {"held_out/low": 0.2, "held_out/high": 0.4}
    page = page_of(
        tmp_path, make_run(tmp_path / "one", [held_out(step, 0.3) | ends for step in (0, 4)] + whole_run()[1:2])
    )
    assert page.bands(BY_TOKENS) == [[0.4, 0.4, 0.2, 0.2]]


def test_seeds_become_a_mean_with_its_confidence_interval(tmp_path):
    after = [0.6, 0.7, 0.95]
    records = [[held_out(0, 0.25), training_record(1), held_out(1, rate)] for rate in after]
    page = page_of(tmp_path, *(make_run(tmp_path / f"s{i}", of, seed=i) for i, of in enumerate(records)))
    low, high = scipy.stats.t.interval(0.95, 2, np.mean(after), scipy.stats.sem(after))
    assert page.row("s0 and 2 more seeds")[2] == f"{np.mean(after):.3f} ± {(high - low) / 2:.3f}"
    assert page.row("s2")[2] == "0.950"
    assert page.lines(BY_TOKENS)["s0 and 2 more seeds"] == ([0, 1000], [0.25, pytest.approx(0.75)])
    (band,) = page.bands(BY_TOKENS)
    assert band == pytest.approx([0.25, high, low, 0.25], rel=1e-3)  # the table of t has four digits
    assert page.plots[BY_TOKENS]["layout"]["yaxis"]["range"] == pytest.approx([0.225, 0.775])  # not that of the band


@pytest.mark.parametrize("runs", [2, 3, 10, 11, 12, 16, 41, 1000])
def test_half_a_confidence_interval(runs):
    sample = np.random.default_rng(runs).normal(size=(runs, 3))
    low, high = scipy.stats.t.interval(0.95, runs - 1, sample.mean(0), scipy.stats.sem(sample))
    np.testing.assert_allclose(half_width(sample), (high - low) / 2, rtol=3e-4)


def test_what_differs_in_more_than_the_seed_is_not_averaged(tmp_path):
    runs = [
        make_run(tmp_path / "replay", SHORT, seed=0, resume=None),
        make_run(tmp_path / "policy", SHORT, seed=0, experience={"ratio": 0.0}),
        make_run(tmp_path / "resumed", SHORT, seed=1, resume="auto", checkpoint={"every": 5}),
        make_run(tmp_path / "again", SHORT, seed=1),
        make_run(tmp_path / "unknown", SHORT, seed=2),
        make_run(tmp_path / "damaged", SHORT, seed=3),
    ]
    (tmp_path / "unknown" / "config.yaml").unlink()
    (tmp_path / "damaged" / "config.yaml").write_text("steps: 2026-13-45")
    groups = group_runs([load_run(run, run.name) for run in runs])
    assert [[run.name for run in of] for of in groups.values()] == [
        ["replay", "resumed"], ["policy"], ["again"], ["unknown"], ["damaged"],
    ]  # fmt: skip
    page = page_of(tmp_path, runs[0], *runs[1:3])
    assert page.row("Options that differ") == ["replay and 1 more seed", "policy"]
    assert page.row("experience.ratio") == ["0.5", "0.0"]
    assert page.lines("Reward in training").keys() == {"replay and 1 more seed", "policy"}


A, B = "“a0 and 1 more seed”", "“b0 and 1 more seed”"


@pytest.mark.parametrize(
    ("rates", "seeds", "options", "said"),
    [
        # The first run has spent 2,000 tokens at its last evaluation, where the second one is half way from 0.25.
        ((0.5, 0.75), 1, {}, "0.500 for “a0” and 0.500 for “b0”: none is ahead."),
        (
            (0.5, 0.85),
            1,
            {},
            "0.500 for “a0” and 0.550 for “b0”: “b0” is ahead; one seed cannot tell that from chance.",
        ),
        ((0.6, 0.75), 2, {}, f"0.600 for {A} and 0.500 for {B}: {A} is ahead."),
        (((0.58, 0.62), 0.75), 2, {}, f"0.600 for {A} and 0.500 for {B}: {A} is ahead; their 95 % intervals overlap"),
        ((0.5, 0.85), 1, {"data": {"test": "other.jsonl"}}, ""),
        ((0.5, None), 1, {}, ""),
    ],
)
def test_the_page_of_several_runs_begins_with_the_result(tmp_path, rates, seeds, options, said):
    runs = []
    for name, rate, steps, own in zip("ab", rates, (2, 4), ({}, options), strict=True):
        settings = {"experience": {"ratio": float(steps)}, "evaluation": {"every": steps}, **own}
        for seed, last in enumerate(rate if isinstance(rate, tuple) else (rate,) * seeds):
            end = [] if last is None else [held_out(steps, last)]
            records = [held_out(0, 0.25), *map(training_record, range(1, steps + 1)), *end]
            runs.append(make_run(tmp_path / f"{name}{seed}", records, seed=seed, **settings))
    page = page_of(tmp_path, *runs)
    if said:
        assert page.texts.index(f"After 2,000 generated tokens, held-out Pass@1 is {said}") < page.texts.index("Steps")
    assert ("generated tokens, held-out Pass@1 is" in page.texts) == bool(said)


HOSTILE = (
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "\"><svg onload=alert(1)>", "' onmouseover='alert(1)",
    "<a href='javascript:alert(1)'>x</a>", "</pre></details><iframe>", "<!-- ", "&lt;b&gt;", "{{ 7 * 7 }}{% raw %}",
)  # fmt: skip
UNSEEN = {"right\u202eleft": r"right\u202eleft", "half \udcff": r"half \udcff", "a\x00\x1b\x9b": r"a\x00\x1b\x9b"}


def of_texts(folder, texts):
    """The page about two runs that have these texts as names, options, metrics and samples."""
    metrics = {f"{heading}/{text}": 0.5 for text in texts for heading in ("reward", "seconds", "test")}
    records = [held_out(0, 0.25) | metrics, training_record(1) | metrics]
    answer = [SampledAnswer((("policy", text), ("environment", text)), 1.0, True, 3) for text in texts]
    samples = [Sample(1, 0, text, text, False, tuple(answer)) for text in texts]
    runs = [make_run(folder / name, records, **{text: text for text in texts}, n=name) for name in (texts[0], "b")]
    for run in runs:
        (run / "samples.jsonl").write_text("".join(map(to_line, samples)))
    return page_of(folder, *runs)


def test_hostile_texts_stay_texts(tmp_path):
    plain = of_texts(tmp_path / "plain", [f"text {i}" for i in range(len(HOSTILE) + len(UNSEEN))])
    page = of_texts(tmp_path / "hostile", [text.replace("/", "") for text in (*HOSTILE, *UNSEEN)])
    assert page.elements == plain.elements
    assert page.source.count("<script") == plain.source.count("<script")
    assert all(text.replace("/", "") in page.texts for text in (*HOSTILE, *UNSEEN.values()))
    assert not {"\u202e", "\x00", "\x1b", "\x9b"} & set(page.source)
    names = [trace["name"] for plot in page.plots.values() for trace in plot["data"]]
    assert not [name for name in names if "<" in name]  # plotly reads elements and entities
    assert any(html.escape(HOSTILE[1], quote=False) in name for name in names)


def test_the_last_samples_are_shown_and_long_texts_lose_their_middle(tmp_path):
    run = make_run(tmp_path / "run", SHORT)
    answers = (
        SampledAnswer((("policy", "begin " + "x" * 9000 + " end"),), 0.5, False, 9000),
        SampledAnswer((("policy", "stored"),), 1.0, True, 3, replayed_from=4),
    )
    samples = [to_line(Sample(step, 7, f"question {step}?", "42", False, answers)) for step in range(1, 31)]
    (run / "samples.jsonl").write_text("".join(samples) + samples[0][:-20])  # cut as the run was killed
    page = page_of(tmp_path, run)
    assert re.findall(r"Step (\d+): question", page.texts) == [str(step) for step in range(11, 31)]
    assert "Reward 0.5, 9000 tokens, cut at the limit" in page.texts
    assert "Reward 1.0, 3 tokens, replayed from step 4" in page.texts
    assert re.search(r"begin x+ \.\.\. \(9010 characters\) \.\.\. x+ end", page.texts)
    assert "Expected: 42" in page.texts


EMPTY = {"step": 1, "kind": "training"}


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([held_out(0, 0.5)], ["0", "0.500", *[ABSENT] * 5, "0"]),
        ([training_record(1)], ["1", *[ABSENT] * 3, "1,000", "0.4", "0.00", "1"]),
        ([{**EMPTY, "reward": None}, {**EMPTY, "step": 2, "reward": "?"}], ["2", *[ABSENT] * 6, "0"]),
        ([held_out(0, float("nan")), {**EMPTY, "loss": float("inf"), "grad_norm": 10**400}], ["1", *[ABSENT] * 6, "0"]),
    ],
)
def test_absent_numbers_are_absent_and_break_nothing(tmp_path, records, expected):
    one = make_run(tmp_path / "one", records)
    assert page_of(tmp_path, one).row("one") == expected
    both = page_of(tmp_path, one, make_run(tmp_path / "other", whole_run(), seed=1))
    assert both.row("one and 1 more seed")[2] == "0.750 (1 of 2)"


def test_damaged_lines_are_left_out_and_named_and_repeated_steps_count_once(tmp_path):
    lost = [training_record(step, seconds=1000.0) for step in (2, 3)] + [held_out(3, 0.9)]
    records = [held_out(0, 0.25), training_record(1), *lost, "[1, 2]\n", training_record(2), '{"step": 5, "rewa']
    run = make_run(tmp_path / "one", records)
    columns = load_run(run, "one").columns
    assert columns["step"].tolist() == [0, 1, 2]
    assert columns["training_minutes"].tolist() == pytest.approx([0, 25 / 60, 50 / 60])
    assert columns["generated_tokens"].tolist() == [0, 1000, 2000]
    assert "2 unreadable lines of metrics.jsonl are left out: 6, 8" in page_of(tmp_path, run).texts


@pytest.mark.parametrize("text", [None, "", "no json\n", '{"step": -1}\n'])
def test_a_folder_without_readable_metrics_is_named(tmp_path, text):
    good, bad = make_run(tmp_path / "good", SHORT), make_run(tmp_path / "bad", [])
    (bad / "metrics.jsonl").unlink() if text is None else (bad / "metrics.jsonl").write_text(text)
    with pytest.raises(ReportError, match=rf"{re.escape(str(bad))}.*metrics\.jsonl"):
        write_report([good, bad], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_what_cannot_be_written_is_named_and_nothing_is_overwritten(tmp_path):
    run = make_run(tmp_path / "one", SHORT)
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(ReportError, match=r"metrics\.jsonl: .*\.html"):
        write_report([run], run / "metrics.jsonl")
    with pytest.raises(ReportError, match=r"config\.yaml/page\.html cannot be written"):
        write_report([run], run / "config.yaml" / "page.html")
    assert (run / "metrics.jsonl").read_bytes() == before
    assert sorted(os.listdir(run)) == ["config.yaml", "metrics.jsonl"]


def test_the_program(tmp_path, capsys, monkeypatch):
    runs = [make_run(tmp_path / name / "run", SHORT, seed=i) for i, name in enumerate("ab")]
    monkeypatch.chdir(tmp_path)
    check = "import sys; from exgrpo.tools.report import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    python("-c", check, runs[0], env=environment)
    assert main([*map(str, runs), str(runs[0]), "--output", "deep/both.html"]) == main([*map(str, runs)]) == 0
    assert all(Path(page).is_file() for page in ("a/run/report.html", "deep/both.html", "report.html"))
    assert page_of(tmp_path, *runs, runs[0]).row("a/run")
    assert "report in deep/both.html" in capsys.readouterr().out
    for wrong, message in ((["missing"], f"{tmp_path}/missing"), (["x", "--otput", "y"], "--output?"), ([], "runs")):
        assert main(wrong) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert message in error
        assert error.count("\n") == 1


def test_a_browser_draws_all_plots_without_an_error(browser, tmp_path, page):
    (tmp_path / "page.html").write_text(page.source)
    browser.get_log("browser")
    browser.get((tmp_path / "page.html").as_uri())
    wait(browser, f"document.querySelectorAll('.plotly-graph-div .scatterlayer').length == {len(page.plots)}")
    assert ask(browser, "document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert browser.get_log("browser") == []
