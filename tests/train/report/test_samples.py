"""The samples of a report: what is kept of many, and what a reader finds in the page."""

import json
import re
import shutil

import pytest

from exgrpo.train.report.page import write_report
from exgrpo.train.report.runs import load_run
from exgrpo.train.report.samples import RunSamples, bounded, for_page, samples_of
from exgrpo.train.report.template import as_json
from exgrpo.train.samples import Sample, SampledAnswer, to_line
from tests.train.report.pages import SHORT, make_run
from tests.train.report.test_hostile_texts import HOSTILE, SHOWN, TEXTS


def answer(text, reward=1.0, **more):
    return SampledAnswer((("policy", text),), reward, True, len(text), **more)


def sample(step, question=0, *, followed=False, answers=()):
    text = f"question{question}: what is {question} + 1?"
    return Sample(step, question, text, str(question + 1), followed, tuple(answers))


def with_samples(folder, samples, **options):
    run = make_run(folder, SHORT, **options)
    (run / "samples.jsonl").write_text("".join(map(to_line, samples)))
    return run


def data_of(page):
    return json.loads(re.search(r'id="samples-data">(.*?)</script>', page.read_text(), re.DOTALL)[1])


def test_the_page_has_the_samples_of_every_run_that_has_some(tmp_path):
    answers = [answer("one", 0.5), answer("two", 0.0, replayed_from=1, entropy=0.25)]
    first = with_samples(tmp_path / "first", [sample(1), sample(2, answers=answers)], reward={"success": 0.5})
    older, second = make_run(tmp_path / "older", SHORT), with_samples(tmp_path / "second", [sample(1, 3)])
    write_report([first, older, second], tmp_path / "page.html")
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
    write_report([older], tmp_path / "older.html")
    assert "samples-data" not in re.sub(r"<script>.*?</script>", "", (tmp_path / "older.html").read_text(), flags=re.S)


def test_the_cut_last_line_of_a_run_is_left_out(tmp_path):
    run = with_samples(tmp_path / "run", [sample(1), sample(2)])
    content = (run / "samples.jsonl").read_text()
    (run / "samples.jsonl").write_text(content[:-20])
    assert [one.step for one in load_run(run, "run").samples] == [1]


def test_of_many_samples_those_that_are_followed_and_newer_ones_are_kept():
    runs = [
        RunSamples("a", 1.0, tuple(sample(step, step % 3, followed=step % 3 == 0) for step in range(1, 31))),
        RunSamples("b", 1.0, tuple(sample(step, 1) for step in range(1, 31))),
    ]
    sizes = {len(as_json(one)) for run in for_page(runs) for one in run["samples"]}
    most = (max(sizes) + 1) * 20
    kept = bounded(runs, most)
    assert bounded(runs) == runs
    assert sum(len(as_json(run["samples"])) for run in for_page(kept)) <= most
    assert [run.left_out for run in kept] == [
        len(was.samples) - len(run.samples) for was, run in zip(runs, kept, strict=True)
    ]
    assert [one.step for one in kept[0].samples if one.followed] == list(range(3, 31, 3))
    others = [one.step for run in kept for one in run.samples if not one.followed]
    lost = {one.step for was, run in zip(runs, kept, strict=True) for one in set(was.samples) - set(run.samples)}
    assert len(others) >= 10
    assert min(others) >= max(lost)
    assert all(list(run.samples) == sorted(run.samples, key=lambda one: one.step) for run in kept)


def test_a_page_says_how_many_samples_were_left_out(tmp_path, monkeypatch):
    run = with_samples(tmp_path / "run", [sample(step) for step in range(1, 11)])
    (loaded,) = samples_of([load_run(run, "run")])
    one = len(as_json(for_page([loaded])[0]["samples"][0])) + 3
    monkeypatch.setattr("exgrpo.train.report.samples.bounded.__defaults__", (4 * one,))
    write_report([run], tmp_path / "page.html")
    assert "run: 6 older samples are left out here" in (tmp_path / "page.html").read_text()
    assert [each["step"] for each in data_of(tmp_path / "page.html")[0]["samples"]] == [7, 8, 9, 10]


def hostile_run(folder):
    samples = [
        Sample(step, step, text, text, True, (answer(text), answer(text, 0.0, replayed_from=1)))
        for step, text in enumerate((*TEXTS, "a\u2028b"), start=1)
    ]
    return with_samples(folder, samples)


def test_hostile_texts_stay_in_their_json(tmp_path):
    write_report([hostile_run(tmp_path / "run")], tmp_path / "page.html")
    source = (tmp_path / "page.html").read_text()
    data = re.search(r'id="samples-data">(.*?)</script>', source, re.DOTALL)[1]
    assert not set(data) & set("<>&\u2028")
    assert [one["text"] for one in json.loads(data)[0]["samples"]] == [*SHOWN, "a\u2028b"]


# --- In a browser ---


@pytest.fixture(scope="module")
def browser():
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("chromium and chromedriver are not installed")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


def opened(browser, page, width=1440):
    """The page at a width in CSS pixels, of which a window may have no fewer than 500."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get_log("browser")
    browser.get(page.as_uri())
    return browser


def texts(browser, selector):
    script = "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)"
    return browser.execute_script(script, selector)


def choose(browser, identifier, value):
    """Type or choose, and wait until the search is done."""
    script = """
        const field = document.getElementById(arguments[0]);
        field.value = arguments[1];
        field.dispatchEvent(new Event("input"));
        field.dispatchEvent(new Event("change"));
        setTimeout(arguments[2], 300);
    """
    browser.execute_async_script(script, identifier, value)


def counted(browser):
    return texts(browser, "#samples-count")[0]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    samples = []
    for step in range(1, 41):
        fresh = [answer(f"Aha{step} is right", 1.0), answer(f"Wrong{step}", 0.0)][: 1 + step % 2]
        replayed = [answer(f"again{step}", replayed_from=step - 1, entropy=0.125)] if step % 4 == 0 else []
        samples.append(sample(step, step % 5, followed=step % 5 < 2, answers=[*fresh, *replayed]))
    long = answer("word " * 200 + "W" * 300, 0.0)
    runs = [
        with_samples(folder / "one", samples),
        with_samples(folder / "two", [sample(1, 9, followed=True, answers=[long])], only=2),
    ]
    write_report(runs, folder / "page.html")
    return folder / "page.html"


def test_a_search_finds_and_filters_filter(browser, page):
    opened(browser, page)
    assert counted(browser) == "40 of 40 samples"
    assert len(texts(browser, "#samples-list article")) == 20
    browser.execute_script("document.getElementById('samples-more').click()")
    assert len(texts(browser, "#samples-list article")) == 40
    assert browser.execute_script("return document.getElementById('samples-more').hidden")
    choose(browser, "samples-words", "AHA17 question2")
    assert counted(browser) == "1 of 40 samples"
    assert "Aha17 is right" in texts(browser, "#samples-list article")[0]
    choose(browser, "samples-kind", "wrong")  # the same answer has to have the words and to be wrong
    assert counted(browser) == "0 of 40 samples"
    choose(browser, "samples-words", "")
    assert counted(browser) == "20 of 40 samples"
    choose(browser, "samples-step", "10-13")
    assert counted(browser) == "2 of 40 samples"
    choose(browser, "samples-step", "12")
    choose(browser, "samples-kind", "replayed")
    assert counted(browser) == "1 of 40 samples"
    (shown,) = texts(browser, "#samples-list .columns > div:nth-child(2)")
    assert "replayed from step 11, entropy 0.125 nats" in shown
    assert "again12" in shown


def test_a_story_changes_with_the_question(browser, page):
    opened(browser, page)
    longest, *_, shortest = (
        int(re.search(r"\((\d+) visits\)", t)[1]) for t in texts(browser, "#story-question option")
    )
    assert longest >= shortest == len(range(5, 41, 5))
    for question, steps in ((1, range(1, 41, 5)), (0, range(5, 41, 5))):
        choose(browser, "story-question", str(question))
        assert f"question{question}:" in texts(browser, "#story-list article")[0]
        expected = [f"Step {step}: 1 of {1 + step % 2} right" for step in steps]
        assert texts(browser, "#story-list h4") == expected
        assert len(texts(browser, "#story-plot circle")) == len(steps)
        assert len(texts(browser, "#story-plot circle.replayed")) == len([step for step in steps if step % 4 == 0])
    assert "Aha5 is right" in texts(browser, "#story-list .columns")[0]
    assert "Wrong5" in texts(browser, "#story-list .columns")[0]


def test_another_run_has_its_own_samples(browser, page):
    opened(browser, page)
    choose(browser, "samples-run", "1")
    assert counted(browser) == "1 of 1 samples"
    assert texts(browser, "#story-question option") == ["question9: what is 9 + 1? (1 visit)"]
    assert not texts(browser, "#story-plot svg")  # one point says nothing
    assert browser.execute_script("return document.querySelector('#samples-list details').open") is False


@pytest.mark.parametrize("run", ["0", "1"])
def test_a_narrow_page_has_one_column_and_no_sideways_scroll(browser, page, run):
    opened(browser, page, width=390)
    choose(browser, "samples-run", run)
    browser.execute_script("for (const each of document.querySelectorAll('details')) each.open = true")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    script = "return [...document.querySelectorAll('#samples-list .columns > div')].map((e) => e.offsetLeft)"
    assert len(set(browser.execute_script(script))) == 1
    opened(browser, page)
    assert len(set(browser.execute_script(script))) == 2
    assert [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"] == []


def test_hostile_texts_are_texts(browser, tmp_path):
    write_report([hostile_run(tmp_path / "run")], tmp_path / "page.html")
    opened(browser, tmp_path / "page.html")
    while not browser.execute_script(
        "const more = document.getElementById('samples-more'); more.click(); return more.hidden"
    ):
        pass
    shown = "".join(texts(browser, "#samples-list .said"))
    assert all(shown.count(text) >= 4 for text in HOSTILE)
    strange = (
        "#samples :is(img, iframe, a, svg, script, link, meta, pre), #story :is(img, iframe, a, script, link, meta)"
    )
    assert texts(browser, strange) == []
    assert browser.get_log("browser") == []


def test_a_page_of_many_samples_shows_few(browser, tmp_path):
    """Ten thousand groups are in the page, and only the first ones are made; a search goes through all of them."""
    samples = [sample(step, step % 7, answers=[answer(f"x{step}")]) for step in range(1, 10_001)]
    write_report([with_samples(tmp_path / "run", samples)], tmp_path / "page.html")
    opened(browser, tmp_path / "page.html")
    assert counted(browser) == "10000 of 10000 samples"
    assert len(texts(browser, "#samples-list article")) == 20
    choose(browser, "samples-words", "x77 question0")
    assert (
        counted(browser)
        == f"{len([s for s in range(1, 10_001) if str(s).startswith('77') and s % 7 == 0])} of 10000 samples"
    )
