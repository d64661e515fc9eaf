"""Templates of pages: they stand alone, share a look, and show whatever text they are given as text.

A page that has scripts names their files in `scripts`, in the order in which they run:

    {% extends "layout.html" %}
    {% set scripts = ["theme.js", "plotly.min.js", "plots.js"] %}

`layout.html` writes them into the page, and allows these scripts, by their hashes, and no other. `plots.html` has the
elements that plots.js fills.
"""

import base64
import hashlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import BaseLoader, Environment, FileSystemLoader, StrictUndefined, Template

from exgrpo.extras import needs
from exgrpo.train.builtin import ASSETS
from exgrpo.train.report.looks import COLOURS, DARK_COLOURS

_CONTROLS = {*range(0x20), *range(0x7F, 0xA0)} - {*map(ord, "\t\n\r")}
_DIRECTIONS = {0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
_SURROGATES = range(0xD800, 0xE000)
_NAMED = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in (*_CONTROLS, *_DIRECTIONS, *_SURROGATES)
}
"""What is shown of characters that a browser drops, that turn the order of text around, or that cannot be written."""
_ENDING = ("</script", "<!--")
"""What a browser does not read as a part of a script."""
_IN_JSON = {code: f"\\u{code:04x}" for code in map(ord, "<>&")}


class _Verbatim:
    """What a template writes as it is: Jinja takes it for markup, and `_shown` leaves it alone."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __html__(self) -> str:
        return self._text


def template(path: Path) -> Template:
    """The template of a file; it may use the files of its folder, those that all pages share, and plotly.min.js."""
    loader = FileSystemLoader([path.parent, ASSETS, _plotly()])
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, finalize=_shown)
    environment.globals["script"] = lambda name: _Verbatim(_script(loader, environment, name))
    environment.globals["script_hash"] = lambda name: _Verbatim(_hash(_script(loader, environment, name)))
    environment.globals["palette"] = list(zip(COLOURS, DARK_COLOURS, strict=True))
    environment.filters["json"] = lambda value: _Verbatim(as_json(value))
    return environment.get_template(path.name)


def readable(text: str) -> str:
    """A text in which characters that cannot be seen or written stand by their numbers; markup stays markup."""
    return text.translate(_NAMED)


def as_json(value: Any) -> str:
    """Plain values as JSON that stands within an element `script`: in ASCII, and without a character of markup."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).translate(_IN_JSON)


def _shown(value: Any) -> Any:
    return readable(value) if isinstance(value, str) else value


def _script(loader: BaseLoader, environment: Environment, name: str) -> str:
    """The text of a script.

    Raises:
        ValueError: it would end the element that it stands in.
    """
    text = loader.get_source(environment, name)[0]
    if any(ending in text.lower() for ending in _ENDING):
        raise ValueError(f"{name}: a script in a page cannot contain {' or '.join(_ENDING)}")
    return text


def _hash(script: str) -> str:
    """What a Content-Security-Policy calls a script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _plotly() -> Path:
    """The folder of plotly.min.js; plotly itself, which takes its time, is not imported."""
    with needs(__name__, "exgrpo[train]"):
        found = find_spec("plotly")
        if found is None or found.origin is None:
            raise ModuleNotFoundError("No module named 'plotly'", name="plotly")
    return Path(found.origin).parent / "package_data"
