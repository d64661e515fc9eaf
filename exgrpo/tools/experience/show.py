"""Stored answers of a run as counts, distributions and texts on a terminal."""

import numpy as np
import numpy.typing as npt
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from exgrpo.tools.experience.sources import RunExperience
from exgrpo.train.common.columns import LOG_PROB_SOURCES

Floats = npt.NDArray[np.float64]
MEANINGS = {
    "age": "steps since the answer was written",
    "group accuracy": "success rate of the group in which the answer was written",
    "success count": "successes in a question's latest group",
    "answers": "stored answers of a question",
    "solutions": "stored answers of a question with different keys",
}
QUANTILES = {"min": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "max": 1.0}


def counts(experience: RunExperience) -> dict[str, int]:
    """Return the counts, by name."""
    answers, arrays = experience.answers, experience.arrays
    by = np.bincount(answers.old_log_probs_from, minlength=len(LOG_PROB_SOURCES)).tolist()
    return {
        "stored trajectories": len(experience),
        "questions with stored trajectories": len(np.unique(answers.question)),
        "questions in all": len(arrays["count"]),
        "questions that have left": int(arrays["retired"].sum()),
        **{f"log-probs by: {name}": count for name, count in zip(LOG_PROB_SOURCES, by, strict=True) if count},
    }


def distributions(experience: RunExperience) -> dict[str, Floats]:
    """Return the values of trajectories and of questions by name, without unknown ones."""
    answers, arrays = experience.answers, experience.arrays
    question, key = answers.question, answers.key
    accuracy = np.full(len(experience), np.nan)
    np.divide(answers.successes, answers.answers, out=accuracy, where=answers.answers > 0)
    different = np.unique(np.stack([question, key])[:, key != 0], axis=1)
    every = {
        "age": experience.step - answers.step,
        "replays": answers.replays,
        "group accuracy": accuracy,
        "tokens": answers.length,
        "reward": answers.reward,
        "success count": arrays["count"][arrays["count"] > 0],
        "answers": np.unique(question, return_counts=True)[1],
        "solutions": np.unique(different[0], return_counts=True)[1],
    }
    known = {name: values[np.isfinite(values)].astype(np.float64) for name, values in every.items()}
    return {name: values for name, values in known.items() if len(values)}


def show(experience: RunExperience, console: Console) -> None:
    """Print counts and distributions."""
    title = f"{experience.run}, step {experience.step}"
    console.print(title, style="bold", highlight=False, soft_wrap=True, markup=False)
    for name, count in counts(experience).items():
        console.print(f"{count:>10,}  {name}", highlight=False)
    if not len(experience):
        return
    table = Table("", box=SIMPLE_HEAD, show_edge=False)
    for name in (*QUANTILES, "mean"):
        table.add_column(name, justify="right")
    found = distributions(experience)
    for name, values in found.items():
        quantiles = np.quantile(values, list(QUANTILES.values()))
        table.add_row(name, *map(_short, (*quantiles, values.mean())))
    console.print(table)
    for name in filter(MEANINGS.__contains__, found):
        console.print(f"{name}: {MEANINGS[name]}", style="dim", highlight=False)


def _short(value: float) -> str:
    """Format a number in at most six characters, if it is below a million."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{round(value, 3):.3g}"


def show_question(experience: RunExperience, index: int, console: Console) -> None:
    """Print a question and its stored answers, oldest first; raise like `RunExperience.asked`."""
    question = experience.asked(index)
    rows = np.flatnonzero(experience.answers.question == index).tolist()
    console.print(Text(f"question {index}: {len(rows)} stored answers", style="bold"))
    console.print(Text(f"{question.text}\nright answer: {question.gold}"), soft_wrap=True)
    for row in rows:
        console.print(Text(f"\n{_label(experience, row)}", style="bold"), soft_wrap=True)
        console.print(Text(experience.text_of(row)), soft_wrap=True)


def _label(experience: RunExperience, row: int) -> str:
    """Return what is known of a stored answer, in one line."""
    answers, by = experience.answers, LOG_PROB_SOURCES[experience.answers.old_log_probs_from[row]]
    parts = [
        f"reward {answers.reward[row]:g}",
        f"step {answers.step[row]}",
        f"replayed {answers.replays[row]} times",
        "" if by == "unknown" else f"mean log-prob {answers.row_values(row, answers.old_log_prob).mean():.3f}",
        f"by {by}",
        "" if answers.finished[row] else "cut at the length limit",
    ]
    return ", ".join(filter(None, parts))
