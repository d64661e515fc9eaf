"""Held-out Pass@1 of a policy during its training."""

import math

from exgrpo.train.answers import Answerer
from exgrpo.train.config import RewardConfig
from exgrpo.train.data.questions import Question, QuestionSet
from exgrpo.train.evaluate.scores import LeftOut, SourceScore, Verdict, question_key, score, score_all
from exgrpo.train.reward.form import Graded, tell
from exgrpo.train.reward.names import reward_of
from exgrpo.train.reward.success import is_success
from exgrpo.train.rollout import Sampling


def evaluate(
    answerer: Answerer, questions: QuestionSet, samples: int, sampling: Sampling, seed: int, *, reward: RewardConfig
) -> tuple[SourceScore, dict[str, SourceScore]]:
    """Answer every question `samples` times; all ranks work on it and get the same scores: of all, and by source.

    An answer with a reward of at least `reward.success` is right; those to a question that was left out are wrong.
    """
    answers = answerer.answer(questions.questions, [samples] * len(questions), sampling, seed)
    pairs = [
        (question, answer)
        for question, of_question in zip(questions, answers.of_question, strict=True)
        for answer in of_question
    ]
    graded = [
        Graded(answer.text, question.gold, reward_of(question.reward, reward.function)) for question, answer in pairs
    ]
    formed = tell("form", reward, graded, answerer.world)
    found = tell("found", reward, graded, answerer.world)
    verdicts = [
        Verdict(
            question.source,
            _key(question),
            is_success(answer.reward, reward.success),
            answer.rollout.finished,
            has_form,
            has_answer,
            answer.key,
        )
        for (question, answer), has_form, has_answer in zip(pairs, formed, found, strict=True)
    ]
    left_out = [LeftOut(question.source, _key(question), samples) for question in questions.left_out]
    return score_all(verdicts, left_out), score(verdicts, left_out)


def metrics(overall: SourceScore, by_source: dict[str, SourceScore]) -> dict[str, float]:
    """The scores as numbers of metrics.jsonl; NaN of what does not exist."""
    lacking = {name: getattr(overall, name) for name in ("truncated", "without_form", "without_answer")}
    return {
        "test/pass_rate": overall.pass_rate,
        **_at_k("pass_at", overall.pass_at, overall.pass_at_error),
        **_at_k("distinct_at", overall.distinct_at, overall.distinct_at_error),
        **{f"test/{name}": source.pass_rate for name, source in by_source.items()},
        "held_out/low": overall.low,
        "held_out/high": overall.high,
        **{f"held_out/{name}": _number(value) for name, value in lacking.items()},
    }


def _at_k(name: str, values: dict[int, float], errors: dict[int, float | None]) -> dict[str, float]:
    found: dict[str, float] = {}
    for k, value in values.items():
        found |= {f"{name}/{k}": value, f"{name}/{k}/error": _number(errors[k])}
    return found


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _key(question: Question) -> str:
    return question_key(question.text, question.gold)
