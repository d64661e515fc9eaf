"""Groups of answers for people to read: their lines in samples.jsonl, and the choice of groups to write."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from exgrpo.train.common.plain import read_log

Writer = Literal["policy", "environment"]


@dataclass(frozen=True)
class SampledAnswer:
    """An answer as text.

    Attributes:
        parts: (writer, text) in order; without an environment there is one part.
        reward: reward of the answer.
        finished: False if it was cut at the length limit.
        tokens: number of tokens, those of the environment included.
        replayed_from: training step in which a replayed answer was generated; None: it is fresh.
        entropy: mean token entropy in nats of a replayed answer under the policy that selected it; None: not computed.
    """

    parts: tuple[tuple[Writer, str], ...]
    reward: float
    finished: bool
    tokens: int
    replayed_from: int | None = None
    entropy: float | None = None


@dataclass(frozen=True)
class Sample:
    """A group of one step.

    Attributes:
        step: training step, from 1.
        question: index of the training question.
        text: text of the question in its data set.
        gold: gold answer.
        followed: True if all later groups of this question are written, too.
        answers: fresh answers, then replayed ones.
    """

    step: int
    question: int
    text: str
    gold: str
    followed: bool
    answers: tuple[SampledAnswer, ...]


class TrackedQuestions:
    """Questions all of whose groups are written from their first sample on.

    Args:
        count: number of questions to track.
        before: samples of the run so far, whose first `count` questions are the tracked ones: other groups are written
            independently of their question.
    """

    def __init__(self, count: int, before: Iterable[Sample] = ()) -> None:
        self._count = count
        self._questions: set[int] = set()
        if count:
            for sample in before:
                self._questions.add(sample.question)
                if len(self._questions) == count:
                    break

    def __contains__(self, question: int) -> bool:
        return question in self._questions

    def choose(self, questions: Sequence[int], shown: Sequence[int]) -> list[int]:
        """Select the groups of a step to write.

        Args:
            questions: question of each group of the step.
            shown: ascending positions of groups to write in any case; their questions are tracked from now on while
                there are fewer than `count`.

        Returns:
            ascending positions.
        """
        for position in shown:
            if len(self._questions) < self._count:
                self._questions.add(questions[position])
        return [i for i, question in enumerate(questions) if i in shown or question in self._questions]


def spread(groups: int, count: int) -> list[int]:
    """Return `count` evenly spread positions with the first and the last one: replayed groups come last."""
    count = min(groups, count)
    return [i * (groups - 1) // max(1, count - 1) for i in range(count)]


def to_line(sample: Sample) -> str:
    """Return a sample as a line of samples.jsonl with its newline; in ASCII, since texts may have lone surrogates."""
    return json.dumps(asdict(sample)) + "\n"


def read_samples(path: Path) -> Iterator[Sample]:
    """Yield the samples of samples.jsonl in order; skips lines that are no samples, such as a cut last line.

    Raises:
        OSError: the file cannot be read.
    """
    for line in read_log(path):
        sample = _sample(line.value)
        if sample is not None:
            yield sample


def _sample(values: Any) -> Sample | None:
    try:
        parts = [tuple((writer, text) for writer, text in answer["parts"]) for answer in values["answers"]]
        answers = [SampledAnswer(**{**of, "parts": own}) for of, own in zip(values["answers"], parts, strict=True)]
        return Sample(**{**values, "answers": tuple(answers)})
    except (ValueError, TypeError, KeyError):
        return None
