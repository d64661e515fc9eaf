"""From questions to graded answers: texts keep what is not EOS, results keep their order."""

import dataclasses

import numpy as np
import pytest
import torch

from exgrpo.train.answers import Answerer
from exgrpo.train.distributed import World
from exgrpo.train.errors import RewardError, RolloutError
from exgrpo.train.records import Rollout
from exgrpo.train.reward.pool import Grades
from exgrpo.train.rollout import EngineCounts, Finished, Sampling, Stops
from tests.train.fakes import EOS, LoneWorld, question_set

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
        return Grades((0.0, 1.0, 2.0, 3.0), timed_out=2, failed=1, key=(0, 10, 20, 30))


class StoppedEngine(FixedEngine):
    def generate(self, requests):
        for i in range(len(requests)):
            yield Finished(i, 1, Rollout(np.array([3, 4, EOS], np.int32), finished=True))
            yield Finished(i, 0, Rollout(np.array([3, 4, STOP], np.int32), finished=True))


def spell(ids):
    return "".join(WORDS[int(i)] for i in ids)


def answering(engine, grader):
    return Answerer(engine, grader, spell, LoneWorld())


def test_only_the_final_eos_token_is_left_out_of_the_text():
    answers = answering(FixedEngine([]), KeepingGrader()).answer(QUESTIONS, [2, 2], Sampling(3), seed=0)
    # A cut answer keeps all its tokens, even one that is spelled like EOS.
    assert [[a.text for a in of_question] for of_question in answers.of_question] == [["5 mm", "5 mm<|im_end|>"]] * 2


def test_what_is_graded_ends_before_the_stop_string_and_the_rollout_behind_it():
    grader = KeepingGrader()
    sampling = Sampling(3, stop=Stops(("\nQuestion:",), spell))
    answers = answering(StoppedEngine([]), grader).answer(QUESTIONS, [2, 2], sampling, seed=0)
    # The first of two line breaks is the answer's.
    assert [[a.text for a in of_question] for of_question in answers.of_question] == [["5 mm\n", "5 mm"]] * 2
    assert sorted(grader.seen) == ["5 mm", "5 mm", "5 mm\n", "5 mm\n", "finish"]
    assert [a.rollout.response.tolist() for a in answers.of_question[0]] == [[3, 4, STOP], [3, 4, EOS]]


def test_a_source_may_have_stop_strings_of_its_own():
    """They take the place of the run's, in the engine and in the text."""
    seen = []

    class Watched(StoppedEngine):
        def generate(self, requests):
            seen.extend(request.sampling.stop.strings for request in requests)
            return super().generate(requests)

    questions = [QUESTIONS[0], dataclasses.replace(QUESTIONS[1], stop=(" mm",))]
    sampling = Sampling(3, stop=Stops(("\nQuestion:",), spell))
    answers = answering(Watched([]), KeepingGrader()).answer(questions, [2, 2], sampling, seed=0)
    assert seen == [("\nQuestion:",), (" mm",)]
    assert [[a.text for a in of_question] for of_question in answers.of_question] == [["5 mm\n", "5 mm"], ["5", "5"]]


def test_answers_are_graded_as_they_finish_and_stand_in_the_order_of_samples():
    grader = KeepingGrader()
    grader.seen = happened = []
    answers = answering(FixedEngine(happened), grader).answer(QUESTIONS, [2, 2], Sampling(3), seed=0)
    assert happened == ["wake", *["5 mm<|im_end|>"] * 2, *["5 mm"] * 2, "sleep", "finish"]
    assert [[a.reward for a in of_question] for of_question in answers.of_question] == [[2, 0], [3, 1]]
    assert [[a.key for a in of_question] for of_question in answers.of_question] == [[20, 0], [30, 10]]
    assert (answers.timed_out, answers.failed) == (2, 1)
    assert answers.engine == EngineCounts(prompt_tokens=8, cached_tokens=6)


def test_answers_have_the_parts_of_their_rewards():
    class WithParts(KeepingGrader):
        def finish(self):
            return dataclasses.replace(super().finish(), parts=tuple({"form": float(i)} for i in range(4)))

    answers = answering(FixedEngine([]), WithParts()).answer(QUESTIONS, [2, 2], Sampling(3), seed=0)
    assert [[a.parts["form"] for a in of_question] for of_question in answers.of_question] == [[2, 0], [3, 1]]


def test_an_engine_that_fails_is_told_when_the_ranks_meet():
    happened = []
    answerer = answering(FailingEngine(happened), KeepingGrader())
    produced = answerer.produce(QUESTIONS, [1, 1], Sampling(3), seed=0)
    assert happened == ["wake", "sleep"]
    with pytest.raises(RolloutError, match="no server is left"):
        answerer.join(produced)


class MisusedGrader(KeepingGrader):
    def finish(self):
        raise RewardError("no reward here")


def test_a_result_that_is_no_reward_is_told_to_all_ranks():
    told = []

    class Watched(LoneWorld):
        def gather(self, value):
            told.append(value)
            return [value]

    answerer = Answerer(FixedEngine([]), MisusedGrader(), spell, Watched())
    with pytest.raises(RewardError, match="no reward here"):
        answerer.answer(QUESTIONS, [2, 2], Sampling(3), seed=0)
    assert isinstance(told[-1], RewardError)


@pytest.mark.parametrize(("size", "ranks"), [(1, 1), (4, 1), (4, 2), (4, 4)])
def test_neighbouring_ranks_share_an_engines_work(size, ranks):
    worlds = [World(rank, size, torch.device("cpu"), control=None) for rank in range(size)]
    shares = [world.split("abcdefg", ranks) for world in worlds]
    for first in range(0, size, ranks):
        assert all(share == shares[first] for share in shares[first : first + ranks])
    assert sorted(pair for share in shares[::ranks] for pair in share) == list(enumerate("abcdefg"))
