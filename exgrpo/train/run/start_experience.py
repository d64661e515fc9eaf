"""A new run begins with experience from elsewhere: traces become trajectories of its questions, tokens and policy."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Self

import numpy as np

from exgrpo.train.common.distributed import World, agree
from exgrpo.train.common.errors import DataError
from exgrpo.train.common.records import Rollout, TokenIds, Trajectory
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.common.success import is_success
from exgrpo.train.config.replay import Setting
from exgrpo.train.data.questions import Question
from exgrpo.train.replay import rules
from exgrpo.train.replay.table import Origin
from exgrpo.train.reward.names import reward_of
from exgrpo.train.rollout.stops import text_of
from exgrpo.train.run.traces import Trace, read_traces
from exgrpo.train.trainer import Trainer

CHUNK = 1024
"""Traces that are encoded, graded or scored at once."""


class Questions:
    """Finds the training question of a trace: by its text and gold answer, else by the token ids of its prompt.

    Where a trace has no gold answer, its text is enough. Of equal questions the first one is found.

    Args:
        questions: of the run.
    """

    def __init__(self, questions: Sequence[Question]) -> None:
        self._by_gold: dict[tuple[str, str], Question] = {}
        self._by_text: dict[str, Question] = {}
        self._by_prompt: dict[tuple[int, ...], Question] = {}
        for question in questions:
            self._by_gold.setdefault((question.text, question.gold), question)
            self._by_text.setdefault(question.text, question)
            self._by_prompt.setdefault(question.prompt, question)

    def find(self, trace: Trace) -> Question | None:
        """The question of a trace; None: it is not among them, or has another gold answer."""
        if trace.question is not None:
            by_text = (
                self._by_text.get(trace.question)
                if trace.gold is None
                else self._by_gold.get((trace.question, trace.gold))
            )
            if by_text is not None:
                return by_text
        by_prompt = None if trace.prompt is None else self._by_prompt.get(tuple(trace.prompt.tolist()))
        return by_prompt if by_prompt and trace.gold in (None, by_prompt.gold) else None


@dataclass(frozen=True)
class Encoding:
    """How the run's model reads and writes text.

    Attributes:
        encode: texts to their token ids, without the special tokens around a text.
        decode: token ids to text, special tokens kept.
        eos: ids of all tokens that end an answer; the first is appended to a text that has ended.
        vocabulary: number of token ids that the model knows.
        stop: strings that end an answer.
    """

    encode: Callable[[Sequence[str]], Sequence[Sequence[int]]]
    decode: Callable[[Any], str]
    eos: tuple[int, ...]
    vocabulary: int
    stop: tuple[str, ...] = ()

    @classmethod
    def of(cls, pretrained: Any, stop: tuple[str, ...]) -> Self:
        """That of a `Pretrained`."""
        tokenizer, own = pretrained.tokenizer, pretrained.tokenizer.eos_token_id
        return cls(
            encode=lambda texts: tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else [],
            decode=tokenizer.decode,
            eos=tuple(sorted(pretrained.eos, key=lambda eos: eos != own)),
            vocabulary=pretrained.model.config.get_text_config().vocab_size,
            stop=stop,
        )

    def same_tokens(self, trace: Trace, question: Question) -> bool:
        """Whether the trace's token ids are this model's: they mean the same prompt and the same answer."""
        ids = trace.tokens
        if ids is None or trace.prompt is None or tuple(trace.prompt.tolist()) != question.prompt:
            return False
        if not len(ids) or ids.max() >= self.vocabulary:
            return False
        answer = Rollout(ids, trace.finished, written=trace.written)
        return text_of(answer, self.decode, question.stops(self.stop)) == trace.response

    def tokens(self, traces: Sequence[Trace]) -> list[tuple[TokenIds, bool]]:
        """The texts of traces as token ids [R], and whether they end; an empty text has no tokens.

        What has ended ends with EOS, and nothing comes behind the first EOS.
        """
        found = []
        for trace, ids in zip(traces, self.encode([trace.response for trace in traces]), strict=True):
            array = np.array(ids, np.int32)
            ends = np.flatnonzero(np.isin(array, self.eos))
            if len(ends):
                found.append((array[: ends[0] + 1], True))
            elif trace.finished and len(array):
                found.append((np.append(array, np.int32(self.eos[0])), True))
            else:
                found.append((array, trace.finished))
        return found


@dataclass
class Started:
    """What a run has begun with: how many traces were stored, left out and changed.

    Attributes:
        source: file or folder.
        read: traces in it.
        stored: trajectories.
        questions: how many questions they belong to.
        unknown: left out, since their question is not among the training questions.
        long: left out, since they have more than rollout.max_tokens tokens.
        empty: left out, since they have no token.
        observing: left out, since an environment wrote some of their tokens, which are not those of this model.
        repeated: left out, since the same answer comes again later.
        encoded: their text was encoded, since the file has no tokens of this model.
        graded: had no reward.
        scored: their log-probs were computed by this run's policy.
        certain: have no log-probs, so that their writer counts as certain.
    """

    source: str
    read: int = 0
    stored: int = 0
    questions: int = 0
    unknown: int = 0
    long: int = 0
    empty: int = 0
    observing: int = 0
    repeated: int = 0
    encoded: int = 0
    graded: int = 0
    scored: int = 0
    certain: int = 0

    def _counted(self, *names: tuple[str, str]) -> str:
        return ", ".join(f"{count} {words}" for name, words in names if (count := getattr(self, name)))

    @property
    def left_out(self) -> str:
        """How many were left out, and why."""
        return self._counted(
            ("unknown", "to questions that are not trained on"),
            ("long", "longer than rollout.max_tokens"),
            ("empty", "without a token"),
            ("observing", "with replies of an environment in tokens of another model"),
            ("repeated", "repeated"),
        )

    def __str__(self) -> str:
        changed = self._counted(
            ("encoded", "encoded from text"),
            ("graded", "graded"),
            ("scored", "with log-probs of this run's policy"),
            ("certain", "without log-probs: their writer counts as certain"),
        )
        of = f"the experience starts with {self.stored} answers to {self.questions} questions from {self.source}"
        return of + (f"; {changed}" if changed else "") + (f"; left out: {self.left_out}" if self.left_out else "")


@dataclass(eq=False, slots=True)
class _Row:
    """A trace on its way: its question and tokens, and what is still to come."""

    trace: Trace
    question: Question
    tokens: TokenIds
    finished: bool
    own_tokens: bool
    reward: float | None = field(init=False)
    key: int = field(init=False)

    def __post_init__(self) -> None:
        self.reward, self.key = self.trace.reward, self.trace.key


def start_experience(trainer: Trainer, encoding: Encoding) -> Started | None:
    """Fill the experience of a new run with the traces that `experience.start` names; all ranks call it together.

    Everything in the file is stored that belongs to a training question and fits, whatever its reward; of equal answers
    the last one, unless the method stores whole groups. All of it counts as written before the first step.

    Args:
        trainer: of the run, before its first step.
        encoding: of its model.

    Returns:
        what was stored; None: the option is not given.

    Raises:
        DataError: on every rank, where the file cannot be read or nothing of it can be used.
        RewardError: on every rank, where the reward of an answer is no number.
    """
    options, world = trainer.config.experience, trainer.answerer.world
    if options.start is None:
        return None
    started = Started(str(options.start))
    rows = agree(world, lambda: _read(trainer, encoding, started))
    _check_alike(world, rows, started)
    _grade(trainer, rows, started)
    rows = _distinct(rows, getattr(rules.find("admit", options.admit), "distinct", None), started)
    started.encoded = sum(not row.own_tokens for row in rows)
    trajectories = _trajectories(trainer, rows, started)
    counts = success_counts(trajectories, [row.trace for row in rows], trainer.replay.setting)
    origins = [
        _origin(trajectory, row.trace, counts[trajectory.question], trainer.replay.setting)
        for trajectory, row in zip(trajectories, rows, strict=True)
    ]
    trainer.replay.memory.fill(trajectories, origins, counts)
    started.stored, started.questions = len(rows), len(counts)
    return started


def _read(trainer: Trainer, encoding: Encoding, started: Started) -> list[_Row]:
    """The traces that can be used, in the order of the file."""
    config = trainer.config
    questions = Questions(trainer.questions)
    rows: list[_Row] = []
    traces = read_traces(config.experience.start) if config.experience.start else iter(())
    while chunk := list(islice(traces, CHUNK)):
        started.read += len(chunk)
        for row in _encoded(chunk, questions, encoding, started):
            if not len(row.tokens):
                started.empty += 1
            elif len(row.tokens) > config.rollout.max_tokens:
                started.long += 1
            else:
                rows.append(row)
    if not rows:
        reason = f"of its {started.read} rows, {started.left_out}" if started.read else "it has no rows"
        raise DataError(f"experience.start: nothing in {started.source} can be used: {reason}")
    return rows


def _encoded(traces: Sequence[Trace], questions: Questions, encoding: Encoding, started: Started) -> Iterator[_Row]:
    """The traces of known questions in tokens of the run's model."""
    found = [(trace, question) for trace in traces if (question := questions.find(trace))]
    started.unknown += len(traces) - len(found)
    same = [encoding.same_tokens(trace, question) for trace, question in found]
    others = iter(encoding.tokens([trace for (trace, _), own in zip(found, same, strict=True) if not own]))
    for (trace, question), own in zip(found, same, strict=True):
        tokens, finished = (trace.tokens, trace.finished) if own else next(others)
        assert tokens is not None
        if trace.written is not None and not own:  # its text does not say who wrote what
            started.observing += 1
            continue
        # What is needed no more is not kept: there may be a million traces.
        yield _Row(replace(trace, question=None, gold=None, prompt=None), question, tokens, finished, own)


def _check_alike(world: World, rows: Sequence[_Row], started: Started) -> None:
    """Ranks decide alike only if they have read the same."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row.question.index.to_bytes(8, "little") + row.tokens.tobytes())
    if len(set(world.gather(digest.hexdigest()))) > 1:
        raise DataError(f"experience.start: the processes have read different rows from {started.source}")


def _grade(trainer: Trainer, rows: Sequence[_Row], started: Started) -> None:
    """Give rewards to the rows without one; each rank grades a share."""
    answerer = trainer.answerer
    missing = [row for row in rows if row.reward is None]
    started.graded = len(missing)
    for first in range(0, len(missing), CHUNK):
        chunk = missing[first : first + CHUNK]
        share = answerer.world.split(chunk)
        grading = answerer.grader.begin()
        for _, row in share:
            of = row.question
            grading.add(row.trace.response, of.gold, of.text, reward_of(of.reward, answerer.reward), of.columns)
        grades = agree(answerer.world, grading.finish)
        graded = zip(share, grades.reward, grades.key, strict=True)
        found = answerer.world.join([(place, (reward, key)) for (place, _), reward, key in graded])
        for row, (reward, key) in zip(chunk, found, strict=True):
            row.reward, row.key = reward, key


def _distinct(rows: list[_Row], distinct: str | None, started: Started) -> list[_Row]:
    """Of equal answers to a question the last one, where the method has no more than one; see `experience.admit`."""
    if distinct is None:
        return rows
    kept: dict[tuple[int, int | bytes], _Row] = {}
    for row in rows:
        same = (row.question.index, row.key if distinct == "key" and row.key else row.tokens.tobytes())
        kept.pop(same, None)
        kept[same] = row
    started.repeated += len(rows) - len(kept)
    return list(kept.values())


def _trajectories(trainer: Trainer, rows: Sequence[_Row], started: Started) -> list[Trajectory]:
    """The rows with their rewards and the log-probs that the options ask for."""
    rule, model = trainer.config.experience.start_log_prob, trainer.config.policy.path
    trajectories = []
    for row in rows:
        trace = row.trace
        assert row.reward is not None
        one = Trajectory(
            question=row.question.index,
            response=row.tokens,
            log_prob=np.zeros(len(row.tokens), np.float32),
            finished=row.finished,
            reward=row.reward,
            step=0,
            behaviour="unknown",
            key=row.key,
            written=trace.written,
        )
        known = row.own_tokens and trace.log_prob is not None and trace.behaviour != "unknown"
        if known and (rule == "keep" or (rule == "recompute" and trace.model == model)):
            assert trace.log_prob is not None
            one = replace(one, log_prob=trace.log_prob, behaviour=trace.behaviour or "engine")
        trajectories.append(one)
    if rule == "unknown":
        started.certain = len(rows)
        return trajectories
    unknown = [i for i, one in enumerate(trajectories) if one.behaviour == "unknown"]
    started.scored = len(unknown)
    for first in range(0, len(unknown), CHUNK):
        chunk = unknown[first : first + CHUNK]
        batch = StepBatch.of_answers(
            [np.array(rows[i].question.prompt, np.int32) for i in chunk],
            [Rollout(rows[i].tokens, rows[i].finished, written=rows[i].trace.written) for i in chunk],
        )
        log_prob = trainer.policy.score(batch, trainer.sampling.temperature).log_prob
        for place, i in enumerate(chunk):
            trajectories[i] = replace(trajectories[i], log_prob=log_prob[batch.at(place)], behaviour="trainer")
    return trajectories


def success_counts(trajectories: Sequence[Trajectory], traces: Sequence[Trace], setting: Setting) -> dict[int, float]:
    """The success count of each question with trajectories, on the scale of K, inside [1, K-1].

    K m / F of the latest group that is known, else of the stored answers themselves.
    """
    of_groups: dict[int, float] = {}
    successes: dict[int, list[bool]] = {}
    for one, trace in zip(trajectories, traces, strict=True):
        successes.setdefault(one.question, []).append(bool(is_success(one.reward, setting.success)))
        if trace.answers:
            of_groups[one.question] = trace.successes / trace.answers
    return {
        question: float(np.clip(setting.samples * of_groups.get(question, np.mean(right)), 1, setting.samples - 1))
        for question, right in successes.items()
    }


def _origin(one: Trajectory, trace: Trace, count: float, setting: Setting) -> Origin:
    """What is known of the group that it was written in; an advantage that is not is that of a group of this count."""
    advantage = trace.advantage
    if advantage is None:
        rate = count / setting.samples
        advantage = one.reward - rate * setting.success
        if setting.scale_by_std:
            advantage /= math.sqrt(rate * (1 - rate))
        if setting.leave_one_out:
            advantage *= setting.samples / (setting.samples - 1)
    return Origin(advantage, trace.successes, trace.answers, 0)
