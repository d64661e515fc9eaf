"""Evaluations of a run: Pass@1 on the held-out sets, the best model, and early stopping."""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from exgrpo.train.common.errors import ConfigError, shown
from exgrpo.train.common.seeds import derive_seed
from exgrpo.train.common.success import is_success
from exgrpo.train.config.evaluation import TEST
from exgrpo.train.config.options import Asked, Config, RewardConfig, held_out_sets
from exgrpo.train.data.questions import Question, QuestionSet
from exgrpo.train.reward.form import Graded, tell
from exgrpo.train.rollout.answers import RolloutWorker
from exgrpo.train.rollout.engine import Sampling
from exgrpo.train.rollout.stops import Stops
from exgrpo.train.run.validation_scores import SourceScore, Verdict, question_key, score, score_all, unasked


def evaluate(
    rollout_worker: RolloutWorker,
    questions: QuestionSet,
    samples: int,
    sampling: Sampling,
    seed: int,
    *,
    reward: RewardConfig,
) -> tuple[SourceScore, dict[str, SourceScore]]:
    """Answer every question `samples` times and return the overall scores and those by source; a collective call.

    An answer is right if its reward is at least `reward.success`; answers to a left-out question count as wrong.
    """
    batch = rollout_worker.answer(questions.questions, [samples] * len(questions), sampling, seed)
    asked = [questions.questions[group] for group in batch.group]
    graded = [Graded(text, question.gold, question.reward) for text, question in zip(batch.text, asked, strict=True)]
    verdicts = [
        Verdict(question.source, _key(question), *of_answer)
        for question, *of_answer in zip(
            asked,
            is_success(batch.reward, reward.success).tolist(),
            batch.finished.tolist(),
            tell("form", reward, graded, rollout_worker.world),
            tell("found", reward, graded, rollout_worker.world),
            batch.key.tolist(),
            strict=True,
        )
    ]
    for question in questions.left_out:
        verdicts += unasked(question.source, _key(question), samples)
    return score_all(verdicts), score(verdicts)


def metrics(overall: SourceScore, by_source: dict[str, SourceScore], name: str = TEST) -> dict[str, float]:
    """Return the scores of a set under their names in metrics.jsonl; NaN for missing scores."""
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
    """Return the subset of `metrics` that grows as the model gets better."""
    at, of_source = ("", f"{TEST}/") if name == TEST else (f"{name}/", f"{name}/source/")
    return {
        f"{name}/pass_rate": overall.pass_rate,
        **{f"{at}pass_at/{k}": value for k, value in overall.pass_at.items()},
        **{f"{at}distinct_at/{k}": value for k, value in overall.distinct_at.items()},
        **{f"{of_source}{source}": score.pass_rate for source, score in by_source.items()},
    }


def rate_names(questions: QuestionSet, samples: int, name: str) -> list[str]:
    """Return the names of the `rates` of a set, without evaluating."""
    verdicts: list[Verdict] = []
    for one in (*questions, *questions.left_out):
        verdicts += unasked(one.source, _key(one), samples)
    return list(rates(score_all(verdicts), score(verdicts), name))


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _key(question: Question) -> str:
    return question_key(question.text, question.gold)


@dataclass(frozen=True)
class Best:
    """Best evaluation of a run.

    Attributes:
        metric: name in metrics.jsonl of the metric to maximize.
        step: training step of the evaluation.
        since: number of later evaluations.
    """

    metric: str
    value: float
    step: int
    since: int = 0


@dataclass(eq=False)
class Evaluator:
    """Runs the evaluations of a run and keeps their results, the same on every rank.

    Attributes:
        first: metrics of the evaluation before the first step; empty: there was none.
        latest: metrics of the latest evaluation; empty: there was none.
        best: best evaluation by checkpoint.best; None: there is none yet.
    """

    config: Config
    questions: Mapping[str, QuestionSet]
    rollout_worker: RolloutWorker
    first: dict[str, float] = field(default_factory=dict, init=False)
    latest: dict[str, float] = field(default_factory=dict, init=False)
    best: Best | None = field(default=None, init=False)

    @cached_property
    def sets(self) -> dict[str, Asked]:
        """Held-out sets by name."""
        return held_out_sets(self.config)

    def evaluate(self, step: int) -> tuple[dict[str, float], list[str]]:
        """Evaluate all sets after `step` training steps; a collective call.

        Returns:
            the metrics for metrics.jsonl, and a sentence about each set.
        """
        start, tokens = time.perf_counter(), self.rollout_worker.tokens
        found: dict[str, float] = {"step": step}
        sentences = []
        for name, asked in self.sets.items():
            purpose = "evaluation" if name == TEST else f"evaluation of {name}"
            overall, by_source = evaluate(
                self.rollout_worker,
                self.questions[name],
                asked.samples,
                Sampling(
                    max_tokens=self.config.rollout.max_tokens,
                    temperature=asked.temperature,
                    top_p=asked.top_p,
                    stop=Stops(self.config.rollout.stop, self.rollout_worker.decode),
                ),
                derive_seed(self.config.seed, purpose, step),
                reward=self.config.reward,
            )
            found |= metrics(overall, by_source, name)
            sentences.append(_sentence(name, step, overall))
        self._take(found)
        cost = {
            "tokens/evaluation": self.rollout_worker.tokens - tokens,
            "seconds/evaluation": time.perf_counter() - start,
        }
        return {**found, **cost}, sentences

    def _take(self, found: dict[str, float]) -> None:
        step, metric = int(found["step"]), self.config.checkpoint.best
        self.first = self.first or ({} if step else found)
        self.latest = found
        if metric is None:
            return
        if self.best is None or found[metric] > self.best.value:
            self.best = Best(metric, found[metric], step)
        else:
            self.best = replace(self.best, since=self.best.since + 1)

    def is_due(self, step: int) -> bool:
        """True if there are held-out sets and they were not evaluated after this step."""
        return bool(self.sets) and self.latest.get("step") != step

    @property
    def improved(self) -> bool:
        """True if the latest evaluation is the best one."""
        return self.best is not None and self.best.step == self.latest.get("step")

    @property
    def exhausted(self) -> bool:
        """True if `evaluation.patience` evaluations have not improved on the best one."""
        patience = self.config.evaluation.patience
        return patience is not None and self.best is not None and self.best.since >= patience

    def verdict(self) -> str:
        """Return a sentence about the best evaluation; empty without checkpoint.best."""
        if self.best is None:
            return ""
        return f"best {self.best.metric}: {self.best.value:.3f} after {self.best.step} steps"

    def changes(self) -> list[str]:
        """Return a line per set with Pass@1 before training and at the latest evaluation."""
        lines = []
        for name in self.sets:
            before, after = (found.get(f"{name}/pass_rate") for found in (self.first, self.latest))
            if before is not None and after is not None:
                lines.append(f"{_heading(name)}: before {before:.3f}, after {after:.3f} ({after - before:+.3f})")
        return lines

    def state(self) -> dict[str, Any]:
        """Return plain values for `restore`."""
        first, latest = ({k: v for k, v in of.items() if not math.isnan(v)} for of in (self.first, self.latest))
        return {"first": first, "latest": latest, "best": asdict(self.best) if self.best else None}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`; a best evaluation by another metric than checkpoint.best is dropped."""
        self.first, self.latest = state["first"], state["latest"]
        best = Best(**state["best"]) if state["best"] else None
        self.best = best if best and best.metric == self.config.checkpoint.best else None


def check_best(config: Config, questions: Mapping[str, QuestionSet]) -> None:
    """Raise ConfigError unless the evaluations of a run have the metric that checkpoint.best names."""
    best = config.checkpoint.best
    if best is None:
        return
    names = [n for name, of in held_out_sets(config).items() for n in rate_names(questions[name], of.samples, name)]
    if best not in names:
        raise ConfigError(f"checkpoint.best: {shown(best)} is none of the numbers of this run: {', '.join(names)}")


def _heading(name: str) -> str:
    return "held-out Pass@1" + ("" if name == TEST else f" on {name}")


def _sentence(name: str, step: int, overall: SourceScore) -> str:
    return (
        f"{_heading(name)} after {step} steps: {overall.pass_rate:.3f} (95 %: {overall.low:.3f} to "
        f"{overall.high:.3f}) on {overall.questions} questions"
        + (f", {overall.left_out} of them over-long and so wrong" if overall.left_out else "")
    )
