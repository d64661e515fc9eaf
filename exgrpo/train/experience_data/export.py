"""A run's experience as a data set in the Hugging Face layout: a card, and parquet files of limited size."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from exgrpo.train.errors import DataError, OutputError, os_errors_as
from exgrpo.train.experience_data.card import card
from exgrpo.train.experience_data.of_run import RunExperience, open_run

SHARD_BYTES = 400_000_000
"""A file is closed when it has as many; the rows of the last write may come on top, and none reaches 500 MB."""
ROWS, TOKENS = 1024, 2_000_000
"""What is held in memory and written at once, at most."""
SCHEMA = pa.schema(
    {
        "question": pa.string(),
        "prompt_ids": pa.list_(pa.int32()),
        "answer": pa.string(),
        "source": pa.string(),
        "response_ids": pa.list_(pa.int32()),
        "response": pa.string(),
        "log_prob": pa.list_(pa.float32()),
        "written": pa.list_(pa.bool_()),
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
)


def export(run: Path, folder: Path) -> int:
    """Write what the newest sound checkpoint of a run has stored; returns the number of trajectories.

    Args:
        run: the run's folder.
        folder: of the data set; it is made, whole or not at all.

    Raises:
        CheckpointError: the run has no sound checkpoint.
        DataError: the run's questions cannot be read again, or nothing is stored.
        ModelError: its tokenizer cannot be loaded.
        OutputError: the folder is there and not empty, or cannot be written.
    """
    with os_errors_as(OutputError, f"{folder} cannot be written"):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise OutputError(f"{folder} exists already and is not empty: choose another folder, or remove it")
        experience = open_run(run)
        if not len(experience):
            raise DataError(f"{run}: nothing is stored after step {experience.step}, so there is nothing to export")
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            (unfinished / "data").mkdir(parents=True)
            write_shards(rows(experience), unfinished / "data")
            (unfinished / "README.md").write_text(card(experience, SCHEMA), encoding="utf-8")
            unfinished.replace(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return len(experience)


def rows(experience: RunExperience) -> Iterator[pa.RecordBatch]:
    """All trajectories in their order, some at a time."""
    for first in range(0, len(experience), ROWS):
        chunk = np.arange(first, min(first + ROWS, len(experience)))
        ends = np.cumsum(experience.columns["length"][chunk], dtype=np.int64)
        # A chunk of long answers comes in parts.
        for part in np.split(chunk, np.flatnonzero(np.diff(ends // TOKENS)) + 1):
            yield _batch(experience, part.tolist())


def _batch(experience: RunExperience, places: Sequence[int]) -> pa.RecordBatch:
    found = [experience.trajectory(place) for place in places]
    questions = [experience.asked(one.question) for one in found]
    columns: dict[str, Any] = {
        "question": [question.text for question in questions],
        "prompt_ids": _lists([np.array(question.prompt, np.int32) for question in questions]),
        "answer": [question.gold for question in questions],
        "source": [question.source for question in questions],
        "response_ids": _lists([one.response for one in found]),
        "response": [experience.text_of(one) for one in found],
        "log_prob": _lists([one.log_prob for one in found]),
        "written": [one.written for one in found],
        # What has no log-probs of a policy was not written by this run's model.
        "model": [None if one.behaviour == "unknown" else experience.config.policy.path for one in found],
        "group_successes": [experience.origin("successes", place) for place in places],
        "group_answers": [experience.origin("answers", place) for place in places],
    }
    columns |= {name: [experience.origin(name, place) for place in places] for name in ("advantage", "replays")}
    columns |= {
        name: [getattr(one, name) for one in found] for name in ("behaviour", "finished", "reward", "step", "key")
    }
    arrays = [
        column if isinstance(column, pa.Array) else pa.array(column, SCHEMA.field(name).type)
        for name, column in ((name, columns[name]) for name in SCHEMA.names)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _lists(arrays: Sequence[np.ndarray]) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum([len(array) for array in arrays])]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, np.concatenate(arrays))


def write_shards(batches: Iterable[pa.RecordBatch], folder: Path, shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write batches of `SCHEMA` to train-00000-of-0000N.parquet and so on; returns the N files.

    A file is named when all are written, for only then their number is known.
    """
    written: list[Path] = []
    writer: pyarrow.parquet.ParquetWriter | None = None
    try:
        for batch in batches:
            if writer is None:
                written.append(folder / f"{len(written):05}.unfinished")
                file = written[-1].open("wb")
                writer = pyarrow.parquet.ParquetWriter(file, SCHEMA, compression="zstd")
            writer.write_batch(batch)
            if file.tell() >= shard_bytes:
                writer.close()
                file.close()
                writer = None
    finally:
        if writer is not None:
            writer.close()
            file.close()
    return [
        path.rename(folder / f"train-{number:05}-of-{len(written):05}.parquet") for number, path in enumerate(written)
    ]
