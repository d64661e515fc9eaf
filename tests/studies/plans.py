"""Studies and results to test with."""

from pathlib import Path

import numpy as np
import yaml

from studies.findings import SCORES
from studies.results import COSTS, Result

PLAN = {"title": "A trial", "text": "Which is better?", "tasks": {"countdown": {"recipes": ["builtin:countdown"]}}}
PLAN |= {"arms": {"without": {"settings": {"experience.ratio": 0}}, "with": {}}, "baseline": "without"}
PLAN |= {"settings": {"steps": 4, "questions": 8, "evaluation.samples": 4}, "seeds": [0, 1]}


def write(folder: Path, **changes: object) -> Path:
    """A study's file."""
    path = folder / "trial.yaml"
    path.write_text(yaml.safe_dump({**PLAN, **changes}, sort_keys=False))
    return path


def with_function(folder: Path) -> Path:
    """Return a study of a function in a file, which imports modules from the same folder."""
    (folder / "mine.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "from exgrpo.train.replay import Priority\n"
        "if TYPE_CHECKING:\n"
        "    from near import deep\n\n"
        "def first(candidates, options):\n"
        "    return Priority()\n"
    )
    (folder / "near").mkdir()
    (folder / "near" / "__init__.py").write_text("from .inner import deep\n")
    (folder / "near" / "inner.py").write_text("import numpy, far\ndeep = 1\n")
    (folder / "far.py").write_text("")
    (folder / "other.py").write_text("")
    return write(folder, arms={"without": {}, "with": {"settings": {"experience.prioritise": "mine.py:first"}}})


def result(key: str, *heights: float, tokens: float = 100.0, seconds: float = 3.0, **settings: object) -> Result:
    """A run with these values of all scores at its evaluations, which spends so many tokens between two of them."""
    steps = np.arange(len(heights), dtype=np.float64)
    curves = {name: np.array(heights) for name in SCORES}
    curves |= {"step": steps, **{name: np.array(tokens * steps) for name in COSTS}}
    curves["train/entropy"] = np.append(np.nan, np.ones(len(heights) - 1))
    origin = {"commit": "c0ffee", "versions": {"torch": "2"}, "processor": "a processor", "date": "2026-01-02"}
    asked = {"evaluation.samples": 8, **settings}
    return Result(key=key, settings=asked, seconds=seconds, curves=curves, **origin)
