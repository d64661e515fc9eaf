"""Held-out Pass@1 of a policy during its training."""

from exgrpo.train.answers import Answerer
from exgrpo.train.data.questions import Question, QuestionSet
from exgrpo.train.evaluate.scores import SourceScore, question_key, score, score_all
from exgrpo.train.reward.success import is_success
from exgrpo.train.rollout import Sampling


def evaluate(
    answerer: Answerer, questions: QuestionSet, samples: int, sampling: Sampling, seed: int, *, success: float
) -> tuple[SourceScore, dict[str, SourceScore]]:
    """Answer every question `samples` times; all ranks work on it and get the same scores: of all, and by source.

    An answer with a reward of at least `success` is right; all answers to a question that was left out are wrong.
    """
    answers = answerer.answer(questions.questions, [samples] * len(questions), sampling, seed)
    verdicts = [
        (question.source, _key(question), is_success(answer.reward, success))
        for question, of_question in zip(questions, answers.of_question, strict=True)
        for answer in of_question
    ]
    left_out = [(question.source, _key(question), samples) for question in questions.left_out]
    return score_all(verdicts, left_out), score(verdicts, left_out)


def _key(question: Question) -> str:
    return question_key(question.text, question.gold)
