"""Where stored experience is read from: the newest sound checkpoint of a run, or a file of traces.

Of a run columns are in memory, tokens and texts are read when asked for. A file is read from its beginning for each
look.
"""

import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from exgrpo.tools.experience.show import AskedQuestion, Overview, StoredAnswer, different
from exgrpo.train.checkpoint.listing import EXPERIENCE, Checkpoint, survey
from exgrpo.train.checkpoint.store import SUFFIX, read_checked, segment_names, written_mask
from exgrpo.train.common.durable import DamagedFileError, sha256
from exgrpo.train.common.errors import CheckpointError, DataError, ModelError, os_errors_as, shown
from exgrpo.train.common.records import KeptSets, Trajectory
from exgrpo.train.common.step_batch import BEHAVIOURS
from exgrpo.train.config.options import Config
from exgrpo.train.config.pretrained import located
from exgrpo.train.config.recipe import validate
from exgrpo.train.config.sources import names_of, settings_of
from exgrpo.train.data.files import read_rows
from exgrpo.train.data.prompts import PromptFormat
from exgrpo.train.data.questions import Question, QuestionSet, joined, question_set
from exgrpo.train.data.rows import Row
from exgrpo.train.run.traces import Trace, read_traces

logger = logging.getLogger(__name__)
OF_ROWS = ("question", "length", "finished", "reward", "step", "behaviour", "key")
"""Columns of a segment that have a number for each trajectory."""
Named = tuple[str | None, str | None, bytes]
"""What tells questions apart: text, gold answer and, without a text, the prompt."""


@dataclass(frozen=True, eq=False)
class Texts:
    """What turns a run's trajectories into text.

    Attributes:
        questions: of the run.
        tokenizer: of the run's model.
        prompts: how the questions of each source became prompts.
    """

    questions: QuestionSet
    tokenizer: Any
    prompts: tuple[PromptFormat, ...]

    def messages(self, question: Question) -> list[dict[str, str]]:
        """The conversation {role, content} of a question's prompt, of which only the question is kept of its row."""
        source = bisect_right(list(accumulate(self.questions.sizes)), question.index)
        return self.prompts[source].messages(Row(question.text, question.gold, None, question.source))


class RunExperience:
    """What a checkpoint has stored.

    Args:
        run: the run's folder.
        checkpoint: one of its checkpoints.

    Attributes:
        config: of the run.
        step: the last training step in it.
        arrays: the arrays of the replay.
        columns: [N] by name, each trajectory's numbers, in the order in which they were stored.

    Raises:
        DamagedFileError: a file of the experience is missing or damaged.
        ConfigError: another version of this package has written it.
    """

    def __init__(self, run: Path, checkpoint: Checkpoint) -> None:
        self.run, self.step = run, checkpoint.step
        self.config: Config = validate(checkpoint.manifest.config, f"the configuration in {checkpoint.folder}")
        self._fingerprint = checkpoint.manifest.fingerprint
        folder = run / EXPERIENCE
        self.arrays = read_checked(folder, checkpoint.manifest.arrays)
        size = len(self.arrays["row"])
        self._files = [_open(folder / f"{name}{SUFFIX}", name) for name in segment_names(self.arrays)]
        self._bounds = [_bounds(file) for file in self._files]
        self._start = np.zeros(size, np.int64)
        self.columns: dict[str, npt.NDArray] = {}
        for number, file in enumerate(self._files):
            mine = np.flatnonzero(self.arrays["segment"] == number)
            rows = self.arrays["row"][mine]
            lengths = file.get_tensor("length").astype(np.int64)
            self._start[mine] = (np.cumsum(lengths) - lengths)[rows]
            for name in OF_ROWS:
                values = file.get_tensor(name)
                self.columns.setdefault(name, np.zeros(size, values.dtype))[mine] = values[rows]

    def __len__(self) -> int:
        """N, the number of trajectories."""
        return len(self._start)

    def trajectory(self, row: int) -> Trajectory:
        """One of them, read from its file."""
        of_row = {name: self.columns[name][row].item() for name in OF_ROWS}
        start = int(self._start[row])
        place = slice(start, start + of_row.pop("length"))
        file = self._files[self.arrays["segment"][row]]
        return Trajectory(
            response=file.get_slice("response")[place],
            log_prob=file.get_slice("log_prob")[place],
            written=written_mask(file.get_slice("written")[place]) if "written" in file.keys() else None,  # noqa: SIM118
            kept=self._kept(self.arrays["segment"][row], place),
            finished=bool(of_row.pop("finished")),
            behaviour=BEHAVIOURS[of_row.pop("behaviour")],
            **of_row,
        )

    def _kept(self, number: int, place: slice) -> KeptSets | None:
        """The sets of some tokens of a file."""
        bounds = self._bounds[number]
        if bounds is None or bounds[place.start] == bounds[place.stop]:
            return None
        first, end = int(bounds[place.start]), int(bounds[place.stop])
        ids = self._files[number].get_slice("kept")[first:end]
        return KeptSets(ids, bounds[place.start : place.stop + 1] - first)

    def origin(self, name: str, row: int) -> Any:
        """advantage, successes, answers or replays of a trajectory."""
        return self.arrays[name][row].item()

    @cached_property
    def texts(self) -> Texts:
        """The run's questions and its tokenizer, read again.

        Raises:
            DataError: the questions cannot be read, or are others than those of the run.
            ModelError: there is no tokenizer.
        """
        tokenizer = self._tokenizer()
        data = self.config.data
        sets, formats = [], []
        for source in data.train:
            limit = data.train_limit
            names = names_of(source, data)
            rows = read_rows(source, split=data.train_split, limit=limit, seed=self.config.seed, names=names)
            prompts, stop = PromptFormat.of_source(source, data), settings_of(source, data.sources).stop
            sets.append(question_set(source, rows, tokenizer, prompts, limit=limit, stop=stop))
            formats.append(prompts)
        questions = joined(sets)
        if questions.fingerprint != self._fingerprint:
            raise DataError(
                f"{', '.join(data.train)}: these are not the questions that {self.run} was trained on any more: put "
                "back the files as they were"
            )
        return Texts(questions, tokenizer, tuple(formats))

    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer  # takes seconds: only where texts are wanted

        problems = []
        for place in (self.config.policy.path, str((self.run / "model").absolute())):
            try:
                return AutoTokenizer.from_pretrained(located(place), trust_remote_code=False)
            except (ModelError, OSError, ValueError) as error:
                problems.append(shown(error))
        raise ModelError(f"{self.run}: its tokenizer cannot be loaded: {'; '.join(problems)}")

    def text_of(self, trajectory: Trajectory) -> str:
        """What a trajectory says, without what ended it."""
        from exgrpo.train.rollout.stops import text_of

        stop = self.asked(trajectory.question).stops(self.config.rollout.stop)
        return text_of(trajectory.rollout, self.texts.tokenizer.decode, stop)

    def asked(self, index: int) -> Question:
        """The question of an index. Raises DataError where there is none."""
        questions = self.texts.questions
        if not 0 <= index < len(questions):
            raise DataError(f"there is no question {index}: the run has the questions 0 to {len(questions) - 1}")
        return questions[index]

    def overview(self) -> Overview:
        """All trajectories as columns."""
        columns, arrays = self.columns, self.arrays
        question, answers = columns.get("question", np.zeros(0)).astype(np.int64), arrays["answers"]
        numbers: dict[str, npt.NDArray[np.float64]] = {}
        behaviour: dict[str, int] = {}
        if len(self):
            accuracy = np.full(len(self), np.nan)
            np.divide(arrays["successes"], answers, out=accuracy, where=answers > 0)
            numbers = {
                "age": self.step - columns["step"].astype(np.float64),
                "replays": arrays["replays"].astype(np.float64),
                "group accuracy": accuracy,
                "tokens": columns["length"].astype(np.float64),
                "reward": columns["reward"],
            }
            found = np.bincount(columns["behaviour"], minlength=len(BEHAVIOURS)).tolist()
            behaviour = {name: count for name, count in zip(BEHAVIOURS, found, strict=True) if count}
        return Overview(
            title=f"{self.run}, step {self.step}",
            asked=len(arrays["count"]),
            retired=int(arrays["retired"].sum()),
            question=question,
            numbers=numbers,
            counts=arrays["count"][arrays["count"] > 0],
            behaviour=behaviour,
            solutions=different(question, columns.get("key", np.zeros(0, np.int64))),
        )

    def question(self, index: int) -> AskedQuestion:
        """A question with its answers as texts; raises as `asked` and `texts`."""
        question = self.asked(index)
        rows = np.flatnonzero(self.columns["question"] == index).tolist() if len(self) else []
        return AskedQuestion(index, question.text, question.gold, tuple(self._answer(row) for row in rows))

    def _answer(self, row: int) -> StoredAnswer:
        one = self.trajectory(row)
        return StoredAnswer(
            text=self.text_of(one),
            reward=one.reward,
            step=one.step,
            replays=self.origin("replays", row),
            log_prob=None if one.behaviour == "unknown" else float(one.own(one.log_prob).mean()),
            finished=one.finished,
            behaviour=one.behaviour,
        )


def open_run(run: Path) -> RunExperience:
    """The experience of a run as of its newest sound checkpoint; a warning names damaged ones.

    Raises:
        CheckpointError: it has none; the message says what is wrong with those that are there.
    """
    with os_errors_as(CheckpointError, f"{run} cannot be read"):
        if not run.is_dir():
            raise CheckpointError(f"{run}: there is no such folder of a run")
        found, problems = survey(run)
        for checkpoint in found:
            try:
                experience = RunExperience(run, checkpoint)
            except DamagedFileError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                logger.warning("%s; what follows is of step %d", problem, experience.step)
            return experience
    if problems:
        raise CheckpointError(f"{run} has no sound checkpoint, where experience is stored: " + "; ".join(problems))
    raise CheckpointError(
        f"{run} has no checkpoint, where experience is stored: a run writes one every checkpoint.every steps"
    )


def _open(path: Path, name: str) -> Any:
    """A segment whose content is what was written; its tokens stay on disk."""
    if not path.is_file():
        raise DamagedFileError(f"{path} is missing")
    if sha256(path) != name:
        raise DamagedFileError(f"{path} is damaged: its content does not have the checksum in its name")
    return safe_open(path, framework="numpy")


def _bounds(file: Any) -> npt.NDArray[np.int64] | None:
    """[T + 1] where the sets of the tokens of a segment begin among its words; None: it has no sets."""
    if "kept" not in file.keys():  # noqa: SIM118
        return None
    return np.concatenate([[0], np.cumsum(file.get_tensor("kept_words"), dtype=np.int64)])


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

    def question(self, index: int) -> AskedQuestion:
        """A question with its answers; raises DataError where there is no such question."""
        traces = [trace for number, trace in self._traces() if number == index]
        if not traces:
            known = f"{self.source} has the questions 0 to {len(self._numbers) - 1}"
            raise DataError(f"there is no question {index}: {known}")
        return AskedQuestion(index, traces[0].question or "", traces[0].gold, tuple(map(_answer, traces)))


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
