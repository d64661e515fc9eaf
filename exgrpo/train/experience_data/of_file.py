"""A file of traces as experience that can be shown; it is read from its beginning for each look."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from exgrpo.train.errors import DataError
from exgrpo.train.experience_data.stored import AskedQuestion, Overview, StoredAnswer, different
from exgrpo.train.experience_data.traces import Trace, read_traces

Named = tuple[str | None, str | None, bytes]
"""What tells questions apart: text, gold answer and, without a text, the prompt."""


class FileExperience:
    """The traces of a file or an exported folder. Questions are numbered in the order in which they come.

    Args:
        source: the file or folder.
    """

    def __init__(self, source: Path) -> None:
        self.source = source
        self._numbers: dict[Named, int] = {}

    def _traces(self) -> Iterator[tuple[int, Trace]]:
        """Each trace with the number of its question."""
        for trace in read_traces(self.source):
            prompt = b"" if trace.question is not None or trace.prompt is None else trace.prompt.tobytes()
            named = (trace.question, trace.gold, prompt)
            yield self._numbers.setdefault(named, len(self._numbers)), trace

    def overview(self) -> Overview:
        """All traces as columns; the steps of a file have no present, so there is no age."""
        rows, keys, questions, behaviour = [], [], [], Counter[str]()
        for number, trace in self._traces():
            questions.append(number)
            keys.append(trace.key)
            behaviour[trace.behaviour or "not said"] += 1
            rows.append(
                (
                    np.nan if trace.step is None else trace.step,
                    trace.replays,
                    trace.successes / trace.answers if trace.answers else np.nan,
                    np.nan if trace.tokens is None else len(trace.tokens),
                    np.nan if trace.reward is None else trace.reward,
                )
            )
        names = ("step", "replays", "group accuracy", "tokens", "reward")
        table = np.array(rows, np.float64).reshape(-1, len(names))
        question = np.array(questions, np.int64)
        return Overview(
            title=str(self.source),
            asked=None,
            retired=None,
            question=question,
            numbers=dict(zip(names, table.T, strict=True)),
            counts=np.empty(0),
            behaviour=dict(behaviour),
            solutions=different(question, np.array(keys, np.int64)),
        )

    def questions(self, indices: Sequence[int]) -> list[AskedQuestion]:
        """Some questions with their answers; raises DataError where there is no such question."""
        found: dict[int, list[Trace]] = {index: [] for index in indices}
        for number, trace in self._traces():
            if number in found:
                found[number].append(trace)
        for index, traces in found.items():
            if not traces:
                known = f"{self.source} has the questions 0 to {len(self._numbers) - 1}"
                raise DataError(f"there is no question {index}: {known}")
        return [
            AskedQuestion(index, traces[0].question or "", traces[0].gold, tuple(map(_answer, traces)))
            for index, traces in found.items()
        ]


def _answer(trace: Trace) -> StoredAnswer:
    known = trace.log_prob is not None and len(trace.log_prob) and trace.behaviour != "unknown"
    return StoredAnswer(
        text=trace.response,
        reward=trace.reward,
        step=trace.step,
        replays=trace.replays,
        log_prob=float(trace.log_prob.mean()) if known and trace.log_prob is not None else None,
        finished=trace.finished,
        behaviour=trace.behaviour,
    )
