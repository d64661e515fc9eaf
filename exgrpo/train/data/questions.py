"""Load questions with tokenised prompts and gold answers from files, a hub or a generator."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from itertools import accumulate, chain, islice, zip_longest
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from exgrpo.train.common.errors import DataError, shown
from exgrpo.train.common.records import TokenIds
from exgrpo.train.config.options import DataConfig
from exgrpo.train.config.sources import settings_of
from exgrpo.train.data.prompts import PromptFormat
from exgrpo.train.data.rows import Row
from exgrpo.train.reward.names import DEFAULT

_BATCH = 1024


@dataclass(frozen=True, slots=True)
class Question:
    """One question to roll out."""

    index: int
    """Position in its set, 0..N-1."""
    prompt: tuple[int, ...]
    """[P] token ids, including the generation prompt."""
    text: str
    """The question as the data set words it, for display."""
    gold: str
    """The gold answer."""
    source: str
    """The row's data_source, else the stem of its file, the hub name or the name of the generator."""
    reward: str = DEFAULT
    """Name of the reward that grades it."""
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Columns of its row that a reward or an environment takes, by name."""
    stop: tuple[str, ...] | None = None
    """Stop strings of its source; None: those of the run."""

    @property
    def prompt_ids(self) -> TokenIds:
        """[P] int32, the prompt as an array."""
        return np.array(self.prompt, np.int32)

    def stops(self, of_run: tuple[str, ...]) -> tuple[str, ...]:
        """Return its stop strings; `of_run` are those of the run."""
        return of_run if self.stop is None else self.stop


@dataclass(frozen=True)
class QuestionSet:
    """Questions of one or several sources, in order."""

    questions: tuple[Question, ...]
    """[N], N >= 1."""
    left_out: tuple[Question, ...] = ()
    """Rows with too long prompts, with indices of their own; with a limit, only those before the last row taken."""
    beyond_limit: int = 0
    """Number of rows after the last one taken, dropped by the limit."""
    parts: tuple[int, ...] = ()
    """Numbers of questions from each source, in order; empty: there is one source."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """[S] numbers of questions from each source, in order."""
        return self.parts or (len(self.questions),)

    def first(self, count: int) -> list[Question]:
        """Return the first questions of every source, equally many of each if possible: `count`, or all."""
        ends = list(accumulate(self.sizes))
        turns = zip_longest(*(range(end - size, end) for end, size in zip(ends, self.sizes, strict=True)))
        indices = (index for turn in turns for index in turn if index is not None)
        return [self.questions[index] for index in sorted(islice(indices, count))]

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, index: int) -> Question:
        return self.questions[index]

    def __iter__(self) -> Iterator[Question]:
        return iter(self.questions)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all prompts and gold answers in order, the same in every process."""
        digest = sha256()
        for question in self.questions:
            ids = array("q", question.prompt)
            gold = question.gold.encode()
            digest.update(f"{len(ids)},{len(gold)};".encode() + ids.tobytes() + gold)
        return digest.hexdigest()


class NoPromptFitsError(DataError):
    """All prompts of a data set are too long.

    Attributes:
        left_out: its rows.
    """

    def __init__(self, message: str, left_out: tuple[Question, ...] = ()) -> None:
        super().__init__(message)
        self.left_out = left_out


def question_set(
    source: str,
    rows: Sequence[Row],
    tokenizer: Any,
    prompts: PromptFormat,
    *,
    limit: int | None = None,
    progress: bool = False,
    stop: tuple[str, ...] | None = None,
) -> QuestionSet:
    """Tokenise the prompts of rows.

    Args:
        source: name of their source, for messages.
        rows: at least one row, as `exgrpo.train.data.files.read_rows` returns them.
        tokenizer: a transformers tokenizer.
        prompts: conversion of questions to prompts.
        limit: take the first so many rows whose prompts fit.
        progress: show a progress bar on a terminal.
        stop: stop strings of their answers; None: those of the run.

    Raises:
        NoPromptFitsError: no prompt fits.
        DataError: the options contradict each other or the tokenizer.
    """
    prompts.check(tokenizer)
    questions: list[Question] = []
    left_out: list[Question] = []
    ids: dict[int, int] = {}
    for row, prompt in _tokenised(rows, tokenizer, prompts, progress):
        among = questions if len(prompt) <= prompts.max_prompt_tokens else left_out
        shared = tuple(map(ids.setdefault, prompt, prompt))  # a separate int per token would take 32 bytes
        among.append(Question(len(among), shared, row.text, row.gold, row.source, row.reward, row.columns, stop))
        if len(questions) == limit:
            break
    if not questions:
        shortest = min(len(question.prompt) for question in left_out)
        raise NoPromptFitsError(
            f"{source}: all {len(left_out)} prompts are longer than max_prompt_tokens = {prompts.max_prompt_tokens}; "
            f"the shortest has {shortest} tokens",
            tuple(left_out),
        )
    unread = len(rows) - len(questions) - len(left_out)
    return QuestionSet(tuple(questions), tuple(left_out), beyond_limit=unread)


def joined_questions(
    data: DataConfig,
    sources: Sequence[str],
    rows: Sequence[Sequence[Row]],
    tokenizer: Any,
    *,
    limit: int | None,
    progress: bool = False,
) -> QuestionSet:
    """Tokenise the rows of several sources, at least one non-empty, and join them."""
    return joined(
        [
            question_set(
                *(source, of_source, tokenizer, PromptFormat.from_source(source, data)),
                limit=limit,
                progress=progress,
                stop=settings_of(source, data.sources).stop,
            )
            if of_source
            else QuestionSet(())
            for source, of_source in zip(sources, rows, strict=True)
        ]
    )


def joined(sets: Sequence[QuestionSet]) -> QuestionSet:
    """Join the questions of at least one source into one set with its own indices."""
    if len(sets) == 1:
        return sets[0]
    questions = chain.from_iterable(of_source.questions for of_source in sets)
    left_out = chain.from_iterable(of_source.left_out for of_source in sets)
    return QuestionSet(
        tuple(replace(question, index=index) for index, question in enumerate(questions)),
        tuple(replace(question, index=index) for index, question in enumerate(left_out)),
        sum(of_source.beyond_limit for of_source in sets),
        tuple(map(len, sets)),
    )


def contradictions(questions: Iterable[Question]) -> str:
    """Return one line about questions whose rows have different answers, quoting the first; "" if there are none."""
    golds: dict[tuple[str, str], str] = {}
    found: dict[tuple[str, str], tuple[Question, str]] = {}
    for question in questions:
        key = (question.text, question.reward)
        if golds.setdefault(key, question.gold) != question.gold:
            found.setdefault(key, (question, golds[key]))
    if not found:
        return ""
    question, gold = next(iter(found.values()))
    many = "1 question has" if len(found) == 1 else f"{len(found)} questions have"
    return (
        f"{many} different answers in different rows, such as {shown(question.text, 80)} of {shown(question.source)}: "
        f"{shown(gold, 40)} and {shown(question.gold, 40)}; each row is graded by its own: remove the wrong ones"
    )


def _tokenised(
    rows: Sequence[Row], tokenizer: Any, prompts: PromptFormat, progress: bool
) -> Iterator[tuple[Row, list[int]]]:
    console = Console(stderr=True)
    shown = progress and console.is_terminal
    for start in track(range(0, len(rows), _BATCH), "Tokenising", console=console, transient=True, disable=not shown):
        batch = rows[start : start + _BATCH]
        yield from zip(batch, prompts.token_ids(batch, tokenizer), strict=True)
