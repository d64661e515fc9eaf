"""Runs to be reported on, and a page as its reader sees it."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from exgrpo.train.metrics.report.page import write_report


class Page(HTMLParser):
    """Names and attributes of all elements, texts outside of scripts, rows of tables, and plots by title."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.elements: set[tuple[str, ...]] = set()
        self.texts = ""
        self.rows: list[list[str]] = []
        self.plots: dict[str, dict[str, Any]] = {}
        self._open: list[str] = []
        self.feed(self.source)
        for found in re.finditer(r'Plotly\.newPlot\(\s*"[-\w]+",\s*', self.source):
            data, end = json.JSONDecoder().raw_decode(self.source, found.end())
            layout, _ = json.JSONDecoder().raw_decode(self.source, re.compile(r",\s*").match(self.source, end).end())
            self.plots[layout["title"]["text"]] = {"data": data, "layout": layout}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open.append(tag)
        self.elements.add((tag, *(name for name, _ in attrs)))
        if tag == "tr":
            self.rows.append([])

    def handle_data(self, data: str) -> None:
        if self._open[-1:] in (["td"], ["th"]):
            self.rows[-1].append(data)
        if self._open[-1:] != ["script"]:
            self.texts += data

    def handle_endtag(self, tag: str) -> None:
        while self._open.pop() != tag:
            pass

    def row(self, name: str) -> list[str]:
        return next(row[1:] for row in self.rows if row[0] == name)

    def lines(self, title: str) -> dict[str, tuple[list[float], list[float]]]:
        """x and y of the curves of a plot by their names."""
        drawn = [trace for trace in self.plots[title]["data"] if "fill" not in trace]
        return {trace["name"]: (values(trace["x"]), values(trace["y"])) for trace in drawn}

    def bands(self, title: str) -> list[list[float]]:
        return [values(trace["y"]) for trace in self.plots[title]["data"] if "fill" in trace]


def values(array: Any) -> list[float]:
    """Numbers as plotly.js reads them."""
    return np.frombuffer(base64.b64decode(array["bdata"]), array["dtype"]).tolist() if "bdata" in array else array


QUANTILES = ("q01", "q10", "q50", "q90", "q99")
EQUAL = yaml.safe_load("""
  {truncated: 0.25, timed_out: 1, reward_failed: 0, groups: 8, idle_group_fraction: 0.5, loss: -0.01, grad_norm: 0.3,
  clip_fraction: 0.0, fresh_ratio: 1.0, mismatch/kl_k3: 1.0e-9, mismatch/mean: 1.0e-6, mismatch/p99: 1.0e-5,
  mismatch/ess: 0.999, staleness: 0.0, tokens_per_second: 100.0, tokens_per_second/generate: 250.0, mfu: 0.25,
  mfu/generate: 0.125, seconds: 25.0, seconds/rollout: 10.0, seconds/update: 9.0, reward/math: 0.5,
  replayed_entropy: 0.5, replayed_age: 2.0, replayed_ratio: 1.25}""")
"""Numbers that are the same in all steps."""


def training_record(step: int, **changes: Any) -> dict[str, Any]:
    growing = {"pass_rate": 0.1, "reward": 0.1, "buffer_questions": 3, "retired": 1, "bucket/1": 1, "bucket/2": 2}
    ratios = {f"{kind}_log_ratio/{q}": 0.001 * step for kind in ("fresh", "replayed") for q in QUANTILES}
    grown = {name: value * step for name, value in {**growing, "generated_tokens": 1000}.items()}
    counts = {"skipped_updates": step // 2, "replayed": 4 if step > 1 else 0}
    of_step = {"entropy": 1.0 / step, "response_tokens": 20.0 + step, **counts}
    return {"step": step, "kind": "training", **EQUAL, **grown, **ratios, **of_step, **changes}


def held_out(step: int, rate: float) -> dict[str, Any]:
    lacking = {"held_out/truncated": 0.25, "held_out/without_form": 0.5, "seconds/evaluation": 6.0}
    rates = dict.fromkeys(("test/pass_rate", "pass_at/2", "distinct_at/2", "test/gsm8k"), rate)
    return {"step": step, "kind": "evaluation", **rates, "hard/pass_rate": 0.5, **lacking}


def make_run(folder: Path, records: list[Any], *, seed: int = 0, **options: Any) -> Path:
    folder.mkdir(parents=True)
    config = {"seed": seed, "steps": 4, "experience": {"ratio": 0.5}, "output": {"name": folder.name}, **options}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [record if isinstance(record, str) else json.dumps(record) + "\n" for record in records]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def whole_run(after: float = 0.75, **changes: Any) -> list[dict[str, Any]]:
    return [held_out(0, 0.25), *(training_record(step, **changes) for step in range(1, 5)), held_out(4, after)]


# Two steps and few metrics: quickly drawn, where a test is about something else.
SHORT = [held_out(0, 0.25), {"step": 1, "kind": "training", "reward": 0.5, "seconds": 2.0}, held_out(1, 0.5)]


def page_of(folder: Path, *runs: Path) -> Page:
    write_report(runs, folder / "page.html")
    return Page(folder / "page.html")
