"""Templates of pages: they stand alone, share a look, and show whatever text they are given as text."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from exgrpo.train.builtin import ASSETS

_CONTROLS = {*range(0x20), *range(0x7F, 0xA0)} - {*map(ord, "\t\n\r")}
_DIRECTIONS = {0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
_SURROGATES = range(0xD800, 0xE000)
_NAMED = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in (*_CONTROLS, *_DIRECTIONS, *_SURROGATES)
}
"""What is shown of characters that a browser drops, that turn the order of text around, or that cannot be written."""


def template(path: Path) -> Template:
    """The template of a file; it may use those that all pages share: `layout.html` and `swatch.html`."""
    loader = FileSystemLoader([path.parent, ASSETS])
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, finalize=_shown)
    return environment.get_template(path.name)


def readable(text: str) -> str:
    """A text in which characters that cannot be seen or written stand by their numbers; markup stays markup."""
    return text.translate(_NAMED)


def _shown(value: Any) -> Any:
    return readable(value) if isinstance(value, str) else value
