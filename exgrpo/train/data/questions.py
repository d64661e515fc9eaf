"""Questions with tokenised prompts and gold answers, from files, a hub or a generator."""

import string
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

from exgrpo.train.data.files import Row, read_rows
from exgrpo.train.errors import DataError

_BATCH = 1024


@dataclass(frozen=True)
class Question:
    """One question to roll out."""

    index: int
    """Position in its set, 0..N-1."""
    prompt: tuple[int, ...]
    """[P] token ids, the generation prompt included."""
    text: str
    """The question as the data set words it, to show to people."""
    gold: str
    """The right answer."""
    source: str
    """The data set that the row names, else the stem of its file, the hub name or the name of the generator."""


@dataclass(frozen=True)
class QuestionSet:
    """The questions of a data set, in its order."""

    questions: tuple[Question, ...]
    """[N], N >= 1."""
    left_out: tuple[Question, ...] = ()
    """Rows left out because their prompts are too long, with indices of their own; with a limit, among the rows up to
    the last one taken."""
    beyond_limit: int = 0
    """Rows after the last one taken, which the limit leaves out."""

    @property
    def dropped_long(self) -> int:
        """Number of rows left out because their prompts are too long."""
        return len(self.left_out)

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


def load_questions(
    source: str,
    tokenizer: Any,
    *,
    split: str = "train",
    chat: bool = True,
    prompt_format: str = "{question}",
    system_prompt: str | None = None,
    keep_system: bool = False,
    answer_prefix: str = "",
    max_prompt_tokens: int,
    limit: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> QuestionSet:
    """Loads questions and tokenises their prompts.

    Args:
        source: a .jsonl, .json or .parquet file, a pattern that matches several, builtin:NAME, or the name of a hub
            data set, "name" or "name:config". exgrpo.train.data.files lists the row formats.
        tokenizer: of transformers.
        split: of a hub or builtin data set; a file is taken whole.
        chat: True renders the tokenizer's chat template with its generation prompt. False, for base models, encodes
            the text as it is, with the special tokens that the tokenizer puts around a text.
        prompt_format: what the user says, with {question} in it; literal braces are doubled, as in str.format.
        system_prompt: the system message of every chat.
        keep_system: use the row's own system message where it has one; by default only its question is used.
        answer_prefix: text that opens every answer, such as "<think>\n"; it ends the prompt.
        max_prompt_tokens: rows with longer prompts are left out.
        limit: take the first so many rows whose prompts fit. A built-in task needs it: how many to generate.
        seed: of the generated problems.
        progress: show a progress bar.

    Raises:
        MissingDataError: there is no such file.
        NoPromptFitsError: no prompt fits.
        DataError: the options contradict each other or the tokenizer; the data set is empty, cannot be read or
            fetched, or has malformed rows (the message names files, rows and causes).
    """
    _check_options(tokenizer, chat, prompt_format, system_prompt, keep_system)
    if max_prompt_tokens < 1 or (limit is not None and limit < 1):
        raise DataError(f"max_prompt_tokens and limit must be at least 1, got {max_prompt_tokens} and {limit}")
    rows = read_rows(source, split=split, limit=limit, seed=seed)
    questions: list[Question] = []
    left_out: list[Question] = []
    prompts = _with_prompts(rows, tokenizer, chat, prompt_format, system_prompt, keep_system, answer_prefix, progress)
    for row, prompt in prompts:
        among = questions if len(prompt) <= max_prompt_tokens else left_out
        among.append(Question(len(among), tuple(prompt), row.question, row.gold, row.source))
        if len(questions) == limit:
            break
    if not questions:
        shortest = min(len(question.prompt) for question in left_out)
        raise NoPromptFitsError(
            f"{source}: all {len(left_out)} prompts are longer than max_prompt_tokens = {max_prompt_tokens}; the "
            f"shortest has {shortest} tokens",
            tuple(left_out),
        )
    unread = len(rows) - len(questions) - len(left_out)
    return QuestionSet(tuple(questions), tuple(left_out), beyond_limit=unread)


def _check_options(
    tokenizer: Any, chat: bool, prompt_format: str, system_prompt: str | None, keep_system: bool
) -> None:
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(prompt_format) if name is not None]
    except ValueError as error:
        raise DataError(f"prompt_format {prompt_format!r}: {error}; literal braces are doubled") from error
    if strange := [name for name in fields if name != "question"]:
        raise DataError(
            f"prompt_format {prompt_format!r} has the field {{{strange[0]}}}, but only {{question}} is known; literal "
            "braces are doubled: \\boxed{{}}"
        )
    if not fields:
        raise DataError(f"prompt_format {prompt_format!r} does not contain {{question}}")
    try:
        prompt_format.format(question="")
    except (ValueError, LookupError) as error:
        raise DataError(f"prompt_format {prompt_format!r}: {error}") from error
    if system_prompt is not None and keep_system:
        raise DataError("system_prompt and keep_system exclude each other")
    if not chat and (system_prompt is not None or keep_system):
        raise DataError("a prompt without chat template has no system message: put the text into prompt_format")
    if chat and getattr(tokenizer, "chat_template", None) is None:
        raise DataError(
            "the tokenizer has no chat template: use chat=False (for a base model), or give it one "
            "(chat_template.jinja beside the tokenizer)"
        )


def _with_prompts(
    rows: list[Row],
    tokenizer: Any,
    chat: bool,
    prompt_format: str,
    system_prompt: str | None,
    keep_system: bool,
    answer_prefix: str,
    progress: bool,
) -> Iterator[tuple[Row, list[int]]]:
    """Pairs every row with its token ids, tokenising a batch when its first row is asked for."""
    starts: Iterable[int] = range(0, len(rows), _BATCH)
    if progress:
        from rich.progress import track

        starts = track(starts, description="Tokenising")
    for start in starts:
        batch = rows[start : start + _BATCH]
        texts = [prompt_format.format(question=row.question) for row in batch]
        if chat:
            systems = [row.system if keep_system else system_prompt for row in batch]
            texts = _render(texts, systems, tokenizer)
        # A chat template writes the special tokens itself.
        ids = tokenizer([text + answer_prefix for text in texts], add_special_tokens=not chat)["input_ids"]
        yield from zip(batch, ids, strict=True)


def _render(texts: list[str], systems: list[str | None], tokenizer: Any) -> list[str]:
    chats = [
        ([] if system is None else [{"role": "system", "content": system}]) + [{"role": "user", "content": text}]
        for text, system in zip(texts, systems, strict=True)
    ]
    try:
        return tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise anything, and often does for a system message
        raise DataError(f"the tokenizer's chat template refuses the messages: {error}") from error
