"""The samples of a report as a reader finds them in a browser."""

import pytest

from exgrpo.train.metrics.report.page import write_report
from tests.tools.report.test_browser import screen
from tests.tools.report.test_hostile_texts import HOSTILE
from tests.tools.report.test_samples import answer, hostile_run, sample, with_samples


def opened(browser, page, width=1440):
    screen(browser, width)
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
        samples.append(
            sample(step, step % 5, followed=step % 5 == 0 or (step % 5 == 1 and step < 20), answers=[*fresh, *replayed])
        )
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
    expected = ["question0: what is 0 + 1? (8 visits)", "question1: what is 1 + 1? (4 visits)"]  # the longest first
    assert texts(browser, "#story-question option") == expected
    for question, steps in ((1, range(1, 20, 5)), (0, range(5, 41, 5))):
        choose(browser, "story-question", str(question))
        assert f"question{question}:" in texts(browser, "#story-list article")[0]
        expected = [f"Step {step}: 1 of {1 + step % 2} right" for step in steps]
        assert texts(browser, "#story-list h4") == expected
        assert len(texts(browser, "#story-plot circle")) == len(steps)
        assert len(texts(browser, "#story-plot circle.replayed")) == len([step for step in steps if step % 4 == 0])
    assert "Aha5 is right" in texts(browser, "#story-list .columns")[0]
    assert "Wrong5" in texts(browser, "#story-list .columns")[0]


def test_another_run_has_its_own_samples_and_a_narrow_page_does_not_scroll_sideways(browser, page):
    opened(browser, page, width=390)
    choose(browser, "samples-run", "1")
    assert counted(browser) == "1 of 1 samples"
    assert texts(browser, "#story-question option") == ["question9: what is 9 + 1? (1 visit)"]
    browser.execute_script("for (const each of document.querySelectorAll('details')) each.open = true")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390


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
