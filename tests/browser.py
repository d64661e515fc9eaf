"""A browser for the tests of pages."""

import atexit
import shutil
from functools import cache

import pytest


@pytest.fixture(scope="session")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: exgrpo[test]")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (program and driver):
        pytest.skip("there is no chromium or google-chrome with its chromedriver")
    return started(webdriver, program, driver)


@cache
def started(webdriver, program, driver):
    """Start one browser for all test modules that use this fixture, until the process ends."""
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for switch in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1440,900"):
        options.add_argument(f"--{switch}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    atexit.register(opened.quit)
    opened.set_script_timeout(60)
    return opened


def screen(browser, width):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def wait(browser, condition, seconds=60):
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(browser, seconds).until(lambda driver: ask(driver, condition))


def ask(browser, expression):
    return browser.execute_script(f"return {expression}")
