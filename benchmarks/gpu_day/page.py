"""The record of the day, from what the parts left; `benchmarks.render` makes a page of it."""

import datetime
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.finished import Parts
from benchmarks.gpu_day.parts import Part
from benchmarks.record import Machine, Record, read

TEXTS = (".md", ".txt", ".toml")
"""Endings of results that stand on the page as they are."""


def record_of(parts: Sequence[Part], done: Parts, device: str, reasons: dict[str, str], folder: Path) -> Record:
    """What is known of the parts on a device, in one record.

    The machine and the commit are those of the newest measurement; each part has its own date and revision.

    Args:
        parts: all, in their order.
        done: those that were begun.
        device: name of the GPU, or `cpu`.
        reasons: why parts cannot run here, by name.
        folder: of their results.
    """
    lines: list[dict[str, Any]] = []
    records: list[Record] = []
    for part in parts:
        begun = done.done[part.name] if done.tried(part.name, device) else None
        path = folder / f"{part.name}{part.result}"
        line: dict[str, Any] = {
            "name": part.name,
            "title": part.title,
            "problem": reasons.get(part.name, "not begun yet"),
        }
        if begun:
            line |= {"problem": begun.problem, "date": begun.date, "revision": begun.revision, "seconds": begun.seconds}
            if part.result in TEXTS and path.exists():
                line["text"] = path.read_text(encoding="utf-8")
            if part.result == ".json" and path.exists():
                records.append(read(path))
        lines.append(line)
    newest = max(records, key=lambda one: one.date, default=_empty(device))
    left_out: dict[str, list[str]] = {}
    for one in records:
        for row, reasons_of_row in one.left_out.items():
            known = left_out.setdefault(row, [])
            known += [reason for reason in reasons_of_row if reason not in known]
    return replace(newest, rows=[row for one in records for row in one.rows], left_out=left_out, parts=lines)


def _empty(device: str) -> Record:
    """Where no part has measured anything yet."""
    return Record(str(datetime.date.today()), "", False, Machine(device, "unknown", "unknown", 0, "unknown", {}), [])
