"""From questions to graded answers: texts keep what is not EOS, results keep their order."""

import numpy as np

from exgrpo.train.answers import Answerer
from exgrpo.train.records import Rollout
from exgrpo.train.reward import Grades
from exgrpo.train.rollout import Sampling
from tests.train.fakes import EOS, LoneWorld, question_set

WORDS = {3: "5", 4: " mm", 5: "<|im_end|>", EOS: "<|im_end|>"}


class FixedEngine:
    def generate(self, prompts, counts, sampling, seed):
        return [
            [
                Rollout(np.array([3, 4, EOS], np.int32), finished=True),
                Rollout(np.array([3, 4, 5], np.int32), finished=False),
            ]
            for _ in prompts
        ]

    def wake(self):
        pass

    def sleep(self):
        pass


class KeepingGrader:
    def __init__(self):
        self.seen = []

    def grade(self, answers):
        self.seen += answers
        return Grades(tuple(float(i) for i in range(len(answers))), timed_out=2, failed=1)


def test_only_the_final_eos_token_is_left_out_of_the_text():
    grader = KeepingGrader()
    answering = Answerer(FixedEngine(), grader, lambda ids: "".join(WORDS[int(i)] for i in ids), LoneWorld())
    answers = answering.answer(question_set(2).questions, [2, 2], Sampling(3), seed=0)
    # A cut answer keeps all its tokens, even one that is spelled like EOS.
    assert [text for text, _ in grader.seen] == ["5 mm", "5 mm<|im_end|>"] * 2
    assert answers.rewards.tolist() == [0, 1, 2, 3]
    assert [[a.reward for a in of_question] for of_question in answers.of_question] == [[0, 1], [2, 3]]
    assert (answers.timed_out, answers.failed) == (2, 1)
