"""Check before training that the model's answers can earn a reward: otherwise a run would waste days."""

import shlex
from collections import Counter
from collections.abc import Sequence

from exgrpo.train.common.errors import shown
from exgrpo.train.common.records import Failure
from exgrpo.train.common.seeds import derive_seed
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.common.success import is_success
from exgrpo.train.config.options import Config
from exgrpo.train.data.questions import Question
from exgrpo.train.metrics.soundness import remedy
from exgrpo.train.reward.form import Graded, elsewhere, tell
from exgrpo.train.reward.grading import FORMS
from exgrpo.train.reward.names import absolute, is_own
from exgrpo.train.rollout.answers import RolloutWorker
from exgrpo.train.rollout.engine import Sampling

QUESTIONS = 32
SHOWN_CHARACTERS = 300


def preflight(
    config: Config,
    rollout_worker: RolloutWorker,
    questions: Sequence[Question],
    sampling: Sampling,
    missing_end: str | None = None,
) -> tuple[str, str | None]:
    """Answer the first questions once each, as in training, and grade the answers; a collective call.

    Args:
        rollout_worker, questions, sampling: as in training.
        missing_end: text with which the chat template ends an answer but at which generation does not stop; None:
            generation stops there.

    Returns:
        a sentence about the answers; and the reason, with a remedy, why no answer can earn a reward or a reward never
        works, or None.

    Raises:
        RewardError: on every rank, if a reward is not a number.
    """
    asked = questions[:QUESTIONS]
    batch = rollout_worker.answer(asked, [1] * len(asked), sampling, derive_seed(config.seed, "preflight"))
    given = [Graded(text, question.gold, question.reward) for text, question in zip(batch.text, asked, strict=True)]
    right = is_success(batch.reward, config.reward.success)
    wrong = [answer for answer, is_right in zip(given, right.tolist(), strict=True) if not is_right]
    form, hidden = elsewhere(config.reward, wrong, rollout_worker.world)
    checks = [known for known in tell("form", config.reward, given, rollout_worker.world) if known is not None]
    formed = sum(checks) if len(checks) == len(given) else None  # None: a reward has no format check
    found = f"preflight: of {len(asked)} answers {batch.finished.sum()} are finished"
    if formed is not None:
        found += f", {formed} have the form that the reward needs"
    found += f", {right.sum()} are right"
    if failed := sum(failure.count for failure in batch.counts.failures):
        found += f", on {failed} the reward failed"
    rewards = Counter(answer.reward for answer in given)
    hint = _hidden(hidden, form, rewards) if hidden else ""
    if hint:
        found += f"; {hint}"
    unended = missing_end and _unended(missing_end, config)
    if unended and (count := sum(missing_end in text for text in batch.text)):
        found += f"; {count} continue after {missing_end!r}: {unended}"
    problem = _broken(rewards, batch.counts.failures)
    if not (problem or right.any() or len(set(batch.reward.tolist())) > 1):
        example = given[0].response[-SHOWN_CHARACTERS:]
        why = _unearned(config, batch, unended, hint, formed, ", ".join(rewards))
        problem = why and f"{why}. One answer ends: {example!r}"
    return found, problem


def _hidden(count: int, form: str, rewards: Counter[str]) -> str:
    """Describe right values in a form that the rewards do not read, with the remedy."""
    read = "" if all(map(is_own, rewards)) else f"; reward.form={form} reads them there"
    return (
        f"{count} of {rewards.total()} answers hold the right value in {FORMS[form].shown}, where "
        f"{', '.join(rewards)} does not look{read}"
    )


def _unended(end: str, config: Config) -> str:
    """Return the cause of answers that continue after `end`, and the remedy."""
    own = any(source.stop is not None for source in config.data.sources)
    return (
        f"the chat template ends an answer with {end!r}, which is no end of sequence of this model: add "
        f"--rollout.stop {shlex.quote(end)}{', and name it in each stop of data.sources' if own else ''}"
    )


def _unearned(
    config: Config, batch: StepBatch, unended: str | None, hint: str, formed: int | None, rewards: str
) -> str | None:
    """Return why no answer earns a reward, and the remedy; None: perhaps the questions are only hard."""
    if unended and not batch.finished.any():
        return f"none of {len(batch)} answers has ended, and none is right: {unended}"
    if hint:
        return (
            f"none of {len(batch)} answers earns a reward, but {hint}, or ask for the form that is read in "
            "data.prompt_format"
        )
    if not batch.finished.any():
        return (
            f"all {len(batch)} answers were cut at rollout.max_tokens ({config.rollout.max_tokens}), and none is "
            "right: raise rollout.max_tokens, or ask for shorter answers in data.prompt_format"
        )
    if formed == 0:
        return (
            f"none of {len(batch)} answers has the form that the reward {rewards} needs: ask for it in "
            "data.prompt_format or data.system_prompt, open the answers by data.answer_prefix, or take another "
            "reward.function"
        )
    return None


def _broken(rewards: Counter[str], failures: Sequence[Failure]) -> str | None:
    """Describe a reward that failed on all of its answers, with an example; None: there is none."""
    for reward, answers in rewards.items():
        own = [failure for failure in failures if failure.reward == absolute(reward)]
        if sum(failure.count for failure in own) == answers:
            first = max(own, key=lambda failure: failure.count)
            others = "".join(f"; on {one.count} of them {one.cause}" for one in own if one is not first)
            return (
                f"the reward {reward} failed on all {answers} answers: {first.cause}{others}. {remedy(first)}. One of "
                f"these answers, to {shown(first.question)} with the right answer {shown(first.gold)}, ends: "
                f"{first.response[-SHOWN_CHARACTERS:]!r}"
            )
    return None
