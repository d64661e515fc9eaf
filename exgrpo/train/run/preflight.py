"""Before training: can the model's answers earn a reward at all? A run in which they cannot wastes days."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from exgrpo.train.common.errors import shown
from exgrpo.train.common.records import Failure
from exgrpo.train.common.seeds import derive_seed
from exgrpo.train.common.success import is_success
from exgrpo.train.config.options import Config
from exgrpo.train.data.questions import Question
from exgrpo.train.metrics.soundness import remedy
from exgrpo.train.reward.form import Graded, elsewhere, tell
from exgrpo.train.reward.grading import FORMS
from exgrpo.train.reward.names import absolute, is_own, reward_of
from exgrpo.train.rollout.answers import Answerer
from exgrpo.train.rollout.engine import Sampling

QUESTIONS = 32
SHOWN_CHARACTERS = 300


@dataclass(frozen=True)
class Preflight:
    """What became of a few answers, one to each of the first questions.

    Attributes:
        answers: how many there are.
        finished: how many were not cut at the length limit.
        formed: how many have the form that the reward needs; None where a reward has no check of the form.
        right: how many are successes.
        equal: whether all rewards are the same.
        rewards: how many answers each reward has graded, by its name.
        failures: of the rewards, by kind.
        example: how the first answer ends.
        form: the form in which most wrong answers hold the right value where the reward does not look, a name in
            `grading.FORMS`.
        hidden: how many of them do so.
    """

    answers: int
    finished: int
    formed: int | None
    right: int
    equal: bool
    rewards: dict[str, int]
    failures: tuple[Failure, ...]
    example: str
    form: str = ""
    hidden: int = 0

    def __str__(self) -> str:
        form = "" if self.formed is None else f", {self.formed} have the form that the reward needs"
        count = sum(failure.count for failure in self.failures)
        failed = f", on {count} the reward failed" if count else ""
        hidden = f"; {self._hidden}" if self.hidden else ""
        return (
            f"preflight: of {self.answers} answers {self.finished} are finished{form}, {self.right} are right{failed}"
            f"{hidden}"
        )

    @property
    def _hidden(self) -> str:
        """What is to be known of right values that are not read."""
        own = [name for name in self.rewards if is_own(name)]
        read = "" if len(own) == len(self.rewards) else f"; reward.form={self.form} reads them there"
        return (
            f"{self.hidden} of {self.answers} answers hold the right value in {FORMS[self.form].shown}, where "
            f"{', '.join(self.rewards)} does not look{read}"
        )

    def problem(self, config: Config) -> str | None:
        """Why no answer can earn a reward, or a reward never works, and the remedy; None where neither is so."""
        for reward, answers in self.rewards.items():
            failures = [failure for failure in self.failures if failure.reward == absolute(reward)]
            if sum(failure.count for failure in failures) == answers:
                return _broken(reward, failures)
        if self.right or not self.equal:
            return None
        if self.hidden:
            why = (
                f"none of {self.answers} answers earns a reward, but {self._hidden}, or ask for the form that is read "
                "in data.prompt_format"
            )
        elif self.finished == 0:
            why = (
                f"all {self.answers} answers were cut at rollout.max_tokens ({config.rollout.max_tokens}), and none is "
                "right: raise rollout.max_tokens, or ask for shorter answers in data.prompt_format"
            )
        elif self.formed == 0:
            why = (
                f"none of {self.answers} answers has the form that the reward {', '.join(self.rewards)} needs: ask for "
                "it in data.prompt_format or data.system_prompt, open the answers by data.answer_prefix, or take "
                "another reward.function"
            )
        else:
            return None
        return f"{why}. One answer ends: {self.example!r}"


def _broken(reward: str, failures: Sequence[Failure]) -> str:
    """That a reward has failed on all answers, why, and on which one first."""
    first = max(failures, key=lambda failure: failure.count)
    count = sum(failure.count for failure in failures)
    others = "".join(f"; on {one.count} of them {one.cause}" for one in failures if one is not first)
    return (
        f"the reward {reward} failed on all {count} answers: {first.cause}{others}. {remedy(first)}. One of these "
        f"answers, to {shown(first.question)} with the right answer {shown(first.gold)}, ends: "
        f"{first.response[-SHOWN_CHARACTERS:]!r}"
    )


def preflight(config: Config, answerer: Answerer, questions: Sequence[Question], sampling: Sampling) -> Preflight:
    """Answer the first questions once each, as in training, and grade the answers; all ranks get the same.

    Raises:
        RewardError: on every rank, where the reward of an answer is no number.
    """
    asked = questions[:QUESTIONS]
    batch = answerer.answer(asked, [1] * len(asked), sampling, derive_seed(config.seed, "preflight"))
    given = [
        Graded(text, question.gold, reward_of(question.reward, config.reward.function))
        for text, question in zip(batch.text, asked, strict=True)
    ]
    right = is_success(batch.reward, config.reward.success)
    wrong = [answer for answer, is_right in zip(given, right.tolist(), strict=True) if not is_right]
    form, hidden = elsewhere(config.reward, wrong, answerer.world)
    formed = [told for told in tell("form", config.reward, given, answerer.world) if told is not None]
    return Preflight(
        answers=len(asked),
        finished=int(batch.finished.sum()),
        formed=sum(formed) if len(formed) == len(given) else None,
        right=int(right.sum()),
        equal=len(set(batch.reward.tolist())) == 1,
        rewards=Counter(answer.reward for answer in given),
        failures=batch.counts.failures,
        example=given[0].response[-SHOWN_CHARACTERS:],
        form=form,
        hidden=hidden,
    )
