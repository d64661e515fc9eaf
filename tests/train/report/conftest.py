"""A browser for the tests of pages."""

import shutil

import pytest


@pytest.fixture(scope="package")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: exgrpo[test]")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (program and driver):
        pytest.skip("there is no chromium or google-chrome with its chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for switch in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1440,900"):
        options.add_argument(f"--{switch}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    opened.set_script_timeout(60)
    yield opened
    opened.quit()
