"""The answers of an evaluation on disk, from which an interrupted one goes on."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from exgrpo.train import jsonl
from exgrpo.train.data.questions import Question
from exgrpo.train.errors import OutputError
from exgrpo.train.evaluate.options import Options
from exgrpo.train.evaluate.scores import Verdict, question_key
from exgrpo.train.reward.form import Graded
from exgrpo.train.reward.names import reward_of
from exgrpo.train.reward.success import is_success
from exgrpo.train.step_batch import StepBatch

ANSWERS, OPTIONS = "answers.jsonl", "options.yaml"


class AnswerFile:
    """The answers written so far, a chunk at a time; what an interruption left of a chunk is dropped.

    Args:
        folder: of the evaluation.
        options: it was begun with; going on with others is refused.
        expected: answers of each chunk when it is complete.

    Raises:
        OutputError: the folder holds an evaluation with other options, or one of a version without keys.
    """

    def __init__(self, folder: Path, options: Options, expected: Sequence[int]) -> None:
        self.path = folder / ANSWERS
        self.reward = options.reward.function
        # How it is computed may be otherwise when it goes on.
        text = yaml.safe_dump(options.model_dump(mode="json", exclude={"distributed"}), sort_keys=False)
        if (folder / OPTIONS).exists() and (folder / OPTIONS).read_text(encoding="utf-8") != text:
            raise OutputError(
                f"output: {folder} holds an evaluation with other options; choose another --output.folder"
            )
        (folder / OPTIONS).write_text(text, encoding="utf-8")
        found: dict[int, list[dict[str, Any]]] = {}
        for record in self._records():
            if not {"key", "graded_by"} <= record.keys():
                raise OutputError(
                    f"output: {self.path} is of an older version, without the keys of solutions: choose another "
                    "--output.folder, or remove the folder"
                )
            found.setdefault(record["chunk"], []).append(record)
        self.done = {chunk for chunk, records in found.items() if len(records) == expected[chunk]}
        partial = self.path.with_suffix(".tmp")
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(r) + "\n" for chunk in sorted(self.done) for r in found[chunk])
        partial.replace(self.path)

    def _records(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        for line in jsonl.read_log(self.path):
            if line.problem:
                return  # the line that an interruption cut
            yield line.value

    def append(self, chunk: int, questions: Sequence[Question], batch: StepBatch) -> None:
        """Write the answers of a chunk, a group of the batch to each question."""
        with self.path.open("a", encoding="utf-8") as file:
            for row, group in enumerate(batch.group):
                question = questions[group]
                record = {
                    "chunk": chunk,
                    "source": question.source,
                    "question": question.text,
                    "gold": question.gold,
                    "response": batch.text[row],
                    "graded_by": reward_of(question.reward, self.reward),
                    "reward": batch.reward.item(row),
                    "key": batch.key.item(row),
                    "finished": batch.finished.item(row),
                    "tokens": batch.length.item(row),
                }
                file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def verdicts(
        self, success: float, formed: Sequence[bool | None], found: Sequence[bool | None]
    ) -> Iterator[Verdict]:
        """Of all answers in the file, given what is known of the form of each; see `Verdict`."""
        for record, has_form, has_answer in zip(self._records(), formed, found, strict=True):
            key = question_key(record["question"], record["gold"])
            right = is_success(record["reward"], success)
            yield Verdict(record["source"], key, right, record["finished"], has_form, has_answer, record["key"])

    def graded(self) -> list[Graded]:
        """[N] all answers in the file."""
        return [Graded(record["response"], record["gold"], record["graded_by"]) for record in self._records()]

    def rewards(self) -> npt.NDArray[np.float64]:
        """[N] rewards of all answers in the file."""
        return np.array([record["reward"] for record in self._records()], dtype=np.float64)
