"""Experience from elsewhere for a new run: traces become answers to its questions, in its tokens and of its policy."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from exgrpo.train.common.columns import COLUMNS, LOG_PROB_SOURCES, TRAINER, Floats
from exgrpo.train.common.distributed import World, agree
from exgrpo.train.common.errors import DataError
from exgrpo.train.common.functions import Needs
from exgrpo.train.common.records import Rollout, TokenIds
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.common.success import is_success
from exgrpo.train.config.objective import MethodOptions
from exgrpo.train.data.questions import Question
from exgrpo.train.replay import Replay, rules
from exgrpo.train.replay.groups import drift_and_headroom, group_advantages
from exgrpo.train.rollout.stops import text_of
from exgrpo.train.run.traces import Questions, Trace, read_traces

if TYPE_CHECKING:
    from exgrpo.train.trainer import Trainer  # which needs DeepSpeed, and other trainers do without it

CHUNK = 1024
"""Traces that are encoded, graded or scored at once."""


class Answer(NamedTuple):
    """An answer without a reward: its question, its text without the end, and its tokens [R]."""

    question: Question
    text: str
    tokens: TokenIds


@dataclass(frozen=True, eq=False)
class Beginning:
    """A run before its first step, in any trainer.

    Attributes:
        replay: its memory is filled.
        max_tokens: most tokens of an answer.
        world: the processes of the run.
        grade: returns on all ranks the rewards and keys of answers in their order; all ranks call it together.
        score: [T] log-probs of the answers of a batch at the sampling temperature; its questions have their numbers.
        cuts: False if `score` computes log-probs over the whole vocabulary only.
    """

    questions: Sequence[Question]
    replay: Replay
    max_tokens: int
    model: str
    world: World
    grade: Callable[[Sequence[Answer]], Sequence[tuple[float, int]]]
    score: Callable[[StepBatch], Floats]
    cuts: bool = True

    @classmethod
    def from_trainer(cls, trainer: "Trainer") -> Self:
        """Return the one of a run of `exgrpo.train`."""
        config, rollout_worker = trainer.config, trainer.rollout_worker

        def grade(answers: Sequence[Answer]) -> Sequence[tuple[float, int]]:
            share = rollout_worker.world.split(answers)
            grading = rollout_worker.grader.begin()
            for _, (of, text, _) in share:
                grading.add(text, of.gold, of.text, of.reward, of.columns)
            grades = agree(rollout_worker.world, grading.finish)
            graded = zip(share, grades.reward, grades.key, strict=True)
            return rollout_worker.world.join([(place, (reward, key)) for (place, _), reward, key in graded])

        return cls(
            questions=trainer.questions,
            replay=trainer.replay,
            max_tokens=config.rollout.max_tokens,
            model=config.policy.path,
            world=rollout_worker.world,
            grade=grade,
            score=lambda batch: trainer.policy.score(batch, trainer.sampling.temperature).log_prob,
        )


@dataclass(frozen=True)
class Encoding:
    """Conversion between the text of traces and the tokens of the run's model.

    Attributes:
        eos: ids of all tokens that end an answer; a finished text gets the tokenizer's own one.
        prefix: text that ends the prompt; answers of other models may begin with it.
    """

    tokenizer: Any
    eos: Collection[int]
    vocabulary: int
    stop: tuple[str, ...] = ()
    prefix: str = ""

    def read(self, tokens: Sequence[int]) -> str:
        """Return token ids as text without special tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def same_tokens(self, trace: Trace, question: Question) -> bool:
        """True if the trace's token ids mean the same prompt and the same answer to this model."""
        ids, prompt = trace.response_ids, trace.prompt_ids
        if ids is None or prompt is None or tuple(prompt.tolist()) != question.prompt:
            return False
        if (
            not len(ids)
            or max(ids.max(), trace.allowed_tokens.ids.max() if trace.allowed_tokens else 0) >= self.vocabulary
        ):
            return False
        answer = Rollout(ids, trace.finished, response_mask=trace.response_mask)
        return text_of(answer, self.tokenizer.decode, question.stops(self.stop)) == trace.response

    def tokens(self, traces: Sequence[Trace]) -> list[tuple[TokenIds, bool]]:
        """Return the texts of traces as token ids [R] up to the first EOS, each with True if it is finished."""
        texts = [trace.response.removeprefix(self.prefix) for trace in traces]
        encoded = self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        eos = min(self.eos, key=lambda one: one != self.tokenizer.eos_token_id)
        found = []
        for trace, ids in zip(traces, encoded, strict=True):
            array = np.array(ids, np.int32)
            ends = np.flatnonzero(np.isin(array, list(self.eos)))
            if len(ends):
                found.append((array[: ends[0] + 1], True))
            elif trace.finished and len(array):
                found.append((np.append(array, np.int32(eos)), True))
            else:
                found.append((array, trace.finished))
        return found


@dataclass
class Started:
    """Counts of the traces that a run starts with.

    Attributes:
        stored: answers.
        questions: how many questions they belong to.
        changed: number of completed traces, by what was done.
        left_out: number of traces left out, by the reason.
    """

    source: str
    stored: int = 0
    questions: int = 0
    changed: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        of = f"the experience starts with {self.stored} answers to {self.questions} questions from {self.source}"
        changed, left_out = _listed(self.changed), _listed(self.left_out)
        return of + (f"; {changed}" if changed else "") + (f"; left out: {left_out}" if left_out else "")


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {words}" for words, count in counts.items() if count)


@dataclass(frozen=True, eq=False)
class _Read:
    """A trace as an answer to a question of this run; a column whose value is not known is missing."""

    question: Question
    rollout: Rollout
    text: str | None  # what is to be graded
    columns: Mapping[str, Any]


def start_experience(run: Beginning, encoding: Encoding) -> Started | None:
    """Fill the experience of a new run with the traces that `experience.start` names; all ranks call it together.

    All traces to training questions that fit are stored as of step 0, whatever their reward; of equal answers the last
    one, unless the method stores whole groups.

    Returns:
        counts of the stored traces; None: the option is not given.

    Raises:
        DataError: on every rank, if the file cannot be read or nothing in it can be used.
        RewardError: on every rank, if the reward of an answer is no number.
    """
    options = run.replay.options
    if options.experience.start is None:
        return None
    started = Started(str(options.experience.start))
    read = agree(run.world, lambda: _read(run, encoding, started))
    answers = _batch(read)
    _check_alike(run.world, answers, started)
    _grade(run, answers, read, started)
    answers = _distinct(answers, Needs.of(rules.find("admit", options.experience.admit)).distinct, started)
    _score(run, answers, started)
    counts = _success_counts(answers, options)
    _fill_advantages(answers, counts, options)
    # Whatever the file says: no policy of this run has scored them later.
    answers.fill(**drift_and_headroom(answers, answers.old_log_prob, answers.advantage))
    run.replay.memory.fill(answers, counts)
    started.stored, started.questions = len(answers), len(counts)
    return started


def _read(run: Beginning, encoding: Encoding, started: Started) -> list[_Read]:
    questions = Questions(run.questions, encoding.read)
    rows: list[_Read] = []
    traces = read_traces(Path(started.source))
    while chunk := list(islice(traces, CHUNK)):
        found = [(trace, question) for trace in chunk if (question := questions.find(trace))]
        started.left_out["to questions that are not trained on"] += len(chunk) - len(found)
        same = [encoding.same_tokens(trace, question) for trace, question in found]
        others = iter(encoding.tokens([trace for (trace, _), own in zip(found, same, strict=True) if not own]))
        for (trace, question), own in zip(found, same, strict=True):
            tokens, finished = (trace.response_ids, trace.finished) if own else next(others)
            assert tokens is not None
            if trace.response_mask is not None and not own:  # its text does not say who wrote what
                started.left_out["with replies of an environment in tokens of another model"] += 1
            elif not len(tokens):
                started.left_out["without a token"] += 1
            elif len(tokens) > run.max_tokens:
                started.left_out["longer than an answer may be"] += 1
            else:
                started.changed["encoded from text"] += not own
                rows.append(_row(run, question, trace, tokens, finished, own=own))
    if not rows:
        reason = _listed(started.left_out) or "it has no rows"
        raise DataError(f"experience.start: nothing in {started.source} can be used: {reason}")
    return rows


def _row(run: Beginning, question: Question, trace: Trace, tokens: TokenIds, finished: bool, *, own: bool) -> _Read:
    rule = run.replay.options.experience.start_log_prob
    allowed_tokens = trace.allowed_tokens if own and run.cuts else None
    may = rule == "keep" or (rule == "recompute" and trace.model == run.model)
    may = may and own and allowed_tokens is trace.allowed_tokens and trace.old_log_probs_from != "unknown"
    known = trace.log_prob if may else None
    source = "unknown" if known is None else trace.old_log_probs_from or "engine"
    columns: dict[str, Any] = {
        "old_log_prob": np.zeros(len(tokens), np.float32) if known is None else known,
        "old_log_probs_from": LOG_PROB_SOURCES.index(source),
        "reward": math.nan if trace.reward is None else trace.reward,
        "advantage": math.nan if trace.advantage is None else trace.advantage,
        "key": trace.key,
        "successes": trace.group_successes,
        "answers": trace.group_answers,
        **{name: value for name, value in trace.more.items() if own or COLUMNS[name].axis == "row"},
    }
    rollout = Rollout(tokens, finished, response_mask=trace.response_mask, allowed_tokens=allowed_tokens)
    return _Read(question, rollout, trace.response if trace.reward is None else None, columns)


def _batch(read: Sequence[_Read]) -> StepBatch:
    """Return answers, each a group of its own, with all of their columns."""
    batch = StepBatch.from_rollouts(
        [one.question.index for one in read], [1] * len(read), [one.rollout for one in read]
    )
    batch.fill(prompt=[one.question.prompt_ids for one in read])
    for name in dict.fromkeys(name for one in read for name in one.columns):
        column = COLUMNS[name]
        if column.axis == "row":
            batch.fill(**{name: [one.columns.get(name, column.filled(1)[0]) for one in read]})
        else:
            values = [one.columns.get(name, column.filled(len(one.rollout.response))) for one in read]
            batch.fill(**{name: column.joined(values)})
    return batch


def _check_alike(world: World, answers: StepBatch, started: Started) -> None:
    digest = hashlib.sha256(b"".join(one.tobytes() for one in (answers.question, answers.length, answers.token)))
    if len(set(world.gather(digest.hexdigest()))) > 1:
        raise DataError(f"experience.start: the processes have read different rows from {started.source}")


def _grade(run: Beginning, answers: StepBatch, read: Sequence[_Read], started: Started) -> None:
    missing = [row for row, one in enumerate(read) if one.text is not None]
    started.changed["graded"] = len(missing)
    for first in range(0, len(missing), CHUNK):
        chunk = missing[first : first + CHUNK]
        texts = [(read[row].question, read[row].text or "", read[row].rollout.response) for row in chunk]
        for row, graded in zip(chunk, run.grade([Answer(*one) for one in texts]), strict=True):
            answers.reward[row], answers.key[row] = graded


def _distinct(answers: StepBatch, distinct: str | None, started: Started) -> StepBatch:
    """Keep the last of equal answers to a question, if the method stores distinct ones."""
    if distinct is None:
        return answers
    kept: dict[tuple[int, int | bytes], int] = {}
    for row, (question, key) in enumerate(zip(answers.question.tolist(), answers.key.tolist(), strict=True)):
        same = (question, key if distinct == "key" and key else answers.token[answers.at(row)].tobytes())
        kept.pop(same, None)
        kept[same] = row
    started.left_out["repeated"] += len(answers) - len(kept)
    return answers.take_groups([*kept.values()])


def _score(run: Beginning, answers: StepBatch, started: Started) -> None:
    if run.replay.options.experience.start_log_prob == "unknown":
        started.changed["without log-probs: their writer counts as certain"] = len(answers)
        return
    unknown = np.flatnonzero(answers.old_log_probs_from == LOG_PROB_SOURCES.index("unknown"))
    started.changed["with log-probs of this run's policy"] = len(unknown)
    for first in range(0, len(unknown), CHUNK):
        chunk = unknown[first : first + CHUNK]
        answers.put(chunk, old_log_prob=run.score(answers.take_groups(chunk)))
        answers.old_log_probs_from[chunk] = TRAINER


def _success_counts(answers: StepBatch, options: MethodOptions) -> dict[int, float]:
    """Success count K m / F of each question in [1, K-1], of its latest known group, else of its rows."""
    of_groups: dict[int, float] = {}
    right: dict[int, list[bool]] = {}
    of_rows = (answers.question, answers.successes, answers.answers, is_success(answers.reward, options.success))
    for question, successes, size, success in zip(*(values.tolist() for values in of_rows), strict=True):
        right.setdefault(question, []).append(success)
        if size:
            of_groups[question] = successes / size
    return {
        question: float(np.clip(options.samples * of_groups.get(question, np.mean(one)), 1, options.samples - 1))
        for question, one in right.items()
    }


def _fill_advantages(answers: StepBatch, counts: Mapping[int, float], options: MethodOptions) -> None:
    """Fill unknown advantages with those in K answers with the question's success count."""
    place = {question: number for number, question in enumerate(counts)}
    group = [place[question] for question in answers.question.tolist()]
    right, groups = np.array(list(counts.values())), np.arange(len(counts))
    successes = np.full(len(counts), options.success)
    reward = np.concatenate([answers.reward, successes, np.where(successes == 0, -1.0, 0.0)])
    weight = np.concatenate([np.zeros(len(answers)), right, options.samples - right])
    of_k = group_advantages(reward, np.concatenate([group, groups, groups]), weight, options.objective)
    answers.fill(advantage=np.where(np.isnan(answers.advantage), of_k[: len(answers)], answers.advantage))
