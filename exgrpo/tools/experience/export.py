"""Export of a run's experience as a data set in the Hugging Face layout: a card and a parquet file."""

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from exgrpo.tools.experience.sources import RunExperience, open_run
from exgrpo.train.common.columns import LOG_PROB_SOURCES, Column
from exgrpo.train.common.errors import DataError, OutputError, os_errors_as
from exgrpo.train.common.records import AllowedTokens
from exgrpo.train.config.hub import installed
from exgrpo.train.run.traces import TEXTS, trace_columns

ROWS = 512
"""Rows that are in memory and written at once."""
PACKAGES = ("exgrpo", "torch", "transformers", "deepspeed")
FILE = "data/train-00000-of-00001.parquet"
"""Name that the hub gives to the one file of a split."""


def kinds() -> dict[str, pa.DataType]:
    """Return the columns of a data set and their types, by name."""
    texts = dict.fromkeys(TEXTS, pa.string()) | {"prompt_ids": pa.list_(pa.int32())}
    return texts | {column.trace: _kind(name, column) for name, column in trace_columns().items()}


def _kind(name: str, column: Column) -> pa.DataType:
    if name == "old_log_probs_from":
        return pa.string()
    kind = pa.list_(pa.int32()) if column.dtype is AllowedTokens else pa.from_numpy_dtype(column.dtype)
    return pa.list_(kind) if column.axis == "token" else kind


def export(run: Path, folder: Path) -> int:
    """Write the answers in the newest sound checkpoint of a run as a data set; return their number.

    Args:
        run: the run's folder.
        folder: folder of the data set, created completely or not at all.

    Raises:
        CheckpointError: the run has no sound checkpoint.
        DataError: the run's questions cannot be read again, or nothing is stored.
        ModelError: its tokenizer cannot be loaded.
        OutputError: the folder is not empty, or cannot be written.
    """
    with new_folder(folder) as unfinished:
        experience = open_run(run)
        if not len(experience):
            raise DataError(f"{run}: nothing is stored after step {experience.step}, so there is nothing to export")
        write(rows(experience), unfinished)
        write_card(unfinished, ABOUT, _facts(experience))
    return len(experience)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield the folder of a data set while it is written, with `data` in it; it gets its name whole or not at all.

    Raise OutputError if the folder is not empty, or cannot be written.
    """
    with os_errors_as(OutputError, f"{folder} cannot be written"):
        folder = folder.resolve()  # "." has no name
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise OutputError(f"{folder} exists already and is not empty: choose another folder, or remove it")
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            (unfinished / "data").mkdir(parents=True)
            yield unfinished
            unfinished.replace(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def rows(experience: RunExperience) -> Iterator[pa.RecordBatch]:
    """Yield all answers in their order."""
    for first in range(0, len(experience), ROWS):
        yield _batch(experience, slice(first, first + ROWS))


def _batch(experience: RunExperience, places: slice) -> pa.RecordBatch:
    rows = np.arange(len(experience))[places]
    answers = experience.answers.take_groups(rows)
    questions = [experience.asked(question) for question in answers.question.tolist()]
    sources = [LOG_PROB_SOURCES[source] for source in answers.old_log_probs_from]
    columns: dict[str, Any] = {
        "question": [question.text for question in questions],
        "prompt_ids": [question.prompt_ids for question in questions],
        "answer": [question.gold for question in questions],
        "source": [question.source for question in questions],
        "response": [experience.text_of(row) for row in rows.tolist()],
        # What has no log-probs of a policy was not written by this run's model.
        "model": [None if source == "unknown" else experience.config.policy.path for source in sources],
    }
    for name, column in trace_columns().items():
        values = answers.column(name)
        if name == "old_log_probs_from":
            columns[column.trace] = sources
        elif column.axis == "token":
            columns[column.trace] = [_cell(column, values[answers.at(row)]) for row in range(len(answers))]
        else:
            columns[column.trace] = pa.array(values, from_pandas=True)  # NaN: not known
    return pa.RecordBatch.from_pydict(columns, schema=pa.schema(kinds()))


def _cell(column: Column, values: Any) -> Any:
    """Return the values of an answer's tokens; None: all are the declared default."""
    if (column.default is not None or column.dtype is AllowedTokens) and column.is_default(values):
        return None
    return values.lists() if column.dtype is AllowedTokens else values


def write(batches: Iterable[pa.RecordBatch], folder: Path) -> None:
    """Write batches to the `FILE` of a data set."""
    with pyarrow.parquet.ParquetWriter(folder / FILE, pa.schema(kinds()), compression="zstd") as writer:
        for batch in batches:
            writer.write_batch(batch)


ABOUT = """Answers of a language model to verifiable questions, stored for replay by a run of exgrpo (ExGRPO, arXiv
2510.02245). Such a buffer is a selection: by default it has only successes, and no questions that the model already
solves."""


def write_card(folder: Path, about: str, facts: Mapping[str, object]) -> None:
    """Write the README.md of a data set."""
    every = TEXTS | {column.trace: column.meaning for column in trace_columns().values()}
    meanings = "\n".join(f"| {name} | {meaning} |" for name, meaning in every.items())
    listed = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    text = f"""---
license: unknown
pretty_name: Experience of a reinforcement learning run
tags: [exgrpo, rlvr, grpo, reinforcement-learning, experience-replay]
---

# Experience of a reinforcement learning run

{about}

{listed}

| column | meaning |
|---|---|
{meanings}

Another run begins with it by `--experience.start FOLDER`. The licence of the questions is that of their sources, and
the licence of the model may bind what is done with its answers.
"""
    (folder / "README.md").write_text(text, encoding="utf-8")


def _facts(experience: RunExperience) -> dict[str, object]:
    config, arrays = experience.config, experience.arrays
    return {
        "model": config.policy.path,
        "questions": ", ".join(config.data.train),
        "reward": config.reward.function or "that of each source",
        "training step": experience.step,
        "seed of the run": config.seed,
        "answers per question": config.rollout.samples,
        "rollout temperature": config.rollout.temperature,
        "stored answers": len(experience),
        "questions with stored answers": len(np.unique(experience.answers.question)),
        "questions of the run": len(arrays["count"]),
        "questions that have left, since all fresh answers were right": int(arrays["retired"].sum()),
        "tokens of the answers": int(experience.answers.length.sum()),
        "versions": installed(*PACKAGES),
    }
