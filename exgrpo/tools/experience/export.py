"""A run's experience as a data set in the Hugging Face layout: a card, and a parquet file.

The head of the card is for the hub, the rest for readers.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from exgrpo.tools.experience.sources import RunExperience, open_run
from exgrpo.train.common.errors import DataError, OutputError, os_errors_as
from exgrpo.train.config.hub import installed
from exgrpo.train.run.traces import Trace

ROWS = 512
"""What is held in memory and written at once."""
PACKAGES = ("exgrpo", "torch", "transformers", "deepspeed")
FILE = "data/train-00000-of-00001.parquet"
"""As the hub names the one file of a split."""
KINDS = {
    "question": pa.string(),
    "prompt_ids": pa.list_(pa.int32()),
    "answer": pa.string(),
    "source": pa.string(),
    "response_ids": pa.list_(pa.int32()),
    "response": pa.string(),
    "log_prob": pa.list_(pa.float32()),
    "written": pa.list_(pa.bool_()),
    "kept": pa.list_(pa.list_(pa.int32())),
    "behaviour": pa.string(),
    "model": pa.string(),
    "finished": pa.bool_(),
    "reward": pa.float64(),
    "step": pa.int32(),
    "advantage": pa.float64(),
    "group_successes": pa.int32(),
    "group_answers": pa.int32(),
    "replays": pa.int32(),
    "key": pa.int64(),
}
SCHEMA = pa.schema(KINDS)
MEANINGS = {name: field.description or "" for name, field in Trace.model_fields.items()}
MEANINGS["source"] = "data set that the question comes from"


def export(run: Path, folder: Path) -> int:
    """Write the answers in the newest sound checkpoint of a run as a data set; return their number.

    Args:
        run: the run's folder.
        folder: of the data set; it is made, whole or not at all.

    Raises:
        CheckpointError: the run has no sound checkpoint.
        DataError: the run's questions cannot be read again, or nothing is stored.
        ModelError: its tokenizer cannot be loaded.
        OutputError: the folder is there and not empty, or cannot be written.
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
    """The folder of a data set while it is written, with `data` in it; whole or not at all it gets its name.

    Raises:
        OutputError: it is there and not empty, or cannot be written.
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
    """All trajectories in their order, some at a time."""
    for first in range(0, len(experience), ROWS):
        yield _batch(experience, slice(first, first + ROWS))


def _batch(experience: RunExperience, places: slice) -> pa.RecordBatch:
    found, arrays = experience.answers[places], experience.arrays
    questions = [experience.asked(one.question) for one in found]
    columns: dict[str, Any] = {
        "question": [question.text for question in questions],
        "prompt_ids": _lists([question.prompt_ids for question in questions]),
        "answer": [question.gold for question in questions],
        "source": [question.source for question in questions],
        "response_ids": _lists([one.response for one in found]),
        "response": [experience.text_of(one) for one in found],
        "log_prob": _lists([one.log_prob for one in found]),
        "written": [one.written for one in found],
        "kept": [one.kept and one.kept.lists() for one in found],
        # What has no log-probs of a policy was not written by this run's model.
        "model": [None if one.behaviour == "unknown" else experience.config.policy.path for one in found],
        "advantage": arrays["advantage"][places],
        "group_successes": arrays["successes"][places],
        "group_answers": arrays["answers"][places],
        "replays": arrays["replays"][places],
    }
    columns |= {
        name: [getattr(one, name) for one in found] for name in ("behaviour", "finished", "reward", "step", "key")
    }
    return pa.RecordBatch.from_pydict(columns, schema=SCHEMA)


def _lists(arrays: Sequence[np.ndarray]) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum([len(array) for array in arrays])]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, np.concatenate(arrays))


def write(batches: Iterable[pa.RecordBatch], folder: Path) -> None:
    """Write batches to the `FILE` of a data set."""
    with pyarrow.parquet.ParquetWriter(folder / FILE, SCHEMA, compression="zstd") as writer:
        for batch in batches:
            writer.write_batch(batch)


ABOUT = """Answers of a language model to questions whose answers can be verified, as a run of exgrpo has stored them
for replay (ExGRPO, arXiv 2510.02245). Such a buffer is a selection: by default it has successes alone, and no questions
that the model already solves."""


def write_card(folder: Path, about: str, facts: Mapping[str, object]) -> None:
    """Write the README.md of a data set."""
    meanings = "\n".join(f"| {name} | {MEANINGS[name]} |" for name in KINDS)
    told = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    text = f"""---
license: unknown
pretty_name: Experience of a reinforcement learning run
tags: [exgrpo, rlvr, grpo, reinforcement-learning, experience-replay]
---

# Experience of a reinforcement learning run

{about}

{told}

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
        "questions with stored answers": len(np.unique(experience.answers.columns["question"])),
        "questions of the run": len(arrays["count"]),
        "questions that have left, since all fresh answers were right": int(arrays["retired"].sum()),
        "tokens of the answers": int(experience.answers.columns["length"].sum()),
        "versions": installed(*PACKAGES),
    }
