"""The page in a browser: tooltips, zoom, switches, dark mode, a run that goes on, a narrow screen; no errors."""

import json
import shutil
import threading
import time

import pytest

from exgrpo.tools.report import open_server
from exgrpo.train.metrics.report.page import write_report
from tests.tools.report.pages import held_out, make_run, training_record, whole_run

PASS_RATE = "plot-0-0"
"""Held-out Pass@1 against steps."""
IN_TRAINING = "plot-0-3"
NAME = "<b>a</b><a href='https:evil.example'>x%{x}"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        make_run(folder / name, whole_run(rate), lr=rate) for name, rate in ((NAME.replace("/", ""), 0.75), ("b", 0.5))
    ]
    write_report(runs, folder / "page.html")
    return (folder / "page.html").as_uri()


def screen(browser, width=1440, mode="light"):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = [{"name": "prefers-color-scheme", "value": mode}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})


def opened(browser, page, **of_screen):
    screen(browser, **of_screen)
    browser.get(page)
    browser.execute_script(f"document.getElementById('{PASS_RATE}').scrollIntoView({{ block: 'center' }})")
    wait(browser, f"document.getElementById('{PASS_RATE}').classList.contains('drawn')")


def wait(browser, condition, seconds=60):
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(browser, seconds).until(lambda driver: ask(driver, condition))


def ask(browser, expression):
    return browser.execute_script(f"return {expression}")


def pointer(browser, *events, held=False):
    """Moves and presses of the pointer at places (0 to 1) of the first plot's area."""
    area = ask(browser, f"document.querySelector('#{PASS_RATE} .nsewdrag').getBoundingClientRect().toJSON()")
    for kind, x, y in events:
        place = {"x": area["x"] + x * area["width"], "y": area["y"] + y * area["height"]}
        pressed = {"button": "left", "buttons": 1} if held or kind != "mouseMoved" else {}
        pressed |= {"clickCount": 1} if kind != "mouseMoved" else {}
        browser.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": kind, **place, **pressed})


def ranges(browser, plot=PASS_RATE):
    return ask(browser, f"document.getElementById('{plot}').layout.xaxis.range")


def drag(browser):
    places = [("mouseMoved", 0.3 + 0.08 * step, 0.5) for step in range(1, 6)]
    pointer(browser, ("mouseMoved", 0.3, 0.5), ("mousePressed", 0.3, 0.5))
    pointer(browser, *places, held=True)
    pointer(browser, ("mouseReleased", 0.7, 0.5))


def test_a_page_opens_from_a_file_and_draws_what_is_in_view(browser, page):
    browser.get_log("browser")
    opened(browser, page)
    drawn, all_of_them = ask(browser, "['.drawn', '.plot'].map((name) => document.querySelectorAll(name).length)")
    assert 0 < drawn < all_of_them / 2
    browser.execute_script("scrollTo(0, document.body.scrollHeight)")
    wait(browser, "document.querySelectorAll('.drawn').length > " + str(drawn))
    assert browser.get_log("browser") == []


def test_a_tooltip_names_the_run_the_step_and_the_value(browser, page):
    opened(browser, page)
    last = ask(browser, f"document.getElementById('{PASS_RATE}').layout.xaxis.range[1]")
    low, high = ask(browser, f"document.getElementById('{PASS_RATE}').layout.yaxis.range")
    pointer(browser, ("mouseMoved", 0.5, 0.5), ("mouseMoved", (4 + 0.12) / (last + 0.12), (high - 0.75) / (high - low)))
    wait(browser, f"document.querySelector('#{PASS_RATE} .hovertext') !== null")
    text = ask(browser, f"document.querySelector('#{PASS_RATE} .hovertext').textContent")
    assert text == f"{NAME.replace('/', '')}step 4: 0.75"
    assert ask(browser, "document.querySelectorAll('.plot a').length") == 0


def test_a_drag_zooms_the_plots_of_a_section_and_a_double_click_ends_it(browser, page):
    opened(browser, page)
    wait(browser, f"document.getElementById('{IN_TRAINING}').classList.contains('drawn')")
    whole = ranges(browser)
    drag(browser)
    wait(browser, f"document.getElementById('{PASS_RATE}').layout.xaxis.range[0] > 0.5")
    zoomed = ranges(browser)
    assert whole[0] < zoomed[0] < zoomed[1] < whole[1]
    assert ranges(browser, IN_TRAINING) == zoomed
    assert ranges(browser, "plot-0-1") != zoomed  # against tokens
    ended = f"document.getElementById('{PASS_RATE}').layout.xaxis.range[0] < 0"
    for _ in range(20):  # on a busy machine two clicks may be too far apart for one double click
        for _ in range(2):
            pointer(browser, ("mousePressed", 0.5, 0.5), ("mouseReleased", 0.5, 0.5))
        time.sleep(1)
        if ask(browser, ended):
            break
    wait(browser, ended)
    assert ranges(browser) == ranges(browser, IN_TRAINING) == whole


def test_a_legend_switches_the_curves_of_a_run(browser, page):
    opened(browser, page)
    shown = f"document.querySelectorAll('#{PASS_RATE} .scatterlayer .trace').length"
    assert ask(browser, shown) == 2
    browser.execute_script("document.querySelector('[data-group=\"1\"]').click()")
    wait(browser, f"{shown} === 1")
    assert ask(browser, "document.querySelector('[data-group=\"1\"]').ariaPressed") == "false"


def test_dark_mode_follows_the_system_and_the_switch(browser, page):
    colours = (
        "[getComputedStyle(document.body).backgroundColor, "
        f"document.querySelector('#{PASS_RATE} .scatterlayer .lines path').style.stroke]"
    )
    opened(browser, page)
    light = ask(browser, colours)
    opened(browser, page, mode="dark")
    dark = ask(browser, colours)
    assert light[0] != dark[0]
    assert light[1] == "rgb(0, 114, 178)"  # Okabe and Ito's blue
    assert dark[1] == "rgb(74, 163, 240)"
    browser.execute_script("document.getElementById('theme').click()")
    assert ask(browser, colours) == light
    browser.execute_script("localStorage.clear()")


@pytest.mark.parametrize("width", [390, 1440])
def test_the_first_screen_has_the_result_and_its_curves(browser, page, width):
    screen(browser, width=width)
    browser.get(page)
    wait(browser, "document.querySelector('.first .plot').classList.contains('drawn')")
    assert ask(browser, "document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    places = [f"document.querySelector('{of}').getBoundingClientRect().bottom" for of in (".result", ".first .plot")]
    result, curves = [ask(browser, place) for place in places]
    assert 0 < result < curves < 900


def test_a_followed_run_shows_a_new_step_and_keeps_the_zoom_and_the_place(browser, tmp_path):
    run = tmp_path / "one"
    server = open_server([run], 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        screen(browser)
        browser.get_log("browser")
        browser.get(f"http://127.0.0.1:{server.server_port}/")
        assert "there is no folder" in ask(browser, "document.body.innerText")
        run.mkdir()
        wait(browser, "document.body.innerText.includes('one: waiting for the first step')")
        make_run(tmp_path / "made", [held_out(0, 0.25), *(training_record(step) for step in range(1, 5))])
        (tmp_path / "made" / "metrics.jsonl").rename(run / "metrics.jsonl")
        count = f"document.getElementById('{IN_TRAINING}')?.data?.at(-1).x.length"
        wait(browser, f"{count} === 4")
        browser.execute_script("scrollTo(0, 300)")
        drag(browser)
        zoomed = ranges(browser)
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(training_record(5)) + "\n")
        wait(browser, f"{count} === 5")
        assert ranges(browser) == zoomed
        assert ask(browser, "scrollY") == 300
        shutil.rmtree(run)
        wait(browser, "document.body.innerText.includes('there is no folder')")
        assert [entry for entry in browser.get_log("browser") if "favicon" not in entry["message"]] == []
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
