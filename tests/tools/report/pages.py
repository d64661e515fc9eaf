"""Runs to be reported on, and a page as its reader sees it."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

from exgrpo.train.metrics.report.page import write_report

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """A page as its reader sees it: rows of the summary, plots by title, text; what it would load, and what it runs.

    `source` is all of it but the scripts, and `figures` has of each plot its words and what plotly.js gets.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        source = path.read_text(encoding="utf-8")
        self.scripts = re.findall(r"<script>(.*?)</script>", source, re.DOTALL)
        self.source = re.sub(r"<script>.*?</script>", "", source, flags=re.DOTALL)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.elements: set[tuple[str, ...]] = set()
        """The names of all elements, each with those of its attributes."""
        self.policy = ""
        self.texts = ""
        self.loads: list[str] = []
        self.rows: list[list[str]] = []
        self.figures: dict[str, dict[str, Any]] = {}
        self.left_out = ""
        self._heading = self._class = ""
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        self.elements.add((tag, *sorted(values)))
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"] or ""
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.loads += [value for name, value in attrs if name in ("src", "href", "xlink:href", "srcset") and value]
        assert tag != "script" or values.get("type") == "application/json"
        assert tag not in ("link", "iframe", "object", "embed", "img", "image")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "h3":
            self._heading = ""
        self._class = values.get("class") or ""
        if self._class == "plot":
            assert values["aria-label"] == self._heading
            self.figures[self._heading] = {"role": values.get("role") or "", "text": ""}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.figures[self._heading]["figure"] = json.loads(data)
            return
        self.texts += data
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data
        if self.open and self.open[-1] == "h3":
            self._heading += data
        if self.open and self.open[-1] == "p" and self._class == "words":
            self.figures[self._heading]["text"] += data
        if self.open and self.open[-1] == "p" and self._class == "left-out":
            self.left_out += data

    def traces(self, title: str) -> dict[str, dict[str, Any]]:
        """The curves of a plot by their names in tooltips; bands have none."""
        return {trace["name"]: trace for trace in self.figures[title]["figure"]["data"] if "name" in trace}

    def bands(self, title: str) -> list[dict[str, Any]]:
        return [trace for trace in self.figures[title]["figure"]["data"] if "name" not in trace]

    def row(self, name: str) -> list[str]:
        return next(row[1:] for row in self.rows if row[0].strip() == name)


QUANTILES = (1, 10, 50, 90, 99)
EQUAL = yaml.safe_load("""
  {truncated: 0.25, timed_out: 1, reward_failed: 0, entropy_gap: 0.05, groups: 8, idle_group_fraction: 0.5,
  learning_rate: 1.0e-6, idle_updates: 1, gradient_tokens: 300, gradient_token_fraction: 0.375, loss: -0.01,
  grad_norm: 0.3, clip_fraction: 0.0, fresh_ratio: 1.0, fresh_ratio_max: 1.5, mismatch/kl_k3: 1.0e-9,
  mismatch/ess: 0.999, staleness: 0.0, tokens_per_second/generate: 250.0, tokens_per_second/score: 500.0,
  tokens_per_second/update: 200.0, matrix_flops_per_second: 1.0e12, mfu: 0.25, mfu/generate: 0.125, mfu/score: 0.5,
  mfu/update: 0.375, prefix_cache_hits: 0.75, tokens_per_second: 100.0, seconds: 25.0, seconds/asleep: 14.0,
  seconds/select: 1.0, seconds/rollout: 10.0, seconds/score: 4.0, seconds/update: 9.0, seconds/push: 1.0,
  seconds/generate: 8.0, seconds/grade: 2.0}""")
"""Numbers that are the same in all steps."""


def training_record(step: int, **changes: Any) -> dict[str, Any]:
    replayed = {"entropy": 0.5, "age": step - 1.0, "times": 1.5, "times_max": step, "ratio": 1.25, "weight": 0.9}
    replayed |= {f"log_ratio/q{q:02}": (q - 50) / 100 for q in QUANTILES}
    growing = {"pass_rate": 0.1, "reward": 0.1, "buffer_questions": 3, "buffer_trajectories": 5, "retired": 1}
    growing |= {"bucket/1": 1, "bucket/2": 2, "generated_tokens": 1000, "mismatch/mean": 1e-6, "mismatch/p99": 1e-5}
    return {
        "step": step,
        "kind": "training",
        **EQUAL,
        **{name: value * step for name, value in growing.items()},
        "entropy": 1.0 / step,
        "response_tokens": 20.0 + step,
        "skipped_updates": step // 2,
        **{f"fresh_log_ratio/q{q:02}": (q - 50) / 1000 * step for q in QUANTILES},
        "replayed": 4 if step > 1 else 0,
        **{f"replayed_{name}": value if step > 1 else None for name, value in replayed.items()},
        **changes,
    }


def held_out(step: int, rate: float) -> dict[str, Any]:
    cost = {"tokens/evaluation": 300, "seconds/evaluation": 6.0, **({"seconds/checkpoint": 0.5} if step else {})}
    lacking = {"held_out/truncated": 0.25, "held_out/without_form": 0.5, "held_out/without_answer": 0.125}
    rates = {"test/pass_rate": rate, "pass_at/2": rate, "test/gsm8k": rate}
    return {"step": step, "kind": "evaluation", **rates, **lacking, **cost}


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
STEP = {"step": 1, "kind": "training", "reward": 0.5, "seconds": 2.0, "seconds/update": 1.0}
SHORT = [held_out(0, 0.25), STEP, held_out(1, 0.5)]


def page_of(tmp_path: Path, *runs: Path) -> Page:
    write_report(runs, tmp_path / "page.html")
    return Page(tmp_path / "page.html")
