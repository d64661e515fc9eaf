"""Answers in files of other projects become a data set that a run begins with: `exgrpo experience import`.

Rows are read, checked and written some at a time. What is written has the columns of `exgrpo.train.run.traces`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from exgrpo.tools.experience.export import COLUMNS, ROWS, SCHEMA, new_folder, write, write_card
from exgrpo.tools.experience.forms import FORMS, Answer, Decode, Form
from exgrpo.tools.experience.sources import load_tokenizer
from exgrpo.train.common.errors import ConfigError, DataError, shown
from exgrpo.train.data.files import local_files
from exgrpo.train.data.prompts import PROMPTS, PromptFormat
from exgrpo.train.run.traces import Trace, parse_as, read_values

SHOWN_PROBLEMS = 5
ANSWERS, UNGRADED = "answers", "without a reward, so that a run grades them"
UNSCORED = "without log-probs, so that the policy of a run scores them at its start"
EMPTY, BAD = "rows left out, without an answer", "rows left out, which cannot be right"


@dataclass
class Import:
    """Files of others on their way, and what was read from them so far.

    Attributes:
        source: the files.
        form: of their rows.
        decode: token ids to text.
        prompts: how their questions became what they have in the place of a question.
        named: names of the parts whose sum is the reward; None: all there are.
        skip_bad: whether rows that cannot be right are left out.
        counts: of rows and answers, by what they are.
        rewards: names of the parts that rewards are sums of.
        problems: the first rows that cannot be right, each with its place and what is wrong.
    """

    source: str
    form: type[Form]
    decode: Decode
    prompts: PromptFormat
    named: Sequence[str] | None
    skip_bad: bool
    counts: Counter[str] = field(default_factory=Counter)
    rewards: dict[str, None] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def batches(self, files: Sequence[Path]) -> Iterator[pa.RecordBatch]:
        """All answers with the columns of a trace.

        Raises:
            DataError: a file cannot be read, or a row cannot be right and such rows are not left out.
        """
        rows: list[Answer] = []
        for row in self._rows(files):
            self.counts.update({ANSWERS: 1, UNSCORED: row.get("log_prob") is None, UNGRADED: row["reward"] is None})
            rows.append(row)
            if len(rows) == ROWS:
                yield pa.RecordBatch.from_pylist(rows, SCHEMA)
                rows = []
        if rows:
            yield pa.RecordBatch.from_pylist(rows, SCHEMA)

    def _rows(self, files: Sequence[Path]) -> Iterator[Answer]:
        for place, value in (one for path in files for one in read_values(path)):
            try:
                row = parse_as(self.form, value, self.form.title)
                found = [self._row(answer) for answer in row.answers(self.decode)]
            except DataError as error:
                problem = f"{place}: {error}"
                if not self.skip_bad:
                    raise DataError(f"{problem}; mend the row, or give --skip_bad to leave such rows out") from None
                self.counts[BAD] += 1
                self.problems += [problem] if len(self.problems) < SHOWN_PROBLEMS else []
                continue
            self.counts[EMPTY] += not found
            yield from found

    def _row(self, answer: Answer) -> Answer:
        """An answer with the columns of a trace, which a run can read."""
        if (text := answer.get("question")) is not None:
            answer["question"] = self.prompts.question_in(text)
            if answer["question"] is None:
                raise DataError(f"its question does not have the form of --prompt_format: {shown(text)}")
        row = {**answer, "reward": self._reward(answer.pop("rewards", {}))}
        parse_as(Trace, row, "trace")
        return row

    def _reward(self, parts: dict[str, float | None]) -> float | None:
        names = parts if self.named is None else self.named
        if missing := [name for name in names if name not in parts]:
            raise DataError(f"has no reward {shown(missing[0])}; there is {', '.join(parts) or 'none'}")
        values = {name: value for name in names if (value := parts[name]) is not None}
        self.rewards |= dict.fromkeys(values)
        return sum(values.values()) if values else None

    @property
    def facts(self) -> dict[str, object]:
        """What there is to say of them."""
        of_rows = {name: f"{self.counts[name]:,}" for name in (ANSWERS, UNGRADED, UNSCORED, EMPTY, BAD)}
        return {"form": self.form.title, "reward": " + ".join(self.rewards) or "none", **of_rows}

    def __str__(self) -> str:
        facts = [f"{name}: {value}" for name, value in self.facts.items() if value != "0"]
        return "\n".join([f"{self.source}:", *facts, *(f"left out: {problem}" for problem in self.problems)])


def import_answers(
    source: str,
    folder: Path,
    form: str | None = None,
    *,
    skip_bad: bool = False,
    rewards: Sequence[str] | None = None,
    prompt_format: str = "{question}",
    tokenizer: str | None = None,
) -> Import:
    """Write answers from files of others as a data set that `experience.start` takes.

    Args:
        source: a .parquet, .jsonl or .json file, or a pattern that matches several.
        folder: of the data set; it is made, whole or not at all.
        form: one of `FORMS`; None: it is recognised.
        skip_bad: leave out rows that cannot be right.
        rewards: names of the parts whose sum is the reward; None: all there are.
        prompt_format: how a question became what the files have in its place, as `data.prompt_format`.
        tokenizer: path or name of the model that wrote the answers, for forms that hold token ids.

    Returns:
        what was read.

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
            raise DataError(f"{source}: there is no such file")
        kind = FORMS[form or recognised(files)]
        told = Import(source, kind, decoder(kind, tokenizer), prompts, rewards, skip_bad)
        write(told.batches(files), SCHEMA, unfinished)
        if not told.counts[ANSWERS]:
            raise DataError(f"there is no answer in these files: {told}".replace("\n", "; "))
        about = f"Answers to questions whose answers can be verified, from files of another project ({kind.title})."
        write_card(unfinished, about, told.facts, COLUMNS)
    return told


def recognised(files: Sequence[Path]) -> str:
    """The name of the form of files, by the columns of their first row.

    Raises:
        DataError: they have no row, or its columns are those of no form or of several.
    """
    rows = (one for path in files for one in read_values(path) if isinstance(one[1], dict))
    place, row = next(rows, (None, {}))
    if place is None:
        raise DataError(f"{', '.join(map(str, files))}: no row is an object")
    if "response" in row and {"question", "problem", "prompt_ids"} & {*row}:
        raise DataError(f"{place}: a run reads this as it is: name the file in --experience.start")
    fits = [name for name, form in FORMS.items() if form.known_by <= {*row}]
    if len(fits) != 1:
        of = f"are those of {' and of '.join(fits)}" if fits else "are those of no form that is known"
        raise DataError(f"{place}: its columns {shown(', '.join(row))} {of}: --form names one of {', '.join(FORMS)}")
    return fits[0]


def decoder(form: type[Form], tokenizer: str | None) -> Decode:
    """What reads the token ids of a form; see `import_answers` for the errors."""
    if tokenizer is None and form.tokens:
        raise ConfigError(f"{form.title} holds token ids: --tokenizer must name the model that wrote them")
    if tokenizer is not None and not form.tokens:
        raise ConfigError(f"{form.title} holds no token ids that --tokenizer could read: leave it out")
    return str if tokenizer is None else load_tokenizer(f"--tokenizer {tokenizer}", tokenizer).decode
