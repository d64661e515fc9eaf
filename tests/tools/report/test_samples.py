"""The samples of a report: what is kept of many, and what a reader finds in the page."""

import json
import re

from exgrpo.train.metrics.report.figures import as_json
from exgrpo.train.metrics.report.page import shown_samples, write_report
from exgrpo.train.metrics.report.runs import RunColumns, RunData, load_run
from exgrpo.train.metrics.samples import Sample, SampledAnswer, to_line
from tests.tools.report.pages import SHORT, make_run
from tests.tools.report.test_hostile_texts import SHOWN, TEXTS


def answer(text, reward=1.0, **more):
    return SampledAnswer((("policy", text),), reward, True, len(text), **more)


def sample(step, question=0, *, followed=False, answers=()):
    text = f"question{question}: what is {question} + 1?"
    return Sample(step, question, text, str(question + 1), followed, tuple(answers))


def with_samples(fwithout, samples, **options):
    run = make_run(fwithout, SHORT, **options)
    (run / "samples.jsonl").write_text("".join(map(to_line, samples)))
    return run


def data_of(page):
    return json.loads(re.search(r'id="samples-data">(.*?)</script>', page.read_text(), re.DOTALL)[1])


def test_the_page_has_the_samples_of_every_run_that_has_some(tmp_path):
    answers = [answer("one", 0.5), answer("two", 0.0, replayed_from=1, entropy=0.25)]
    first = with_samples(tmp_path / "first", [sample(1), sample(2, answers=answers)], reward={"success": 0.5})
    with (first / "samples.jsonl").open("a") as file:
        file.write(to_line(sample(3))[:-20])  # cut as a run was killed
    without, second = make_run(tmp_path / "without", SHORT), with_samples(tmp_path / "second", [sample(1, 3)])
    write_report([first, without, second], tmp_path / "page.html")
    runs = data_of(tmp_path / "page.html")
    assert [(run["name"], run["success"], len(run["samples"])) for run in runs] == [
        ("first", 0.5, 2),
        ("second", 1.0, 1),
    ]
    assert runs[0]["samples"][1] == {
        "step": 2, "question": 0, "text": "question0: what is 0 + 1?", "gold": "1", "followed": False, "answers": [
            {"parts": [["policy", "one"]], "reward": 0.5, "finished": True, "tokens": 3, "replayed_from": None,
             "entropy": None},
            {"parts": [["policy", "two"]], "reward": 0.0, "finished": True, "tokens": 3, "replayed_from": 1,
             "entropy": 0.25},
        ],
    }  # fmt: skip
    write_report([without], tmp_path / "without.html")
    assert "samples-data" not in re.sub(
        r"<script>.*?</script>", "", (tmp_path / "without.html").read_text(), flags=re.S
    )


def test_of_many_samples_those_that_are_followed_and_newer_ones_are_kept():
    every = [[sample(n, n % 3, followed=n % 3 == 0) for n in range(1, 31)], [sample(n, 1) for n in range(1, 31)]]
    runs = [RunData(name, {}, RunColumns({}, {}, {}), [], tuple(of)) for name, of in zip("ab", every, strict=True)]
    whole = shown_samples(runs)
    assert [(len(run["samples"]), run["left_out"]) for run in whole] == [(30, 0), (30, 0)]
    most = (max(len(as_json(one)) for run in whole for one in run["samples"]) + 1) * 20
    kept = shown_samples(runs, most)
    assert sum(len(as_json(run["samples"])) for run in kept) <= most
    assert [run["left_out"] for run in kept] == [30 - len(run["samples"]) for run in kept]
    assert [one["step"] for one in kept[0]["samples"] if one["followed"]] == list(range(3, 31, 3))
    others = [one["step"] for run in kept for one in run["samples"] if not one["followed"]]
    steps = [{one["step"] for one in run["samples"]} for run in kept]
    assert len(others) >= 10
    assert min(others) >= max(
        one.step for of, there in zip(every, steps, strict=True) for one in of if one.step not in there
    )
    assert all(run["samples"] == sorted(run["samples"], key=lambda one: one["step"]) for run in kept)


def test_a_page_says_how_many_samples_were_left_out(tmp_path, monkeypatch):
    run = with_samples(tmp_path / "run", [sample(step) for step in range(1, 11)])
    one = len(as_json(shown_samples([load_run(run, "run")])[0]["samples"][0])) + 3
    monkeypatch.setattr("exgrpo.train.metrics.report.page.shown_samples.__defaults__", (4 * one,))
    write_report([run], tmp_path / "page.html")
    assert "run: 6 older samples are left out here" in (tmp_path / "page.html").read_text()
    assert [each["step"] for each in data_of(tmp_path / "page.html")[0]["samples"]] == [7, 8, 9, 10]


def hostile_run(fwithout):
    samples = [
        Sample(step, step, text, text, True, (answer(text), answer(text, 0.0, replayed_from=1)))
        for step, text in enumerate((*TEXTS, "a\u2028b"), start=1)
    ]
    return with_samples(fwithout, samples)


def test_hostile_texts_stay_in_their_json(tmp_path):
    write_report([hostile_run(tmp_path / "run")], tmp_path / "page.html")
    source = (tmp_path / "page.html").read_text()
    data = re.search(r'id="samples-data">(.*?)</script>', source, re.DOTALL)[1]
    assert not set(data) & set("<>&\u2028")
    assert [one["text"] for one in json.loads(data)[0]["samples"]] == [*SHOWN, "a\u2028b"]
