"""A new run begins with experience from elsewhere: traces become trajectories of its questions, tokens and policy."""

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from exgrpo.train.common.distributed import World, agree
from exgrpo.train.common.errors import DataError
from exgrpo.train.common.records import Rollout, TokenIds, Trajectory
from exgrpo.train.common.step_batch import Floats, StepBatch
from exgrpo.train.common.success import is_success
from exgrpo.train.config.replay import ExperienceConfig, Setting
from exgrpo.train.data.questions import Question
from exgrpo.train.replay import Replay, rules
from exgrpo.train.replay.table import Origin
from exgrpo.train.reward.names import reward_of
from exgrpo.train.rollout.stops import text_of
from exgrpo.train.run.traces import Questions, Trace, read_traces

if TYPE_CHECKING:
    from exgrpo.train.trainer import Trainer  # which needs DeepSpeed, and other trainers do without it

CHUNK = 1024
"""Traces that are encoded, graded or scored at once."""


class Answer(NamedTuple):
    """An answer without a reward: its question, its text without what ended it, and its tokens [R]."""

    question: Question
    text: str
    tokens: TokenIds


@dataclass(frozen=True, eq=False)
class Beginning:
    """A run before its first step, whichever trainer does it.

    Attributes:
        options: of the experience.
        questions: those that are trained on.
        replay: its memory is filled.
        max_tokens: of an answer.
        model: name or path of the policy that the run starts with.
        world: the processes of the run.
        grade: gives all ranks the rewards and keys of answers in their order; all ranks call it together.
        score: [T] log-probs of the answers of a batch at the sampling temperature; its questions have their numbers.
        cuts: whether it knows the words that tokens were drawn from; if not, their log-probs are over all words.
    """

    options: ExperienceConfig
    questions: Sequence[Question]
    replay: Replay
    max_tokens: int
    model: str
    world: World
    grade: Callable[[Sequence[Answer]], Sequence[tuple[float, int]]]
    score: Callable[[StepBatch], Floats]
    cuts: bool = True

    @classmethod
    def of(cls, trainer: "Trainer") -> Self:
        """That of a run of `exgrpo.train`."""
        config, answerer = trainer.config, trainer.answerer

        def grade(answers: Sequence[Answer]) -> Sequence[tuple[float, int]]:
            share = answerer.world.split(answers)
            grading = answerer.grader.begin()
            for _, (of, text, _) in share:
                grading.add(text, of.gold, of.text, reward_of(of.reward, answerer.reward), of.columns)
            grades = agree(answerer.world, grading.finish)
            graded = zip(share, grades.reward, grades.key, strict=True)
            return answerer.world.join([(place, (reward, key)) for (place, _), reward, key in graded])

        return cls(
            options=config.experience,
            questions=trainer.questions,
            replay=trainer.replay,
            max_tokens=config.rollout.max_tokens,
            model=config.policy.path,
            world=answerer.world,
            grade=grade,
            score=lambda batch: trainer.policy.score(batch, trainer.sampling.temperature).log_prob,
        )


@dataclass(frozen=True)
class Encoding:
    """How the run's model reads and writes text.

    Attributes:
        encode: texts to their token ids, without the special tokens around a text.
        decode: token ids to text, special tokens kept.
        read: token ids to text, special tokens left out.
        eos: ids of all tokens that end an answer; the first is appended to a text that has ended.
        vocabulary: number of token ids that the model knows.
        stop: strings that end an answer.
    """

    encode: Callable[[Sequence[str]], Sequence[Sequence[int]]]
    decode: Callable[[Any], str]
    read: Callable[[Any], str]
    eos: tuple[int, ...]
    vocabulary: int
    stop: tuple[str, ...] = ()

    @classmethod
    def of(cls, tokenizer: Any, eos: Collection[int], vocabulary: int, stop: tuple[str, ...] = ()) -> Self:
        """That of a tokenizer; its own EOS comes first."""
        return cls(
            encode=lambda texts: tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else [],
            decode=tokenizer.decode,
            read=lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True),
            eos=tuple(sorted(eos, key=lambda one: one != tokenizer.eos_token_id)),
            vocabulary=vocabulary,
            stop=stop,
        )

    def same_tokens(self, trace: Trace, question: Question) -> bool:
        """Whether the trace's token ids are this model's: they mean the same prompt and the same answer."""
        ids = trace.tokens
        if ids is None or trace.prompt is None or tuple(trace.prompt.tolist()) != question.prompt:
            return False
        if not len(ids) or max(ids.max(), trace.kept.ids.max() if trace.kept else 0) >= self.vocabulary:
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
        long: left out, since they have more tokens than an answer may have.
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
            ("long", "longer than an answer may be"),
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
    reward: float | None
    key: int


def start_experience(run: Beginning, encoding: Encoding) -> Started | None:
    """Fill the experience of a new run with the traces that `experience.start` names; all ranks call it together.

    Everything in the file is stored that belongs to a training question and fits, whatever its reward; of equal answers
    the last one, unless the method stores whole groups. All of it counts as written before the first step.

    Args:
        run: before its first step.
        encoding: of its model.

    Returns:
        what was stored; None: the option is not given.

    Raises:
        DataError: on every rank, where the file cannot be read or nothing of it can be used.
        RewardError: on every rank, where the reward of an answer is no number.
    """
    options, setting = run.options, run.replay.setting
    if options.start is None:
        return None
    started = Started(str(options.start))
    rows = agree(run.world, lambda: _read(run, encoding, started))
    _check_alike(run.world, rows, started)
    _grade(run, rows, started)
    rows = _distinct(rows, getattr(rules.find("admit", options.admit), "distinct", None), started)
    started.encoded = sum(not row.own_tokens for row in rows)
    trajectories = _trajectories(run, rows, started)
    counts = success_counts(trajectories, [row.trace for row in rows], setting)
    origins = [
        _origin(trajectory, row.trace, counts[trajectory.question], setting)
        for trajectory, row in zip(trajectories, rows, strict=True)
    ]
    run.replay.memory.fill(trajectories, origins, counts)
    started.stored, started.questions = len(rows), len(counts)
    return started


def _read(run: Beginning, encoding: Encoding, started: Started) -> list[_Row]:
    """The traces that can be used, in the order of the file."""
    questions = Questions(run.questions, encoding.read)
    rows: list[_Row] = []
    traces = read_traces(run.options.start) if run.options.start else iter(())
    while chunk := list(islice(traces, CHUNK)):
        started.read += len(chunk)
        for row in _encoded(chunk, questions, encoding, started):
            if not len(row.tokens):
                started.empty += 1
            elif len(row.tokens) > run.max_tokens:
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
        short = replace(trace, question=None, gold=None, prompt=None)
        yield _Row(short, question, tokens, finished, own, trace.reward, trace.key)


def _check_alike(world: World, rows: Sequence[_Row], started: Started) -> None:
    """Ranks decide alike only if they have read the same."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row.question.index.to_bytes(8, "little") + row.tokens.tobytes())
    if len(set(world.gather(digest.hexdigest()))) > 1:
        raise DataError(f"experience.start: the processes have read different rows from {started.source}")


def _grade(run: Beginning, rows: Sequence[_Row], started: Started) -> None:
    """Give rewards to the rows without one."""
    missing = [row for row in rows if row.reward is None]
    started.graded = len(missing)
    for first in range(0, len(missing), CHUNK):
        chunk = missing[first : first + CHUNK]
        found = run.grade([Answer(row.question, row.trace.response, row.tokens) for row in chunk])
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


def _trajectories(run: Beginning, rows: Sequence[_Row], started: Started) -> list[Trajectory]:
    """The rows with their rewards and the log-probs that the options ask for."""
    rule = run.options.start_log_prob
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
            kept=trace.kept if row.own_tokens and run.cuts else None,
        )
        known = row.own_tokens and one.kept is trace.kept and trace.behaviour != "unknown"
        known = known and (rule == "keep" or (rule == "recompute" and trace.model == run.model))
        if known and trace.log_prob is not None:
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
            [trajectories[i].rollout for i in chunk],
        )
        batch.fill(question=[rows[i].question.index for i in chunk])
        log_prob = run.score(batch)
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
        value = rate * setting.success
        if setting.baseline == "log_mean_exp":
            value = setting.beta1 * np.logaddexp(np.log(rate) + setting.success / setting.beta1, np.log1p(-rate))
        advantage = one.reward - value
        if setting.scale_by_std:
            advantage /= math.sqrt(rate * (1 - rate))
        if setting.baseline == "leave_one_out":
            advantage *= setting.samples / (setting.samples - 1)
    return Origin(advantage, trace.successes, trace.answers, 0)
