"""Stored experience as one self-contained HTML page: counts, histograms, and the answers to the fullest questions."""

from pathlib import Path

from exgrpo.train.builtin import ASSETS
from exgrpo.train.errors import OutputError, os_errors_as
from exgrpo.train.experience_data.show import counts
from exgrpo.train.experience_data.stored import Experience, Overview
from exgrpo.train.report.draw import draw_histogram
from exgrpo.train.report.figures import template

QUESTIONS = 100
"""So many questions are on a page, those with most trajectories."""


def write_page(experience: Experience, overview: Overview, output: Path) -> None:
    """Write the page; it replaces an older one.

    Raises:
        OutputError: its name does not end in .html, or it cannot be written.
        ExgrpoError: the texts cannot be had; see `Experience.questions`.
    """
    if output.suffix.lower() not in (".html", ".htm"):
        raise OutputError(f"{output}: choose a name that ends in .html")
    page = template(ASSETS / "experience" / "page.html").render(
        title=f"Experience of {overview.title}",
        counts=counts(overview),
        plots=[
            draw_histogram(name, values, f"histogram-{number}")
            for number, (name, values) in enumerate(overview.distributions.items())
        ],
        questions=experience.questions(overview.fullest(QUESTIONS)),
    )
    unfinished = output.with_name(f".{output.name}.unfinished")
    with os_errors_as(OutputError, f"{output} cannot be written"):
        output.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(output)
