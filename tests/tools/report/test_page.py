import math
import os
import re

import numpy as np
import pytest
import scipy.stats
import yaml

from exgrpo.train.common.errors import ReportError
from exgrpo.train.common.functions import ASSETS
from exgrpo.train.metrics.report.figures import MAX_POINTS, Curve, mean_curve, student_t, thin
from exgrpo.train.metrics.report.page import write_report
from exgrpo.train.metrics.report.runs import ABSENT, group_runs, load_run
from tests.tools.report.pages import SHORT, Page, held_out, make_run, page_of, training_record, whole_run


@pytest.fixture(scope="module")
def whole_page(tmp_path_factory) -> Page:
    folder = tmp_path_factory.mktemp("runs")
    return page_of(folder, make_run(folder / "one", whole_run()))


def test_the_summary_of_a_run_says_what_its_metrics_say(whole_page):
    # 12 of 32 groups had a replayed trajectory; 4 steps of 25 s.
    expected = ["4", "0.250", "0.750", "+0.500", "4,000", "1:40 min", "0.38", "2 skipped, 4 timed out"]
    assert whole_page.row("one") == expected


def test_curves_carry_the_values_of_the_metrics_over_every_axis(whole_page):
    figures = whole_page.figures

    assert figures["Held-out Pass@1 against steps"]["text"] == "one: 0.25 at step 0, 0.75 at step 4"
    assert figures["Held-out Pass@1 against generated tokens"]["text"] == "one: 0.25 at token 0, 0.75 at token 4000"
    assert figures["Held-out Pass@1 against training time"]["text"] == "one: 0.25 at second 0, 0.75 at second 100"
    assert figures["Pass@1 in training against training time"]["text"] == "one: 0.1 at second 25, 0.4 at second 100"
    assert "one, replayed: 1.25 at step 2, 1.25 at step 4" in figures["Mean ratio"]["text"]
    assert "one, timed out: 1 at step 1, 4 at step 4" in figures["Failures so far"]["text"]
    assert figures["Buckets over time"]["text"] == "one at step 4: bucket 1 4, bucket 2 8"
    phases = "one at step 4: select 1, rollout 10, score 4, update 9, push 1"
    assert figures["Time by phase"]["text"] == phases
    total = "one at step 4: select 4, rollout 40, score 16, update 36, push 4, evaluation 12, checkpoint 0.5"
    assert figures["Time by phase so far"]["text"] == total
    assert figures["Log-ratios of fresh tokens"]["text"].startswith(
        "one, 1 %: -0.049 at step 1, -0.196 at step 4; one, med"
    )
    assert "median: 0 at step 2, 0 at step 4" in figures["Log-ratios of replayed tokens"]["text"]


def test_evaluations_are_no_training_steps(tmp_path):
    columns = load_run(make_run(tmp_path / "one", whole_run()), "one").columns
    assert columns.training["step"].tolist() == [1, 2, 3, 4]
    assert columns.held_out["generated_tokens"].tolist() == [0, 4000]
    assert columns.merged["step"].tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_equal(columns.merged["seconds/evaluation"], [6.0, np.nan, np.nan, np.nan, 6.0])


def test_what_is_noted_before_the_first_step_makes_no_step_of_it(tmp_path):
    """The record before the first step holds the difference between engine and trainer."""
    first, *others = whole_run()
    page = page_of(tmp_path, make_run(tmp_path / "one", [{**first, "weight_gap": 1e-6}, *others]))
    assert page.row("one")[0] == "4"
    along = page.figures["Held-out Pass@1 against generated tokens"]["text"]
    assert along == "one: 0.25 at token 0, 0.75 at token 4000"


def test_every_plot_of_a_complete_run_is_drawn_named_and_described(whole_page):
    planned = yaml.safe_load((ASSETS / "report" / "plots.yaml").read_text())
    titles = [panel["title"] for section in planned for panel in section["panels"]]
    titles += [plot["title"] for section in planned for plot in section.get("stacks", [])]
    titles += ["Held-out Pass@2"]
    assert set(whole_page.figures) == {title for title in titles if title not in named_in(whole_page.left_out)}
    assert all(figure["role"] == "img" and figure["text"] for figure in whole_page.figures.values())


def named_in(left_out):
    """The titles in the lines "Left out: reason: title, title; reason: title."."""
    parts = [part for line in left_out.removesuffix(".").split(".Left out: ") for part in line.split("; ")]
    return {title for part in parts for title in part.rpartition(": ")[2].split(", ")}


def test_what_says_nothing_is_left_out_with_the_reason(whole_page):
    """Of the fixture: what is 0 or the same in all steps, and the reward, which is equal to Pass@1."""
    assert "always 0.25: Answers cut at the length limit" in whole_page.left_out
    assert "always 0: Clipped tokens" in whole_page.left_out
    assert "the same as “Pass@1 in training against steps”: Reward in training against steps" in whole_page.left_out
    assert "always 1: Idle mini-batches" in whole_page.left_out
    assert {"Reward in training against steps", "Clipped tokens"}.isdisjoint(whole_page.figures)
    assert "Mean ratio" in whole_page.figures  # two constants, which are not equal


def test_a_constant_pass_rate_says_that_nothing_was_learned(tmp_path):
    steps = [training_record(step, pass_rate=0.5, reward=0.25) for step in (1, 2)]
    page = page_of(tmp_path, make_run(tmp_path / "one", [held_out(0, 0.0), *steps, held_out(2, 0.0)]))
    assert {"Held-out Pass@1 against steps", "Pass@1 in training against steps"} <= set(page.figures)
    assert "always 0.25: Reward in training against steps" in page.left_out


def test_a_single_step_is_drawn_and_so_are_runs_that_differ_though_each_is_constant(tmp_path):
    page = page_of(tmp_path, make_run(tmp_path / "one", [training_record(1)]))
    assert page.traces("Learning rate")["one"]["y"] == [1e-6]
    assert "always 0: Clipped tokens" in page.left_out
    runs = [make_run(tmp_path / str(rate), whole_run(learning_rate=rate), lr=rate) for rate in (1e-6, 2e-6)]
    assert page_of(tmp_path, *runs).traces("Learning rate")["2e-06"]["y"] == [2e-6] * 4


def test_a_section_without_a_plot_is_left_out(tmp_path):
    page = page_of(
        tmp_path,
        make_run(tmp_path / "one", [{"step": step, "kind": "training", "reward": 0.1 * step} for step in (1, 2)]),
    )
    assert "Does it learn?" in page.texts
    assert "What is in the experience?" not in page.texts
    assert "without numbers: Held-out Pass@1 against steps" in page.left_out


def test_a_single_run_has_wilsons_interval_of_its_held_out_questions(tmp_path):
    """40 of 64 and 56 of 64 right: the metrics carry the interval, here by scipy."""
    ends = {}
    for step, right in ((0, 40), (4, 56)):
        found = scipy.stats.binomtest(right, 64).proportion_ci(0.95, method="wilson")
        ends[step] = {"held_out/low": found.low, "held_out/high": found.high}
    records = [held_out(0, 40 / 64) | ends[0], *whole_run()[1:-1], held_out(4, 56 / 64) | ends[4]]
    page = page_of(tmp_path, make_run(tmp_path / "one", records))

    (band,) = page.bands("Held-out Pass@1 against steps")
    low, high = ([ends[step][f"held_out/{end}"] for step in (0, 4)] for end in ("low", "high"))
    assert band["x"] == [0, 4, 4, 0]
    assert band["y"] == pytest.approx([*high, *low[::-1]], rel=1e-5)
    told = page.traces("Held-out Pass@1 against steps")["one"]["customdata"]
    np.testing.assert_allclose(told, [[low[0], high[0]], [low[1], high[1]]], rtol=1e-5)
    bottom, top = page.figures["Held-out Pass@1 against steps"]["figure"]["layout"]["yaxis"]["range"]
    assert bottom < low[0] < high[1] < top
    assert "95 % interval over the held-out questions" in page.texts


def test_values_have_six_digits_and_long_times_are_in_minutes_or_hours(tmp_path):
    steps = [training_record(step, seconds=3600.0, entropy=math.pi / 10**6 * step) for step in (1, 2, 3)]
    page, title = page_of(tmp_path, make_run(tmp_path / "one", steps)), "Pass@1 in training against training time"
    assert page.traces("Entropy")["one, fresh"]["y"] == [3.14159e-06, 6.28319e-06, 9.42478e-06]
    assert page.traces(title)["one"]["x"] == [1, 2, 3]
    assert page.figures[title]["figure"]["layout"]["xaxis"]["title"]["text"] == "training time in hours"


def test_a_page_stands_alone_and_equal_runs_give_equal_ones(tmp_path):
    runs = make_run(tmp_path / "a", whole_run()), make_run(tmp_path / "b", whole_run(), seed=1)
    page = page_of(tmp_path, *runs)
    write_report(runs, tmp_path / "again.html")
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "page.html").read_bytes()
    assert page.loads
    assert all(load.startswith("#") for load in page.loads)
    assert {load[1:] for load in page.loads} <= set(page.ids)
    assert {name.strip("#)") for name in re.findall(r"url\(([^)]*\))", page.source)} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert "@import" not in page.source


def test_seeds_become_a_mean_with_its_confidence_interval(tmp_path):
    after = [0.6, 0.7, 0.95]
    folders = [
        make_run(tmp_path / f"s{i}", [held_out(0, 0.25), held_out(4, rate)], seed=i) for i, rate in enumerate(after)
    ]
    page = page_of(tmp_path, *folders)

    low, high = scipy.stats.t.interval(0.95, 2, np.mean(after), scipy.stats.sem(after))
    cells = page.row("s0 and 2 more seeds")
    assert cells[2] == f"{np.mean(after):.3f} ± {(high - low) / 2:.3f}"
    assert cells[3] == f"{np.mean(after) - 0.25:+.3f} ± {(high - low) / 2:.3f}"
    assert page.row("s2")[2] == "0.950"
    assert f"0.75 ({low:.3g} to {high:.3g}) at step 4" in page.figures["Held-out Pass@1 against steps"]["text"]
    (band,) = page.bands("Held-out Pass@1 against steps")
    assert [band["y"][i] for i in (1, 2)] == pytest.approx([high, low], rel=1e-3)  # the table of t has four digits
    assert page.figures["Held-out Pass@1 against steps"]["figure"]["layout"]["yaxis"]["range"][1] < 1 < high
    assert "95 % confidence intervals" in page.source


@pytest.mark.parametrize("freedom", [1, 2, 9, 10, 11, 15, 40, 1000])
def test_student_t(freedom):
    assert student_t(freedom) == pytest.approx(scipy.stats.t.ppf(0.975, freedom), abs=6e-4)


def test_means_stand_at_the_steps_all_seeds_reached_and_at_their_mean_cost():
    nan = float("nan")
    first = {"step": np.array([1.0, 2, 3]), "y": np.array([1.0, 2, 3]), "cost": np.array([10.0, 20, 30])}
    second = {"step": np.array([1.0, 2, 3]), "y": np.array([nan, 4, 7]), "cost": np.array([20.0, 40, 60])}
    without = {"step": np.array([1.0])}

    curve = mean_curve([first, second, without], "cost", "y")

    assert curve.x.tolist() == [30, 45]
    assert curve.y.tolist() == [3, 5]
    assert curve.low is not None
    assert curve.high is not None
    half = 12.706 * np.array([1.0, 2.0])
    np.testing.assert_allclose([curve.low, curve.high], [curve.y - half, curve.y + half], rtol=1e-6)


def test_what_differs_in_more_than_the_seed_is_not_averaged(tmp_path):
    runs = [
        make_run(tmp_path / "replay", whole_run(), seed=0, resume=None),
        make_run(tmp_path / "policy", whole_run(), seed=0, experience={"ratio": 0.0}),
        make_run(tmp_path / "resumed", whole_run(), seed=1, resume="auto", checkpoint={"every": 5}),
        make_run(tmp_path / "again", whole_run(), seed=1),
        make_run(tmp_path / "unknown", whole_run(), seed=2),
        make_run(tmp_path / "damaged", whole_run(), seed=3),
    ]
    (tmp_path / "unknown" / "config.yaml").unlink()
    (tmp_path / "damaged" / "config.yaml").write_text("steps: 2026-13-45")
    data = [load_run(run, run.name) for run in runs]

    groups = [[run.name for run in group.runs] for group in group_runs(data)]

    assert groups == [["replay", "resumed"], ["policy"], ["again"], ["unknown"], ["damaged"]]


def test_several_runs_are_overlaid_named_and_compared(tmp_path):
    runs = [make_run(tmp_path / f"run{i}", SHORT, experience={"ratio": i / 10}) for i in range(9)]
    page = page_of(tmp_path, *runs)

    text = page.figures["Reward in training against steps"]["text"]
    assert [part.split(":")[0] for part in text.split("; ")] == [f"run{i}" for i in range(9)]
    assert {f"Time by phase: run{i}" for i in range(9)} <= set(page.figures)
    assert ["experience.ratio", *(f"{i / 10}" for i in range(9))] in page.rows
    paints = [trace["meta"]["paint"] for trace in page.traces("Reward in training against steps").values()]
    assert paints == [f"var(--curve-{i % 7})" for i in range(9)]


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
        (
            (0.6, 0.75),
            2,
            {},
            "0.600 for “a0 and 1 more seed” and 0.500 for “b0 and 1 more seed”: “a0 and 1 more seed” is ahead.",
        ),
        (
            ((0.58, 0.62), 0.75),
            2,
            {},
            "0.600 for “a0 and 1 more seed” and 0.500 for “b0 and 1 more seed”: “a0 and 1 more seed” is ahead; their",
        ),
        ((0.5, 0.85), 1, {"data": {"test": "other.jsonl"}}, ""),
        ((0.5, None), 1, {}, ""),
    ],
)
def test_the_page_of_several_runs_begins_with_the_result(tmp_path, rates, seeds, options, said):
    """Which it does where all of them answered the same questions, in training too."""
    runs = []
    for name, rate, steps, own in zip("ab", rates, (2, 4), ({}, options), strict=True):
        settings = {"experience": {"ratio": float(steps)}, "evaluation": {"every": steps}, **own}
        for seed, last in enumerate(rate if isinstance(rate, tuple) else (rate,) * seeds):
            end = [] if last is None else [held_out(steps, last)]
            records = [held_out(0, 0.25), *map(training_record, range(1, steps + 1)), *end]
            runs.append(make_run(tmp_path / f"{name}{seed}", records, seed=seed, **settings))
    page = page_of(tmp_path, *runs)
    if said:
        after = page.source.index(f"After 2,000 generated tokens, held-out Pass@1 is {said}")
        assert after < page.source.index("Held-out Pass@1 against generated tokens") < page.source.index("<table")
    assert ("generated tokens, held-out Pass@1 is" in page.texts) == bool(said)


def test_folders_of_one_name_are_told_apart_and_named_once(tmp_path):
    runs = [make_run(tmp_path / parent / "run", SHORT, x=parent) for parent in "ab"]
    page = page_of(tmp_path, *runs, runs[0])
    assert [row[0].strip() for row in page.rows[:3]] == ["Run", "a/run", "b/run"]


EMPTY = {"step": 1, "kind": "training"}


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([held_out(0, 0.5)], ["0 of 4", "0.500", ABSENT, ABSENT, ABSENT, ABSENT, ABSENT, ABSENT]),
        ([training_record(1)], ["1 of 4", ABSENT, ABSENT, ABSENT, "1,000", "0:25 min", "0.00", "1 timed out"]),
        ([{**EMPTY, "reward": 0.5}], ["1 of 4", *[ABSENT] * 7]),
        ([{**EMPTY, "reward": None}, {**EMPTY, "step": 2, "reward": "?"}], ["2 of 4", *[ABSENT] * 7]),
        ([dict.fromkeys(training_record(1), None) | EMPTY], ["1 of 4", *[ABSENT] * 7]),
        ([held_out(0, float("nan")), {**EMPTY, "grad_norm": float("inf"), "loss": 10**400, "reward": 1}], None),
    ],
)
def test_little_or_nothing_to_show_breaks_nothing(tmp_path, records, expected):
    page = page_of(tmp_path, make_run(tmp_path / "one", records))
    assert expected is None or page.row("one") == expected


def test_a_run_without_some_metrics_joins_another_one(tmp_path):
    old = [{"step": step, "kind": "training", "reward": 0.5, "generated_tokens": None} for step in (1, 2)]
    page = page_of(tmp_path, make_run(tmp_path / "old", old), make_run(tmp_path / "new", whole_run(), seed=1))

    assert page.row("old and 1 more seed")[2] == "0.750 (1 of 2)"
    assert page.figures["Entropy"]["text"].startswith("old and 1 more seed, fresh: 1 at step 1")


def test_damaged_lines_are_left_out_and_named(tmp_path):
    records = [*SHORT, "\n", "[1, 2]\n", '{"reward": 1}\n', '{"step": 1.5}\n', "\0\0\0\n", '{"step": 5, "rewa']
    run = make_run(tmp_path / "one", records)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\n{"step": ' * 5)
    page = page_of(tmp_path, run)
    numbers = range(len(SHORT) + 2, len(SHORT) + 10)
    assert f"metrics.jsonl left out: 10 (line {', '.join(map(str, numbers))}, ...)" in page.source
    assert page.row("one")[:3] == ["1 of 4", "0.250", "0.500"]


def test_steps_that_a_resumed_run_repeats_count_once(tmp_path):
    lost = [training_record(step, seconds=1000.0) for step in (2, 3)] + [held_out(3, 0.9)]
    records = [held_out(0, 0.25), training_record(1), *lost, training_record(2)]
    columns = load_run(make_run(tmp_path / "one", records), "one").columns
    assert columns.training["step"].tolist() == [1, 2]
    assert columns.training["seconds_so_far"].tolist() == [25, 50]
    assert columns.held_out["step"].tolist() == [0]


def test_long_runs_are_drawn_with_fewer_points(tmp_path):
    steps = 4 * MAX_POINTS - 2
    curve = thin(Curve(np.arange(steps) + 1.0, *np.ones((3, steps))))
    assert len(curve.x) == MAX_POINTS
    assert curve.x[0] == 2.5
    assert curve.x[-1] == steps - 0.5
    assert curve.low is not None
    assert curve.high is not None
    assert set(curve.y) == set(curve.low) == set(curve.high) == {1.0}


def test_sources_and_sets_are_shown_where_there_are_several(tmp_path):
    records = [
        held_out(step, 0.5) | {"test/math": 0.25, "test/code": 0.75, "hard/pass_rate": 0.625, "hard/low": 0.25}
        for step in (0, 4)
    ]
    figures = page_of(tmp_path, make_run(tmp_path / "one", records)).figures
    assert figures["Held-out math"]["text"] == "one: 0.25 at step 0, 0.25 at step 4"
    assert "Held-out code" in figures
    assert figures["Held-out set hard"]["text"] == "one: 0.625 at step 0, 0.625 at step 4"
    records = [{**EMPTY, "step": step, "reward": 0.5, "reward/math": 0.25, "reward/code": 0.75} for step in (1, 2)]
    figures = page_of(tmp_path, make_run(tmp_path / "two", records)).figures
    assert figures["Reward in training: math"]["text"] == "two: 0.25 at step 1, 0.25 at step 2"
    assert "Reward in training: code" in figures


def test_several_answers_to_a_question_are_shown_at_the_largest_k(tmp_path):
    names = ("pass_at/4", "pass_at/8", "pass_at/8/error", "distinct_at/8")
    records = [
        {"step": step, "kind": "evaluation", "test/pass_rate": 0.5} | dict.fromkeys(names, 0.75) for step in (0, 4)
    ]
    records[1]["distinct_at/8"] = 1.5
    figures = page_of(tmp_path, make_run(tmp_path / "one", records), make_run(tmp_path / "two", whole_run())).figures
    assert figures["Held-out Pass@8"]["text"] == "one: 0.75 at step 0, 0.75 at step 4"
    assert figures["Different right answers among 8"]["text"] == "one: 0.75 at step 0, 1.5 at step 4"
    assert figures["Held-out Pass@2"]["text"].startswith("two: ")  # its largest
    assert "Held-out Pass@4" not in figures


@pytest.mark.parametrize("text", [None, "", "no json\n", "[]\n", '{"step": -1}\n'])
def test_a_folder_without_readable_metrics_is_named(tmp_path, text):
    good = make_run(tmp_path / "good", whole_run())
    bad = make_run(tmp_path / "bad", [])
    if text is None:
        (bad / "metrics.jsonl").unlink()
    else:
        (bad / "metrics.jsonl").write_text(text)
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
    with pytest.raises(ReportError, match="at least one"):
        write_report([], tmp_path / "page.html")
    assert (run / "metrics.jsonl").read_bytes() == before
    assert sorted(os.listdir(run)) == ["config.yaml", "metrics.jsonl"]
