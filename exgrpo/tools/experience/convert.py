"""Answers in files of other projects become a data set that a run begins with: `exgrpo experience import`.

Rows are read, checked and written some at a time. What is written has the columns of `exgrpo.train.run.traces`.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import ValidationError

from exgrpo.tools.experience.export import COLUMNS, ROWS, SCHEMA, TOKENS, card, new_folder, write_shards
from exgrpo.tools.experience.forms import FORMS, Answer, Decode, Form
from exgrpo.train.common import jsonl, plain
from exgrpo.train.common.errors import ConfigError, DataError, MissingDataError, ModelError, os_errors_as, shown
from exgrpo.train.config.pretrained import located
from exgrpo.train.config.section import explain
from exgrpo.train.data.files import local_files, parquet_values
from exgrpo.train.data.prompts import PROMPTS, PromptFormat
from exgrpo.train.run.traces import BATCH, NAMES_QUESTION, parse_trace

SHOWN_PROBLEMS = 5


@dataclass
class Imported:
    """What was read from files of others, and what was left out.

    Attributes:
        source: the files.
        title: of their form.
        answers: that were written.
        questions: hashes of what their questions are known by.
        unscored: answers without log-probs.
        ungraded: answers without a reward.
        rewards: names of the parts that rewards are sums of.
        empty: rows without an answer.
        bad: rows that cannot be right.
        problems: the first of these, each with its place and what is wrong.
    """

    source: str
    title: str
    answers: int = 0
    questions: set[int] = field(default_factory=set)
    unscored: int = 0
    ungraded: int = 0
    rewards: dict[str, None] = field(default_factory=dict)
    empty: int = 0
    bad: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, row: Answer) -> None:
        """Count an answer that is written."""
        prompt = row.get("prompt_ids")
        self.answers += 1
        self.questions.add(hash((row.get("question"), row.get("answer"), None if prompt is None else bytes(prompt))))
        self.unscored += row.get("log_prob") is None
        self.ungraded += row.get("reward") is None

    @property
    def facts(self) -> dict[str, object]:
        """What a card says of them."""
        return {
            "form": self.title,
            "answers": f"{self.answers:,}",
            "questions": f"{len(self.questions):,}",
            "reward": " + ".join(self.rewards) or "none",
            "without a reward, so that a run grades them": f"{self.ungraded:,}",
            "without log-probs, so that the policy of a run scores them at its start": f"{self.unscored:,}",
            "rows left out, without an answer": f"{self.empty:,}",
            "rows left out, which cannot be right": f"{self.bad:,}",
        }

    def __str__(self) -> str:
        said = f"{self.title}, {self.answers:,} answers to {len(self.questions):,} questions"
        more = [f"{name}: {value}" for name, value in list(self.facts.items())[3:] if value != "0"]
        problems = [f"left out: {problem}" for problem in self.problems]
        return "\n".join([f"{self.source}: {said}", *more, *problems])


@dataclass(frozen=True)
class Reading:
    """How files are read.

    Attributes:
        files: in their order.
        form: of their rows.
        decode: token ids to text.
        prompts: how their questions became what they have in the place of a question.
        rewards: names of the parts whose sum is the reward; None: all there are.
        skip_bad: whether rows that cannot be right are left out.
        told: what comes of it.
    """

    files: Sequence[Path]
    form: type[Form]
    decode: Decode
    prompts: PromptFormat
    rewards: Sequence[str] | None
    skip_bad: bool
    told: Imported

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All answers with the columns of a trace.

        Raises:
            DataError: a file cannot be read, or a row cannot be right and such rows are not left out.
        """
        rows: list[Answer] = []
        size = 0
        for row in self._rows():
            self.told.add(row)
            rows.append(row)
            size += len(row["response"])
            if len(rows) == ROWS or size >= TOKENS:
                yield pa.RecordBatch.from_pylist(rows, SCHEMA)
                rows, size = [], 0
        if rows:
            yield pa.RecordBatch.from_pylist(rows, SCHEMA)

    def _rows(self) -> Iterator[Answer]:
        for path in self.files:
            for place, value in read_values(path):
                try:
                    found = [self._row(answer, place) for answer in self._answers(value)]
                except DataError as error:
                    problem = f"{place}: {error}"
                    if not self.skip_bad:
                        raise DataError(f"{problem}; mend the row, or give --skip_bad to leave such rows out") from None
                    self.told.bad += 1
                    self.told.problems += [problem] if len(self.told.problems) < SHOWN_PROBLEMS else []
                    continue
                self.told.empty += not found
                yield from found

    def _answers(self, value: Any) -> Iterator[Answer]:
        if isinstance(value, DataError):
            raise value
        if not isinstance(value, dict):
            raise DataError(f"expected an object, got {type(value).__name__}")
        try:
            return self.form.model_validate(value).answers(self.decode)
        except ValidationError as error:
            raise DataError(explain(error, self.form, self.form.title)) from None

    def _row(self, answer: Answer, place: str) -> Answer:
        """An answer with the columns of a trace, which a run can read."""
        if (text := answer.get("question")) is not None:
            answer["question"] = self.prompts.question_in(text)
            if answer["question"] is None:
                raise DataError(f"its question does not have the form of --prompt_format: {shown(text)}")
        row = {**answer, "reward": self._reward(answer.pop("rewards", {}))}
        parse_trace(row, place)
        return row

    def _reward(self, parts: dict[str, float | None]) -> float | None:
        names = parts if self.rewards is None else self.rewards
        if missing := [name for name in names if name not in parts]:
            raise DataError(f"has no reward {shown(missing[0])}; there is {', '.join(parts) or 'none'}")
        values = {name: value for name in names if (value := parts[name]) is not None}
        self.told.rewards |= dict.fromkeys(values)
        return sum(values.values()) if values else None


def import_answers(
    source: str,
    folder: Path,
    *,
    form: str | None = None,
    skip_bad: bool = False,
    rewards: Sequence[str] | None = None,
    prompt_format: str = "{question}",
    tokenizer: str | None = None,
) -> Imported:
    """Write answers from files of others as a data set that `experience.start` takes.

    Args:
        source: a .parquet, .jsonl or .json file, or a pattern that matches several.
        folder: of the data set; it is made, whole or not at all.
        form: one of `FORMS`; None: it is recognised.
        skip_bad: leave out rows that cannot be right.
        rewards: names of the parts whose sum is the reward; None: all there are.
        prompt_format: how a question became what the files have in its place, as `data.prompt_format`.
        tokenizer: path or name of the model that wrote the answers, for forms that hold token ids.

    Raises:
        ConfigError: the form needs a tokenizer, or has no use for one.
        DataError: a file or row cannot be read, the form is not known, or no row holds an answer.
        ModelError: the tokenizer cannot be loaded.
        OutputError: the folder is there and not empty, or cannot be written.
    """
    prompts = PromptFormat(1, prompt_format=PROMPTS[prompt_format].text if prompt_format in PROMPTS else prompt_format)
    prompts.check_settings()
    with new_folder(folder) as unfinished:
        files = local_files(source)
        if not files:
            raise MissingDataError(f"{source}: there is no such file")
        kind = FORMS[form] if form else recognised(files)
        told = Imported(source, kind.title)
        reading = Reading(files, kind, decoder(kind, tokenizer), prompts, rewards, skip_bad, told)
        write_shards(reading.batches(), unfinished / "data")
        if not told.answers:
            first = f", the first: {told.problems[0]}" if told.problems else ""
            left_out = f"{told.empty} of its rows hold none, and {told.bad} cannot be right{first}"
            raise DataError(f"{source}: there is no answer in this {kind.title}: {left_out}")
        about = f"Answers to questions whose answers can be verified, from files of another project ({kind.title})."
        (unfinished / "README.md").write_text(card(told.answers, about, told.facts, COLUMNS), encoding="utf-8")
    return told


def read_values(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a file with their places; in the place of a line that is no JSON, the error.

    Raises:
        DataError: the file cannot be read, or is of another kind.
    """
    if path.suffix == ".parquet":
        for number, value in enumerate(parquet_values(path, rows=BATCH), start=1):
            yield f"{path} row {number}", value
        return
    if path.suffix == ".csv":
        raise DataError(f"{path}: answers are read from .parquet, .jsonl and .json")
    with os_errors_as(DataError, f"{path} cannot be read"), path.open("rb") as file:
        if path.suffix == ".json" and file.read(1024).lstrip().startswith(b"["):
            file.seek(0)
            try:
                values = plain.parse_json(file.read())
            except ValueError as error:
                raise DataError(f"{path}: not valid JSON: {shown(error)}") from None
            yield from ((f"{path} row {number}", value) for number, value in enumerate(values, start=1))
            return
        file.seek(0)
        for line in jsonl.parsed(file):
            yield f"{path} line {line.number}", DataError(line.problem) if line.problem else line.value


def recognised(files: Sequence[Path]) -> type[Form]:
    """The form of files, by the columns of their first row.

    Raises:
        DataError: they have no row, or their columns are those of no form or of several.
    """
    rows = ((place, value) for path in files for place, value in read_values(path))
    for place, value in rows:
        if isinstance(value, dict):
            return FORMS[_form_of(value, place)]
    raise DataError(f"{', '.join(map(str, files))}: no row is an object")


def _form_of(columns: Collection[str], place: str) -> str:
    if "response" in columns and {*columns} & {*NAMES_QUESTION}:
        raise DataError(f"{place}: a run reads this as it is: name the file in --experience.start")
    fits = [name for name, form in FORMS.items() if form.known_by <= {*columns}]
    if len(fits) != 1:
        of = f"are those of {' and of '.join(fits)}" if fits else "are those of no form that is known"
        raise DataError(
            f"{place}: its columns {shown(', '.join(columns))} {of}: --form names one of {', '.join(FORMS)}"
        )
    return fits[0]


def decoder(form: type[Form], tokenizer: str | None) -> Decode:
    """What reads the token ids of a form; see `import_answers` for the errors."""
    if not form.tokens:
        if tokenizer is not None:
            raise ConfigError(f"{form.title} holds no token ids that --tokenizer could read: leave it out")
        return str
    if tokenizer is None:
        raise ConfigError(
            f"{form.title} holds token ids: --tokenizer must name the model that wrote them, by its path or name"
        )
    from transformers import AutoTokenizer  # takes seconds: only where it is needed

    try:
        return AutoTokenizer.from_pretrained(located(tokenizer), trust_remote_code=False).decode
    except Exception as error:  # tokenizers and their files have errors of their own
        raise ModelError(f"--tokenizer {tokenizer}: {shown(error)}") from error
