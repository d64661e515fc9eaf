"""From questions to graded answers: texts keep what is not EOS, results keep their order."""

import dataclasses

import numpy as np
import pytest

from exgrpo.train.common.distributed import ALONE
from exgrpo.train.common.errors import RolloutError
from exgrpo.train.common.records import Counts, EngineCounts, Failure, Rollout
from exgrpo.train.reward.pool import Grades
from exgrpo.train.rollout.answers import RolloutWorker
from exgrpo.train.rollout.engine import Finished, Sampling
from exgrpo.train.rollout.stops import Stops
from tests.train.common.test_distributed import on_every_rank
from tests.train.fakes import EOS, question_set

QUESTIONS = question_set(2).questions
STOP = 6
WORDS = {3: "5", 4: " mm", 5: "<|im_end|>", STOP: "\n\nQuestion: 6", EOS: "<|im_end|>"}


class FixedEngine:
    """Finishes the cut answers before the others."""

    ranks = 1

    def __init__(self, happened):
        self.happened = happened

    def generate(self, requests):
        for i in range(len(requests)):
            yield Finished(i, 1, Rollout(np.array([3, 4, 5], np.int32), finished=False))
        for i in range(len(requests)):
            yield Finished(i, 0, Rollout(np.array([3, 4, EOS], np.int32), finished=True))

    def counts(self):
        return EngineCounts(prompt_tokens=8, cached_tokens=6)

    def wake(self):
        self.happened.append("wake")

    def sleep(self):
        self.happened.append("sleep")


class FailingEngine(FixedEngine):
    def generate(self, requests):
        yield Finished(0, 0, Rollout(np.array([3, 4, EOS], np.int32), finished=True))
        raise RolloutError("no server is left")


class KeepingGrader:
    def __init__(self):
        self.seen = []

    def begin(self):
        return self

    def add(self, response, gold, question, reward, columns):
        self.seen.append(response)

    def finish(self):
        self.seen.append("finish")
        parts = tuple({"form": float(i)} for i in range(4))
        return Grades((0.0, 1.0, 2.0, 3.0), timed_out=2, failed=1, key=(0, 10, 20, 30), parts=parts)


class StoppedEngine(FixedEngine):
    def generate(self, requests):
        for i in range(len(requests)):
            yield Finished(i, 1, Rollout(np.array([3, 4, EOS], np.int32), finished=True))
            yield Finished(i, 0, Rollout(np.array([3, 4, STOP], np.int32), finished=True))


def spell(ids):
    return "".join(WORDS[int(i)] for i in ids)


def answering(engine, grader):
    return RolloutWorker(engine, grader, spell, ALONE)


def test_only_the_final_eos_token_is_left_out_of_the_text():
    batch = answering(FixedEngine([]), KeepingGrader()).answer(QUESTIONS, [2, 2], Sampling(3), seed=0)
    # A cut answer keeps all its tokens, even one that is spelled like EOS.
    assert batch.text.tolist() == ["5 mm", "5 mm<|im_end|>"] * 2


def test_what_is_graded_ends_before_the_stop_string_and_the_rollout_behind_it():
    grader = KeepingGrader()
    sampling = Sampling(3, stop=Stops(("\nQuestion:",), spell))
    batch = answering(StoppedEngine([]), grader).answer(QUESTIONS, [2, 2], sampling, seed=0)
    # The first of two line breaks is the answer's.
    assert batch.text.tolist() == ["5 mm\n", "5 mm"] * 2
    assert sorted(grader.seen) == ["5 mm", "5 mm", "5 mm\n", "5 mm\n", "finish"]
    assert batch.token.tolist() == [3, 4, STOP, 3, 4, EOS] * 2


def test_a_source_may_have_stop_strings_of_its_own():
    """They take the place of the run's, in the engine and in the text."""
    seen = []

    class Watched(StoppedEngine):
        def generate(self, requests):
            seen.extend(request.sampling.stop.strings for request in requests)
            return super().generate(requests)

    questions = [QUESTIONS[0], dataclasses.replace(QUESTIONS[1], stop=(" mm",))]
    sampling = Sampling(3, stop=Stops(("\nQuestion:",), spell))
    batch = answering(Watched([]), KeepingGrader()).answer(questions, [2, 2], sampling, seed=0)
    assert seen == [("\nQuestion:",), (" mm",)]
    assert batch.text.tolist() == ["5 mm\n", "5 mm", "5", "5"]


def test_answers_are_graded_as_they_finish_and_stand_in_the_order_of_samples():
    grader = KeepingGrader()
    grader.seen = happened = []
    batch = answering(FixedEngine(happened), grader).answer(QUESTIONS, [2, 2], Sampling(3), seed=0)
    assert happened == ["wake", *["5 mm<|im_end|>"] * 2, *["5 mm"] * 2, "sleep", "finish"]
    assert batch.question.tolist() == [0, 1]
    assert batch.group.tolist() == [0, 0, 1, 1]
    assert [prompt.tolist() for prompt in batch.prompt] == [[0, 2], [1, 2]]
    assert batch.reward.tolist() == [2, 0, 3, 1]
    assert batch.key.tolist() == [20, 0, 30, 10]
    assert [parts["form"] for parts in batch.parts] == [2, 0, 3, 1]
    assert batch.finished.tolist() == [True, False] * 2
    assert (batch.counts.answers, batch.counts.timed_out, batch.counts.failed) == (4, 2, 1)
    assert batch.counts.failed_fraction == 3 / 4
    assert batch.counts.engine == EngineCounts(prompt_tokens=8, cached_tokens=6)


class Numbering(FixedEngine):
    """Answers with the number of the question and that of the sample."""

    def generate(self, requests):
        for i, request in enumerate(requests):
            for sample in reversed(range(request.count)):
                ids = np.array([request.prompt[0], sample], np.int32)
                yield Finished(i, sample, Rollout(ids, finished=False))


class Marking(KeepingGrader):
    def finish(self):
        marks = [int(text.replace(" ", "")) for text in self.seen]
        return Grades(tuple(map(float, marks)), timed_out=1, failed=0, key=tuple(marks))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_answers_of_all_ranks_stand_in_the_order_of_questions_and_samples(size):
    def answered(world):
        rollout_worker = RolloutWorker(Numbering([]), Marking(), lambda ids: " ".join(map(str, ids)), world)
        batch = rollout_worker.answer(question_set(4).questions, [1, 3, 0, 2], Sampling(3), seed=0)
        assert rollout_worker.tokens == 12
        return batch

    for batch in on_every_rank(answered, size):
        assert batch.group.tolist() == [0, 1, 1, 1, 3, 3]
        assert batch.token.tolist() == [0, 0, 1, 0, 1, 1, 1, 2, 3, 0, 3, 1]
        assert batch.text.tolist() == ["0 0", "1 0", "1 1", "1 2", "3 0", "3 1"]
        assert batch.reward.tolist() == batch.key.tolist() == [0, 10, 11, 12, 30, 31]
        assert (batch.counts.answers, batch.counts.timed_out) == (6, size)


def test_counts_add_up_and_ranks_wait_for_the_slowest():
    late, wrong = (Failure("r", cause, "q", "g", "a", 1) for cause in ("late", "KeyError: 1"))
    one = Counts(4, 1, 0, 2.0, 0.5, EngineCounts(8, 6, 1.0), 1, (late,))
    other = Counts(6, 1, 2, 1.0, 0.75, EngineCounts(4, 1, 3.0), 2, (wrong, late))
    failures = (dataclasses.replace(late, count=2), wrong)
    assert one + other == Counts(10, 2, 2, 3.0, 1.25, EngineCounts(12, 7, 4.0), 3, failures)
    assert Counts.together([one, other]) == Counts(10, 2, 2, 2.0, 0.75, EngineCounts(12, 7, 3.0), 3, failures)


def test_an_engine_that_fails_is_told_when_the_ranks_meet():
    happened = []
    rollout_worker = answering(FailingEngine(happened), KeepingGrader())
    produced = rollout_worker.produce(QUESTIONS, [1, 1], Sampling(3), seed=0)
    assert happened == ["wake", "sleep"]
    with pytest.raises(RolloutError, match="no server is left"):
        rollout_worker.join(produced)
