"""The plots of a report: which there are, and which of them say nothing about its runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from exgrpo.train.builtin import ASSETS as ALL_ASSETS
from exgrpo.train.report.draw import Fan, Plot, PlotGroup, Stack, draw_fan, draw_lines, draw_stacks
from exgrpo.train.report.figures import rounded
from exgrpo.train.report.panels import Panel, source_panels, variety_panels

ASSETS = ALL_ASSETS / "report"


@dataclass(frozen=True)
class Section:
    """Plots that answer one question.

    Attributes:
        number: of the section in plots.yaml.
        title: the question.
        text: how to read the plots.
        plots: those that say something.
        left_out: the titles of the others, by the reason.
    """

    number: int
    title: str
    text: str
    plots: list[Plot]
    left_out: dict[str, list[str]]


def sections(groups: Sequence[PlotGroup]) -> list[Section]:
    """The plots of a report as assets/report/plots.yaml lists them; without sections in which no plot says anything."""
    result = []
    for number, plan in enumerate(yaml.safe_load((ASSETS / "plots.yaml").read_text(encoding="utf-8"))):
        telling: list[Plot] = []
        left_out: dict[str, list[str]] = {}
        for plot in _planned(plan, groups, number):
            if reason := says_nothing(plot, telling):
                left_out.setdefault(reason, []).append(plot.title)
            else:
                telling.append(plot)
        if telling:
            result.append(Section(number, plan["title"], plan["text"], telling, left_out))
    return result


def _planned(plan: dict[str, Any], groups: Sequence[PlotGroup], number: int) -> list[Plot]:
    """All plots of a section; their names stay the same while a run goes on."""
    every = [run for group in groups for run in group.runs]
    panels = [Panel(**panel) for panel in plan["panels"]]
    if plan.get("sources"):
        panels += source_panels(every)
    if plan.get("variety"):
        panels += variety_panels(every)
    plots = [draw_lines(panel, groups, f"plot-{number}-{i}") for i, panel in enumerate(panels)]
    plots += [draw_fan(Fan(**fan), groups, f"fan-{number}-{i}") for i, fan in enumerate(plan.get("fans", []))]
    for i, stack in enumerate(plan.get("stacks", [])):
        plots += draw_stacks(Stack(**stack), groups, f"stack-{number}-{i}")
    return plots


def says_nothing(plot: Plot, others: Sequence[Plot]) -> str:
    """Why a plot is left out beside others: it has no numbers, one number only, or the curves of another one; or ""."""
    if not plot.curves:
        return "without numbers"
    values = np.array(rounded(np.concatenate([curve.y for curve in plot.curves])))
    steps = np.concatenate([curve.x for curve in plot.curves])
    one = bool((values == values[0]).all()) and not (plot.constant or plot.one_group)
    # A single step has one number of everything: only 0 says nothing there.
    if one and (values[0] == 0 or len(np.unique(steps)) > 1):
        return f"always {values[0]:.4g}"
    return next((f"the same as “{other.title}”" for other in others if _same(plot, other)), "")


def _same(one: Plot, other: Plot) -> bool:
    if one.one_group or one.x != other.x or len(one.curves) != len(other.curves):
        return False
    pairs = zip(one.curves, other.curves, strict=True)
    return all(np.array_equal(a.x, b.x) and np.array_equal(a.y, b.y) for a, b in pairs)
