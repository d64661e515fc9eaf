"""Groups of a run that people read: a line of samples.jsonl for each, and the questions that are followed."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from exgrpo.train.common import jsonl

Writer = Literal["policy", "environment"]


@dataclass(frozen=True)
class SampledAnswer:
    """An answer as text.

    Attributes:
        parts: who wrote, and what, in its order; without an environment there is one part.
        reward: what the verifier gave.
        finished: False where it was cut at the length limit.
        tokens: of the policy and the environment together.
        replayed_from: training step in which it was written; None: it is fresh.
        entropy: of a replayed one, its mean token entropy in nats under the policy that chose it; None: nobody
            computed it.
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
        question: index of the question among those that the run trains on.
        text: the question as its data set words it.
        gold: the right answer.
        followed: whether every group of this question is written.
        answers: the fresh ones, then the replayed ones.
    """

    step: int
    question: int
    text: str
    gold: str
    followed: bool
    answers: tuple[SampledAnswer, ...]


class Followed:
    """The first questions that are shown, which are followed from then on.

    Args:
        count: how many are followed.
        before: the samples of the run so far. The first `count` questions among them are those that it has followed,
            since a group that is written only because of its question is one of a followed question.
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
        """Which groups of a step are written.

        Args:
            questions: of each group of the step.
            shown: positions, rising, of the groups that are written in any case; their questions are followed from
                here on, as long as there are fewer than `count`.

        Returns:
            positions, rising.
        """
        for position in shown:
            if len(self._questions) < self._count:
                self._questions.add(questions[position])
        return [i for i, question in enumerate(questions) if i in shown or question in self._questions]


def spread(groups: int, count: int) -> list[int]:
    """Positions of `count` of so many groups, the first and the last among them: replayed groups come last."""
    count = min(groups, count)
    return [i * (groups - 1) // max(1, count - 1) for i in range(count)]


def to_line(sample: Sample) -> str:
    """A sample as a line of samples.jsonl, with its end; in ASCII, so that no text is too strange to be written."""
    return json.dumps(asdict(sample)) + "\n"


def read_samples(path: Path) -> Iterator[Sample]:
    """The samples of samples.jsonl in their order; lines that are none, as the cut last line of a run, are left out.

    Raises:
        OSError: it cannot be read.
    """
    for line in jsonl.read_log(path):
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
