"""Select the rows of a run's sources to train on: those with an earnable gold answer, one per question."""

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from rich.console import Console
from rich.progress import track

from exgrpo.train.common.errors import DataError, shown
from exgrpo.train.config.options import Config, RewardConfig
from exgrpo.train.config.sources import names_of, settings_of
from exgrpo.train.data.files import own_reward, read_rows
from exgrpo.train.data.prompts import PromptFormat
from exgrpo.train.data.questions import Question
from exgrpo.train.data.rows import REMEDY, Row, canonical, first_places
from exgrpo.train.reward.contract import Columns
from exgrpo.train.reward.grading import AUTO, math_no_think, readable_gold
from exgrpo.train.reward.names import BUILTIN, DEFAULT, decisive_part_of
from exgrpo.train.reward.pool import Grader

WRITTEN = {AUTO: "\\boxed{%s}", "boxed": "\\boxed{%s}", "tags": "<answer>%s</answer>", "line": "Answer: %s"}
"""Response that states an answer verbatim, by `reward.form`; "hashes" holds digits only."""
UNEARNED = f"{__name__}:unearned"

_NUMBER = re.compile(r"-?[0-9]{1,100}(?:\.[0-9]{1,100})?")
_CHUNK = 512

COUNTED_WRONG = "answers to them count as wrong"
"""Fate of unearnable held-out questions: they stay in the average, which is over all rows of the file."""


@dataclass(frozen=True, eq=False)
class Selection:
    """Rows to train on, and messages about the others.

    Attributes:
        rows: rows by source, one for each question of it.
        questions: rows by source whose question no earlier source asks.
        counted: number of rows in the sources as a prefix of the number of questions ("400 rows, "); empty if all rows
            ask different questions.
        note: one line about gold answers that cannot be earned; empty: there are none.
    """

    rows: list[list[Row]]
    questions: list[list[Row]]
    counted: str
    note: str


def reward_name(config: Config, source: str) -> str:
    """Return the name of the reward that grades the questions of a source."""
    return config.reward.function or settings_of(source, config.data.sources).reward or own_reward(source)


def read_sources(
    config: Config,
    sources: Sequence[str],
    columns: Callable[[str], Columns],
    *,
    split: str,
    limit: int | None,
    seed: int,
) -> list[list[Row]]:
    """Return the rows of each source; `columns` returns the columns that a reward takes, by its name.

    The other arguments are those of `read_rows`, which raises DataError.
    """
    return [
        read_rows(
            source,
            split=split,
            limit=limit,
            seed=seed,
            columns=columns(reward_name(config, source)),
            names=names_of(source, config.data),
            reward=reward_name(config, source),
        )
        for source in sources
    ]


def select(config: Config, columns: Callable[[str], Columns], *, progress: bool = False) -> Selection:
    """Read the sources to train on and select their rows; `columns` as in `read_sources`.

    Raises:
        DataError: a source cannot be read, or no row of it is left.
    """
    data = config.data
    found = read_sources(config, data.train, columns, split=data.train_split, limit=data.train_limit, seed=config.seed)
    read = sum(map(len, found))
    pairs = unearnable_pairs(chain.from_iterable(found), config.reward, progress=progress)
    left_out = "their rows are left out; --data.keep_unreadable True trains on them"
    note = gold_note(chain.from_iterable(found), pairs, "they are trained on" if data.keep_unreadable else left_out)
    if not data.keep_unreadable:
        found = [[row for row in rows if (row.reward, row.gold) not in pairs] for rows in found]
        if empty := [source for source, rows in zip(data.train, found, strict=True) if not rows]:
            raise DataError(f"{shown(empty[0])} has no gold answer that can be earned: {note}; {REMEDY}")
    rows, questions = _distinct(config, found)
    if data.train_weights and not all(questions):
        source = shown(data.train[questions.index([])])
        raise DataError(
            f"data.train_weights: all questions of {source} are among those of the sources before it: leave it out"
        )
    repeated = sum(map(len, found)) > sum(map(len, questions))
    return Selection(rows, questions, f"{read} rows, " if repeated else "", note)


def unearnable_pairs(
    questions: Iterable[Row | Question], options: RewardConfig, *, progress: bool = False
) -> set[tuple[str, str]]:
    """Return pairs of a reward and a gold answer that is missing, or that this reward can never match.

    The user's rewards are not checked, since their comparison is unknown.
    """
    pairs = {(one.reward, one.gold) for one in questions}
    judged = {pair for pair in pairs if pair[0] in BUILTIN}
    lost = unearnable(sorted({gold for _, gold in judged}), options, progress=progress)
    return {pair for pair in pairs if not pair[1] or (pair in judged and pair[1] in lost)}


def unearnable(golds: Iterable[str], options: RewardConfig, *, progress: bool = False) -> set[str]:
    """Return the gold answers for which `math` and `math_no_think` reward no response.

    The response tested repeats the gold answer letter by letter in the form of `reward.form`. Plain numbers can always
    be earned; all others are tested in processes with the limits of grading. A gold answer that exceeds them counts as
    earnable, since a timeout may differ between ranks, which must decide alike.
    """
    tried = {gold: _response(gold, options.form) for gold in dict.fromkeys(golds) if not _NUMBER.fullmatch(gold)}
    found = {gold for gold, response in tried.items() if response is None}
    pairs = [(response, gold) for gold, response in tried.items() if response is not None]
    if not pairs:
        return found
    console = Console(stderr=True)
    starts = range(0, len(pairs), _CHUNK)
    with Grader.of([UNEARNED], options, parts={}, form=AUTO) as grader:
        shown = progress and console.is_terminal
        for start in track(starts, "Reading gold answers", console=console, transient=True, disable=not shown):
            chunk = pairs[start : start + _CHUNK]
            grades = grader.grade(chunk)
            found |= {gold for (_, gold), reward in zip(chunk, grades.reward, strict=True) if reward}
    return found


def _response(gold: str, form: str) -> str | None:
    """Return the graded part of a response that states `gold`; None if this form cannot express it."""
    if form == "hashes":  # any number can be written in decimals, so a box is tested instead
        return f"\\boxed{{{gold}}}" if re.search("[0-9]", gold) else None
    return decisive_part_of(DEFAULT, form)(WRITTEN[form] % gold)


def unearned(response: str, gold: str) -> float:
    """Return 1.0 if `response` gets no reward of this package, else 0.0."""
    return float(not (readable_gold(gold) and math_no_think(response, gold)))


def gold_note(questions: Iterable[Row | Question], pairs: Collection[tuple[str, str]], fate: str) -> str:
    """Return one line about gold answers in `unearnable_pairs`, quoting the first; "" if there are none.

    `fate` is what happens to their questions, for the message.
    """
    every = list(questions)
    found = [one for one in every if (one.reward, one.gold) in pairs]
    if not found:
        return ""
    first = found[0]
    place = (first.place if isinstance(first, Row) else shown(first.text, 80)) or first.source
    gold = f"the first, {shown(first.gold, 40)}, in {place}" if first.gold else f"the first is missing in {place}"
    return f"{len(found)} of {len(every)} gold answers cannot be read or can never be earned, {gold}: {fate}"


def overlap_note(train: Iterable[Row], held_out: Mapping[str, Iterable[Row]]) -> str:
    """Return one line about training questions that are also held out, by name of their set; "" if there are none."""
    texts = {name: set(map(_words, rows)) for name, rows in held_out.items()}
    found = [row for row in train if any(_words(row) in of_set for of_set in texts.values())]
    if not found:
        return ""
    names = [name for name, of_set in texts.items() if not of_set.isdisjoint(map(_words, found))]
    many = "1 training question is" if len(found) == 1 else f"{len(found)} training questions are"
    return (
        f"{many} among the held-out ones of {', '.join(names)}, the first {shown(found[0].text, 80)}: remove them from "
        "one side, for the evaluation measures what was trained on"
    )


def _words(row: Row) -> str:
    return " ".join(row.text.split())


def _distinct(config: Config, sources: Sequence[list[Row]]) -> tuple[list[list[Row]], list[list[Row]]]:
    """Return the rows by source, one per question, and those of them whose question no earlier source asks.

    A question is identified by its prompt, stop strings, gold answer, reward and the columns taken.
    """
    data = config.data
    settings: dict[Hashable, int] = {}
    seen: set[Hashable] = set()
    found, new = [], []
    for source, rows in zip(data.train, sources, strict=True):
        prompts, stop = PromptFormat.from_source(source, data), settings_of(source, data.sources).stop
        # A number, since hashing the texts of a format for every row would be slow.
        setting = settings.setdefault((prompts, stop, reward_name(config, source)), len(settings))
        system = prompts.keep_system
        keys = [
            (setting, row.question, row.turns, system and row.system, row.gold, canonical(row.columns)) for row in rows
        ]
        places = first_places(keys, set())
        found.append([rows[place] for place in places])
        new.append([found[-1][place] for place in first_places((keys[place] for place in places), seen)])
    return found, new
