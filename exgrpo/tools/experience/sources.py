"""Stored answers of a run, from its newest sound checkpoint."""

import logging
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from exgrpo.train.checkpoint.listing import EXPERIENCE, Checkpoint, survey
from exgrpo.train.common.durable import DamagedFileError, read_checked
from exgrpo.train.common.errors import CheckpointError, DataError, ModelError, os_errors_as, shown
from exgrpo.train.config.options import Config
from exgrpo.train.config.policy import located
from exgrpo.train.config.recipe import validate_stored
from exgrpo.train.data.questions import Question, QuestionSet, joined_questions
from exgrpo.train.data.rows import NO_COLUMNS
from exgrpo.train.data.selection import reward_name, select
from exgrpo.train.replay.table import unpacked
from exgrpo.train.reward.contract import Columns
from exgrpo.train.reward.pool import Grader
from exgrpo.train.rollout.turns.environments import find_environment
from exgrpo.train.run.startup_checks import columns_taken

logger = logging.getLogger(__name__)


class RunExperience:
    """Stored answers of a checkpoint.

    Args:
        run: the run's folder.
        checkpoint: one of its checkpoints.

    Attributes:
        config: the run's configuration.
        step: last training step of the checkpoint.
        arrays: arrays of the replay.
        answers: [N] in order of storage, each a group of its own.

    Raises:
        DamagedFileError: a file of the experience is missing or damaged.
        ConfigError: the checkpoint was written by another version of this package.
    """

    def __init__(self, run: Path, checkpoint: Checkpoint) -> None:
        self.run, self.step = run, checkpoint.step
        self.config: Config = validate_stored(checkpoint.manifest.config, f"the configuration in {checkpoint.folder}")
        self._fingerprint = checkpoint.manifest.fingerprint
        self.arrays = read_checked(run / EXPERIENCE, checkpoint.manifest.arrays)
        self.answers = unpacked(self.arrays)

    def __len__(self) -> int:
        return len(self.answers)

    @cached_property
    def questions(self) -> QuestionSet:
        """The run's questions, read again from its data sets.

        Raise DataError if they cannot be read or differ from the run's, and like `load_tokenizer`.
        """
        questions = self._read(lambda reward: NO_COLUMNS)
        if questions.fingerprint != self._fingerprint:  # the run may distinguish questions by further columns
            rewards = [reward_name(self.config, source) for source in self.config.data.train]
            with Grader.of(rewards, self.config.reward, workers=1) as grader:
                questions = self._read(partial(columns_taken, grader, find_environment(self.config.environment)))
        if questions.fingerprint != self._fingerprint:
            raise DataError(
                f"{', '.join(self.config.data.train)}: these are not the questions that {self.run} was trained on any "
                "more: put back the files as they were"
            )
        return questions

    def _read(self, columns: Callable[[str], Columns]) -> QuestionSet:
        data, rows = self.config.data, select(self.config, columns).questions
        return joined_questions(data, data.train, rows, self.tokenizer, limit=data.train_limit)

    @cached_property
    def tokenizer(self) -> Any:
        """Tokenizer of the run's model; raises as `load_tokenizer`."""
        places = (self.config.policy.path, str((self.run / "model").absolute()))
        return load_tokenizer(f"{self.run}: its tokenizer cannot be loaded", *places)

    def asked(self, index: int) -> Question:
        """Return the question of an index. Raise DataError for a bad index, and like `questions`."""
        if not 0 <= index < len(self.questions):
            raise DataError(f"there is no question {index}: the run has the questions 0 to {len(self.questions) - 1}")
        return self.questions[index]

    def text_of(self, row: int) -> str:
        """Return the text of an answer, without what ended it."""
        from exgrpo.train.rollout.stops import text_of

        stop = self.asked(int(self.answers.question[row])).stops(self.config.rollout.stop)
        return text_of(self.answers.answer(row), self.tokenizer.decode, stop)


def load_tokenizer(problem: str, *places: str) -> Any:
    """Return the first tokenizer found among some models, given by path or name.

    Raise ModelError if there is none; the message begins with `problem`.
    """
    from transformers import AutoTokenizer  # takes seconds to import; only texts need it

    found = []
    for place in places:
        try:
            return AutoTokenizer.from_pretrained(located(place), trust_remote_code=False)
        except Exception as error:  # tokenizers raise errors of many types
            found.append(shown(error))
    raise ModelError(f"{problem}: {'; '.join(found)}")


def open_run(run: Path) -> RunExperience:
    """Load the experience of a run's newest sound checkpoint; a warning names damaged ones.

    Raise CheckpointError if there is none; the message says what is wrong with the existing ones.
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
