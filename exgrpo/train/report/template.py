"""Templates of pages: they stand alone, share a look, and show whatever text they are given as text."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from exgrpo.train.builtin import ASSETS


def template(path: Path) -> Template:
    """The template of a file; it may use those that all pages share: `layout.html` and `swatch.html`."""
    loader = FileSystemLoader([path.parent, ASSETS])
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    return environment.get_template(path.name)
