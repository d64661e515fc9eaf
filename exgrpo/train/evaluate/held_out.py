"""Held-out Pass@1 of a policy during its training."""

import math

from exgrpo.train.answers import Answerer
from exgrpo.train.config import RewardConfig
from exgrpo.train.data.questions import Question, QuestionSet
from exgrpo.train.evaluate.scores import LeftOut, SourceScore, Verdict, question_key, score, score_all
from exgrpo.train.evaluate.settings import TEST
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
    batch = answerer.answer(questions.questions, [samples] * len(questions), sampling, seed)
    asked = [questions.questions[group] for group in batch.group]
    graded = [
        Graded(text, question.gold, reward_of(question.reward, reward.function))
        for text, question in zip(batch.text, asked, strict=True)
    ]
    verdicts = [
        Verdict(question.source, _key(question), *of_answer)
        for question, *of_answer in zip(
            asked,
            is_success(batch.reward, reward.success).tolist(),
            batch.finished.tolist(),
            tell("form", reward, graded, answerer.world),
            tell("found", reward, graded, answerer.world),
            batch.key.tolist(),
            strict=True,
        )
    ]
    left_out = [LeftOut(question.source, _key(question), samples) for question in questions.left_out]
    return score_all(verdicts, left_out), score(verdicts, left_out)


def metrics(overall: SourceScore, by_source: dict[str, SourceScore], name: str = TEST) -> dict[str, float]:
    """The scores of a set as numbers of metrics.jsonl; NaN of what does not exist."""
    at, other = ("", "held_out/") if name == TEST else (f"{name}/", f"{name}/")
    errors = {"pass_at": overall.pass_at_error, "distinct_at": overall.distinct_at_error}
    lacking = {key: getattr(overall, key) for key in ("truncated", "without_form", "without_answer")}
    return {
        **rates(overall, by_source, name),
        **{f"{at}{key}/{k}/error": _number(error) for key, of_k in errors.items() for k, error in of_k.items()},
        f"{other}low": overall.low,
        f"{other}high": overall.high,
        **{f"{other}{key}": _number(value) for key, value in lacking.items()},
    }


def rates(overall: SourceScore, by_source: dict[str, SourceScore], name: str) -> dict[str, float]:
    """Those of the `metrics` of a set that grow as the model gets better."""
    at, of_source = ("", f"{TEST}/") if name == TEST else (f"{name}/", f"{name}/source/")
    return {
        f"{name}/pass_rate": overall.pass_rate,
        **{f"{at}pass_at/{k}": value for k, value in overall.pass_at.items()},
        **{f"{at}distinct_at/{k}": value for k, value in overall.distinct_at.items()},
        **{f"{of_source}{source}": score.pass_rate for source, score in by_source.items()},
    }


def rate_names(questions: QuestionSet, samples: int, name: str) -> list[str]:
    """The names of the `rates` of a set, before anything is asked."""
    rows = [LeftOut(one.source, _key(one), samples) for one in (*questions, *questions.left_out)]
    return list(rates(score_all((), rows), score((), rows), name))


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _key(question: Question) -> str:
    return question_key(question.text, question.gold)
