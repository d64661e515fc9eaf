"""The site of the documentation: it is whole, needs no network, and fits on a phone."""

import html
import importlib.util
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from pydantic import BaseModel

from exgrpo.train.config.options import Config
from tests.browser import ask, screen, wait
from tests.browser import browser as browser
from tests.programs import python

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site"
for package in ("sphinx", "myst_parser", "furo"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install 'exgrpo[docs]'")

WIDTHS = (390, 1440)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the pages, built with warnings as errors: links to pages, headings and files, too."""
    folder = tmp_path_factory.mktemp("site")
    command = ("-m", "sphinx", "-q", "-W", "--keep-going", "-d", folder / ".doctrees", "-c", SITE)
    python(*command, ROOT, folder)
    return folder


class Loaded(HTMLParser):
    """What a page makes a browser load, other than the pages that it links to."""

    def __init__(self):
        super().__init__()
        self.places = []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if "src" in attributes:
            self.places.append(attributes["src"])
        if tag == "link" and attributes.get("rel") in ("stylesheet", "icon", "preload"):
            self.places.append(attributes["href"])


def test_every_page_of_the_repository_is_there(site):
    sources = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("studies/results/*.md"), ROOT / "ARCHITECTURE.md"]
    assert len(sources) > 30
    for source in sources:
        assert (site / source.relative_to(ROOT)).with_suffix(".html").exists()


def test_a_browser_loads_nothing_from_elsewhere(site):
    pages = sorted(site.rglob("*.html"))
    for page in pages:
        loaded = Loaded()
        loaded.feed(page.read_text())
        for place in loaded.places:
            assert not re.match(r"(\w+:)?//", place), f"{page.name} loads {place}"
            assert (page.parent / html.unescape(place).split("?")[0]).exists(), f"{page.name} lacks {place}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", style.read_text()), style.name


def test_formulas_are_drawn_without_a_script(site):
    page = (site / "docs" / "mathematics.html").read_text()
    assert page.count("<math") > 30
    assert "$" not in re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)


def dotted(model, prefix=""):
    """The keys of all options of a model and of its sections, from the models themselves."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from dotted(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def test_the_reference_has_each_option_with_its_default_and_meaning():
    spec = importlib.util.spec_from_file_location("options_of_site", SITE / "options.py")
    options = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(options)
    entries = re.findall(
        r"^```\{confval\} (\S+)\n:type: ([^\n]+)\n:default: ([^\n]+)\n\n(.+?)\n```$",
        options.reference(),
        re.MULTILINE | re.DOTALL,
    )
    by_key = {key: rest for key, *rest in entries}
    expected = dict(dotted(Config))
    assert len(expected) > 80
    for key, field in expected.items():
        _, default, meaning = by_key[key]
        assert meaning == field.description
        if field.is_required():
            assert default == "none, it must be named"
    assert set(by_key) - set(expected) == {
        *(f"evaluation.sets.NAME.{name}" for name in ("source", "split", "limit", "samples", "temperature", "top_p")),
        *(f"data.sources[].{name}" for name in ("source", "columns", "prompt_format", "reward", "stop")),
    }
    assert by_key["rollout.samples"][:2] == ["integer from 2 to 16,384", "`8`"]
    assert by_key["evaluation.top_p"][:2] == ["number above 0 to 1", "`1.0`"]
    assert by_key["data.test"][:2] == ["list of: text or `None`", "`None`"]
    assert by_key["objective.kl"][:2] == ["one of `k1`, `k2`, `k3`", "`k3`"]


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_is_wider_than_the_window(site, browser, width):
    screen(browser, width=width)
    for page in sorted(site.rglob("*.html")):
        browser.get(page.as_uri())
        assert ask(browser, "document.scrollingElement.scrollWidth") <= width, page.name


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("micro_batch_tokens", "docs/options.html"),
        ("linear_policy_loss", "docs/api.html"),
        ("retirement", "docs/concepts.html"),
    ],
)
def test_the_search_finds_pages_in_a_folder_of_files(site, browser, words, page):
    browser.get(f"{(site / 'search.html').as_uri()}?q={words}")
    links = "[...document.querySelectorAll('#search-results li a')].map(link => link.getAttribute('href'))"
    wait(browser, f"{links}.length")
    assert page in [link.partition("#")[0].partition("?")[0] for link in ask(browser, links)]
