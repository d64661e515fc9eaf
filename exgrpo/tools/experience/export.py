"""A run's experience as a data set in the Hugging Face layout: a card, and parquet files of limited size.

The card is what a hub reads at its head, and what a person should know. A data set for verl or TRL has the columns that
their loaders read beside its own, so that a run of this project can begin with it, too.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import yaml

from exgrpo.tools.experience.sources import RunExperience, open_run
from exgrpo.train.common.errors import DataError, OutputError, os_errors_as
from exgrpo.train.config.hub import installed
from exgrpo.train.data.questions import Question

SHARD_BYTES = 400_000_000
"""A file is closed when it has as many; the rows of the last write may come on top, and none reaches 500 MB."""
ROWS, TOKENS = 1024, 2_000_000
"""What is held in memory and written at once, at most."""
SIZES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M")
"""The hub's names of sizes, each ten times the one before."""
PACKAGES = ("exgrpo", "torch", "transformers", "deepspeed")
Columns = dict[str, tuple[pa.DataType, str]]
"""Kinds of columns by name, and what they mean."""
COLUMNS: Columns = {
    "question": (pa.string(), "text of the question"),
    "prompt_ids": (pa.list_(pa.int32()), "token ids of its prompt, as the model reads it"),
    "answer": (pa.string(), "its right answer"),
    "source": (pa.string(), "data set that the question comes from"),
    "response_ids": (pa.list_(pa.int32()), "token ids of the answer, with the token that ends it"),
    "response": (pa.string(), "text of the answer, without what ends it"),
    "log_prob": (
        pa.list_(pa.float32()),
        "log-probs of these tokens under the policy that wrote them, at the rollout temperature",
    ),
    "written": (
        pa.list_(pa.bool_()),
        "whether the policy wrote each token, or an environment, whose tokens have log-probs of 0; empty: the "
        "policy wrote all of them",
    ),
    "kept": (
        pa.list_(pa.list_(pa.int32())),
        "the token ids that each token was drawn from, among which its log-prob is, where top-p, top-k or min-p left a "
        "part of them; empty: all",
    ),
    "behaviour": (
        pa.string(),
        "who computed them: the trainer, before the update of that step, or the rollout engine, in sampling; "
        "unknown: nobody, and they are 0",
    ),
    "model": (pa.string(), "where the policy began; together with the step it names the policy that wrote the answer"),
    "finished": (pa.bool_(), "whether the answer ended by itself and was not cut at the length limit"),
    "reward": (pa.float64(), "what the verifier gave"),
    "step": (pa.int32(), "training step in which it was written"),
    "advantage": (pa.float64(), "in the group that it was written in"),
    "group_successes": (pa.int32(), "successes among the answers of that group that count"),
    "group_answers": (pa.int32(), "number of those answers; 0: not known"),
    "replays": (pa.int32(), "how often it was replayed"),
    "key": (
        pa.int64(),
        "hash of the solution that it gives: answers that differ only in form have the same one; 0: none",
    ),
}
SCHEMA = pa.schema({name: kind for name, (kind, _) in COLUMNS.items()})
MESSAGES = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
PROMPT = "messages of the prompt, to which a chat template is applied"
VERL: Columns = {
    "data_source": (pa.string(), "as source: by it verl chooses a reward"),
    "prompt": (MESSAGES, PROMPT),
    "reward_model": (pa.struct({"style": pa.string(), "ground_truth": pa.string()}), "its right answer"),
    "extra_info": (pa.struct({"split": pa.string(), "index": pa.int64()}), "index of the question in the run"),
    "messages": (MESSAGES, "prompt and answer, for supervised training"),
}
"""What verl reads besides."""
TRL_CHAT: Columns = {"prompt": (MESSAGES, PROMPT), "completion": (MESSAGES, "the answer as a message")}
TRL_TEXT: Columns = {"prompt": (pa.string(), "text of the prompt"), "completion": (pa.string(), "text of the answer")}
"""What TRL reads besides, of runs with and without a chat template."""


def columns_of(form: str, *, chat: bool) -> Columns:
    """The columns of a data set for a project: exgrpo, verl or trl."""
    return COLUMNS | {"exgrpo": {}, "verl": VERL, "trl": TRL_CHAT if chat else TRL_TEXT}[form]


def export(run: Path, folder: Path, form: str = "exgrpo") -> int:
    """Write what the newest sound checkpoint of a run has stored; returns the number of trajectories.

    Args:
        run: the run's folder.
        folder: of the data set; it is made, whole or not at all.
        form: whose loaders read it: exgrpo, verl or trl.

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
        columns = columns_of(form, chat=experience.config.data.chat)
        write_shards(rows(experience, columns), unfinished / "data")
        text = card(len(experience), ABOUT, _facts(experience), columns)
        (unfinished / "README.md").write_text(text, encoding="utf-8")
    return len(experience)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """The folder of a data set while it is written, with `data` in it; whole or not at all it gets its name.

    Raises:
        OutputError: it is there and not empty, or cannot be written.
    """
    with os_errors_as(OutputError, f"{folder} cannot be written"):
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


def rows(experience: RunExperience, columns: Columns = COLUMNS) -> Iterator[pa.RecordBatch]:
    """All trajectories in their order, some at a time."""
    schema = pa.schema({name: kind for name, (kind, _) in columns.items()})
    for first in range(0, len(experience), ROWS):
        chunk = np.arange(first, min(first + ROWS, len(experience)))
        ends = np.cumsum(experience.columns["length"][chunk], dtype=np.int64)
        # A chunk of long answers comes in parts.
        for part in np.split(chunk, np.flatnonzero(np.diff(ends // TOKENS)) + 1):
            yield _batch(experience, part.tolist(), schema)


def _batch(experience: RunExperience, places: Sequence[int], schema: pa.Schema) -> pa.RecordBatch:
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
        "kept": [one.kept and one.kept.lists() for one in found],
        # What has no log-probs of a policy was not written by this run's model.
        "model": [None if one.behaviour == "unknown" else experience.config.policy.path for one in found],
        "group_successes": [experience.origin("successes", place) for place in places],
        "group_answers": [experience.origin("answers", place) for place in places],
    }
    columns |= {name: [experience.origin(name, place) for place in places] for name in ("advantage", "replays")}
    columns |= {
        name: [getattr(one, name) for one in found] for name in ("behaviour", "finished", "reward", "step", "key")
    }
    if schema != SCHEMA:
        chat = schema.field("prompt").type == MESSAGES
        columns |= _for_others(experience, questions, columns["response"], chat=chat)
    arrays = [
        column if isinstance(column, pa.Array) else pa.array(column, schema.field(name).type)
        for name, column in ((name, columns[name]) for name in schema.names)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _for_others(
    experience: RunExperience, questions: Sequence[Question], responses: Sequence[str], *, chat: bool
) -> dict[str, Any]:
    """The columns of `VERL` and `TRL_CHAT`, or those of `TRL_TEXT`."""
    prefix = experience.config.data.answer_prefix
    prompts = [experience.texts.messages(question) for question in questions]
    if not chat:
        return {"prompt": [prompt[-1]["content"] + prefix for prompt in prompts], "completion": responses}
    said = [[{"role": "assistant", "content": prefix + response}] for response in responses]
    return {
        "data_source": [question.source for question in questions],
        "prompt": prompts,
        "reward_model": [{"style": "rule", "ground_truth": question.gold} for question in questions],
        "extra_info": [{"split": "train", "index": question.index} for question in questions],
        "messages": [prompt + last for prompt, last in zip(prompts, said, strict=True)],
        "completion": said,
    }


def _lists(arrays: Sequence[np.ndarray]) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum([len(array) for array in arrays])]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, np.concatenate(arrays))


def write_shards(batches: Iterable[pa.RecordBatch], folder: Path, shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write batches of one schema to train-00000-of-0000N.parquet and so on; returns the N files.

    A file is named when all are written, for only then their number is known.
    """
    written: list[Path] = []
    writer: pyarrow.parquet.ParquetWriter | None = None
    try:
        for batch in batches:
            if writer is None:
                written.append(folder / f"{len(written):05}.unfinished")
                file = written[-1].open("wb")
                writer = pyarrow.parquet.ParquetWriter(file, batch.schema, compression="zstd")
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


ABOUT = """Answers of a language model to questions whose answers can be verified, as a run of exgrpo has stored them
for replay (ExGRPO, arXiv 2510.02245). Such a buffer is a selection: by default it has successes alone, and no questions
that the model already solves."""


def card(rows: int, about: str, facts: Mapping[str, object], columns: Columns) -> str:
    """The text of README.md of a data set with so many rows."""
    head = yaml.safe_dump(_head(rows, columns), sort_keys=False, allow_unicode=True)
    meanings = "\n".join(f"| {name} | {meaning} |" for name, (_, meaning) in columns.items())
    told = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    return f"""---
{head}---

# Experience of a reinforcement learning run

{about}

{told}

| column | meaning |
|---|---|
{meanings}

Another run begins with it by `--experience.start FOLDER`. The licence of the questions is that of their sources, and
the licence of the model may bind what is done with its answers.
"""


def size_category(rows: int) -> str:
    """The hub's name for a data set of so many rows."""
    return SIZES[min(len(SIZES) - 1, max(0, len(str(rows)) - 3))]


def _head(rows: int, columns: Columns) -> dict[str, Any]:
    return {
        "license": "unknown",
        "pretty_name": "Experience of a reinforcement learning run",
        "size_categories": [size_category(rows)],
        "tags": ["exgrpo", "rlvr", "grpo", "reinforcement-learning", "experience-replay"],
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*"}]}],
        "dataset_info": {"features": [{"name": name, **_feature(kind)} for name, (kind, _) in columns.items()]},
    }


def _feature(kind: pa.DataType) -> dict[str, Any]:
    """A kind of column as the hub writes it."""
    if pa.types.is_struct(kind):
        return {"struct": [{"name": field.name, **_feature(field.type)} for field in kind]}
    if pa.types.is_list(kind):
        inner = _feature(kind.value_type)
        return {"list": inner if "list" in inner else next(iter(inner.values()))}
    return {"dtype": {"float": "float32", "double": "float64"}.get(str(kind), str(kind))}


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
        "questions with stored answers": len(np.unique(experience.columns["question"])),
        "questions of the run": len(arrays["count"]),
        "questions that have left, since all fresh answers were right": int(arrays["retired"].sum()),
        "tokens of the answers": int(experience.columns["length"].sum()),
        "versions": installed(*PACKAGES),
    }
