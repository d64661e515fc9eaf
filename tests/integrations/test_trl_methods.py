"""Methods of replay in TRL: which rows reach the loss, and with what.

The oracle is a plain model of each composition over everything that was written, and the loss by its formula.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed: pip install 'trl>=1.16,<2'", exc_type=ImportError)

from transformers import AutoModelForCausalLM
from trl import GRPOConfig, TrlParser

from exgrpo.integrations.trl import ExGRPOConfig, ExGRPOTrainer
from exgrpo.integrations.trl_loss import Objective
from exgrpo.train.config import ExperienceConfig, ObjectiveConfig
from exgrpo.train.experience import rules
from exgrpo.train.policy.batch import advantages, build_rows
from exgrpo.train.records import Group, Score, Trajectory
from exgrpo.train.replayed import Weigher
from tests.integrations.trl_trainers import COMPLETION, WrittenAnswers, options, questions, reward, tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

K, B = 4, 4
Answer = tuple[int, tuple[int, ...]]
"""A question and a response to it."""
NOT_HERE = {
    "beta": "replay_beta here: beta is the KL weight of TRL",
    "clip": "epsilon and epsilon_high of TRL",
    "scale_by_std": "scale_rewards of TRL",
    "normalize": "loss_type of TRL",
    "train_on": "an experiment of the paper; a band is a choice of questions, which a data set can be",
}
"""Options of a recipe that ExGRPOConfig does not have, and why."""


class Row(NamedTuple):
    """A row of a micro-batch that has a token."""

    answer: Answer
    replayed: bool
    advantage: float
    old: list[float]


class Written(NamedTuple):
    """A group of fresh answers of one generation."""

    question: int
    answers: list[Answer]
    rewards: list[float]

    @property
    def mean(self) -> float:
        return float(np.mean(self.rewards))

    @property
    def differs(self) -> bool:
        return len(set(self.rewards)) > 1


class Recorded(ExGRPOTrainer, WrittenAnswers):
    """Written answers; what was written in each generation, and what came to the loss, are kept."""

    def _written(self, output: dict[str, Any], asked: Sequence[int], first: int) -> list[Trajectory | None]:
        rows = super()._written(output, asked, first)
        self.log_probs = getattr(self, "log_probs", {})
        self.history = getattr(self, "history", [])
        self.losses = getattr(self, "losses", [])
        self.log_probs |= {(row.question, tuple(row.response)): row.log_prob for row in rows if row}
        groups = []
        for start in range(0, len(rows), K):
            answers = [(row.question, tuple(row.response.tolist())) for row in rows[start : start + K] if row]
            groups.append(Written(asked[start], answers, reward([list(ids) for _, ids in answers])))
        self.history.append(groups)
        self.losses.append([])
        return rows

    def _trained_batch(self, output: Any, groups: Sequence[Group], trained: Sequence[Group]) -> dict[str, Any]:
        self.trained = trained
        return super()._trained_batch(output, groups, trained)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        log_prob, loss = self._log_probs(inputs), super()._compute_loss(model, inputs)
        self.losses[-1].append((inputs, log_prob, float(loss)))
        return loss

    def rows(self, generation: int) -> list[Row]:
        found = []
        for inputs, _, _ in self.losses[generation]:
            for i, length in enumerate(inputs["completion_mask"].sum(1).tolist()):
                if length == 0:
                    continue
                prompt = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()].tolist()
                answer = (self.question_of[tuple(prompt)], tuple(inputs["completion_ids"][i, :length].tolist()))
                advantage = inputs["advantages"][i].flatten()[0].item()
                old = inputs["old_per_token_logps"][i, :length].tolist()
                found.append(Row(answer, bool(inputs["replayed"][i]), advantage, old))
        return found


def trainer_of(folder: Path, model: Path, *, asked: int = B, **changes: Any) -> Recorded:
    """Two micro-batches of 8 rows in one optimiser step, replay from the start, nothing retires, no entropy bonus."""
    changes = {
        "start_pass_rate": 0.0,
        "learning_rate": 1e-2,
        "gradient_accumulation_steps": 2,
        "entropy_coef": 0.0,
        "expire": [],
        "ratio": 1.0,
        **changes,
    }
    data = questions().select(range(asked))
    config = ExGRPOConfig(**options(folder, **changes))
    trainer = Recorded(str(model), reward, config, data, processing_class=tokenizer())
    trainer.question_of = {tuple(ids): i for i, ids in enumerate(tokenizer()(list(data["prompt"]))["input_ids"])}
    return trainer


class Expected(NamedTuple):
    """Which rows a composition trains on.

    Attributes:
        fresh: exactly these.
        replayed: exactly so many.
        among: of these.
        whole: whether these are whole groups, each of them a list in `among`.
    """

    fresh: list[Answer]
    replayed: int
    among: list[list[Answer]]
    whole: bool = False


History = list[list[Written]]


def of_question(history: History, question: int) -> list[Answer]:
    return [one for groups in history for group in groups if group.question == question for one in group.answers]


def answers(groups: Sequence[Written]) -> list[Answer]:
    return [one for group in groups for one in group.answers]


def mixed(past: History, now: list[Written]) -> Expected:
    joined = {group.question: K - len(group.answers) for group in now}
    assert all(joined[q] == (min(2, len(of_question(past, q)))) for q in joined)
    return Expected(answers(now), sum(joined.values()), [of_question(past, q) for q in joined])


def again(past: History, now: list[Written]) -> Expected:
    return Expected(answers(now), 0, [])


def appended(past: History, now: list[Written]) -> Expected:
    stored = [of_question(past, group.question) for group in now]
    return Expected(answers(now), sum(min(2, len(of_group)) for of_group in stored), stored)


def beside(past: History, now: list[Written]) -> Expected:
    fresh = answers([group for group in now if group.differs] or now)
    stored = [answers(groups) for groups in past]
    return Expected(fresh, min(len(fresh) // 2, sum(map(len, stored))), stored)


def in_place(past: History, now: list[Written]) -> Expected:
    dead = [group for group in now if not group.differs]
    stored = [group.answers for groups in past for group in groups if group.differs]
    given = min(len(dead), len(stored))
    return Expected(answers([*(group for group in now if group.differs), *dead[given:]]), K * given, stored, True)


def buffer(past: History, now: list[Written]) -> Expected:
    assert len(now) == B // 2
    stored = [answers(groups) for groups in [*past, now]]
    return Expected([], min(B * K, sum(map(len, stored))), stored)


def stale(past: History, now: list[Written]) -> Expected:
    waited = [group.answers for group in (past[-1] if past else [])]
    return Expected([], sum(map(len, waited)), waited, True)


def rehearsal(past: History, now: list[Written]) -> Expected:
    stored = [of_question([*past, now], group.question) for group in now]
    return Expected(answers(now), 2 * len(stored[0]), stored, True)


def bapo(past: History, now: list[Written]) -> Expected:
    latest = {group.question: sum(group.rewards) for groups in past for group in groups}
    hard = now[B:]
    assert all(latest[group.question] <= 1 for group in hard)
    assert bool(len(past) % 2) <= (not hard)
    teaching = [group for group in now[:B] if group.differs] or now[:B]
    batch = [*teaching, *(group for group in hard if sum(group.rewards) > latest[group.question])][:B]
    names = {group.question for group in batch}
    stored = [group.answers for groups in past for group in groups if 0.2 < group.mean < 0.6]
    stored = [of_group for of_group in stored if of_group[0][0] not in names]
    return Expected(answers(batch), K * min(B - len(batch), len(stored)), stored, True)


METHODS: dict[str, tuple[Callable[[History, list[Written]], Expected], dict[str, Any]]] = {
    "mixed": (mixed, {"admit": "all", "replayed": 2, "trajectory": "random"}),
    "traced": (mixed, {"admit": "all", "replayed": 2, "trajectory": "random"}),
    "again": (again, {"admit": "nothing", "prioritise": "middle", "band": [0.0, 1.0], "cooldown": 1}),
    "appended": (appended, {"admit": "all", "replayed": 2, "trajectory": "random"}),
    "beside": (beside, {"admit": "all", "prioritise": "advantage", "advantage": "stored", "ratio": 0.5}),
    "in_place": (in_place, {"admit": "with_advantage", "prioritise": "newest"}),
    "buffer": (buffer, {"admit": "all", "prioritise": "random", "advantage": "stored", "ratio": 0.5}),
    "stale": (stale, {"admit": "all", "lag": 1}),
    "rehearsal": (rehearsal, {"admit": "all", "prioritise": "least_used", "ratio": 0.5}),
    "bapo": (bapo, {"admit": "in_band", "band": [0.2, 0.6], "hard": 0.25, "prioritise": "random", "asked": 8}),
}


def test_every_composition_is_tried() -> None:
    assert sorted(METHODS) == rules.names("compose")


@pytest.mark.parametrize("name", METHODS)
def test_the_rows_of_a_method_reach_the_loss(tmp_path: Path, model: Path, name: str) -> None:
    rule, changes = METHODS[name]
    trainer = trainer_of(tmp_path, model, compose=name, weigh="ratio", max_steps=4, **changes)
    trainer.train()
    replays = 0
    for generation in range(4):
        past, now = trainer.history[:generation], trainer.history[generation]
        expected, rows = rule(past, now), trainer.rows(generation)
        assert sorted(row.answer for row in rows if not row.replayed) == sorted(expected.fresh)
        replayed = [row.answer for row in rows if row.replayed]
        assert len(replayed) == len(set(replayed)) == expected.replayed
        assert set(replayed) <= {one for of_group in expected.among for one in of_group}
        if expected.whole:
            assert sorted(replayed) == sorted(
                one for of_group in expected.among if of_group[0] in replayed for one in of_group
            )
        assert_terms(trainer, rows, generation, stored=changes.get("advantage") == "stored")
        assert_loss(trainer, rows, generation, "dr_grpo")
        assert trainer.state.log_history[generation]["experience/replayed"] == expected.replayed
        replays += expected.replayed
    assert (replays > 0) == (name != "again")


def assert_terms(trainer: Recorded, rows: Sequence[Row], generation: int, *, stored: bool) -> None:
    """Old log-probs are those of the time of writing; advantages are those of the rows' groups."""
    written = {one: group for groups in trainer.history[: generation + 1] for group in groups for one in group.answers}
    together = defaultdict(list)
    for row in rows:  # a whole stored group is one of its own
        beyond = row.replayed and trainer.args.compose in ("in_place", "stale", "bapo", "rehearsal")
        rehearsed = beyond and trainer.args.compose == "rehearsal"
        together[row.answer[0], beyond, 0 if rehearsed else beyond and id(written[row.answer])].append(row)
    for of_group in together.values():
        rewards = reward([list(row.answer[1]) for row in of_group])
        counted = [one for one, row in zip(rewards, of_group, strict=True) if not (stored and row.replayed)]
        for row, own in zip(of_group, rewards, strict=True):
            mean = written[row.answer].mean if stored and row.replayed else np.mean(counted)
            assert row.advantage == pytest.approx(own - mean, abs=1e-6)
            np.testing.assert_array_equal(np.float32(row.old), trainer.log_probs[row.answer])


def assert_loss(trainer: Recorded, rows: Sequence[Row], generation: int, loss_type: str) -> None:
    """Sums over what is trained on, divided by means over what is trained on: rows that fill up do not count."""
    sums = []
    for inputs, log_prob, _ in trainer.losses[generation]:
        mask = inputs["completion_mask"].double()
        ratio = (log_prob - inputs["old_per_token_logps"]).double().exp()
        if not any(row.replayed for row in rows):
            bound = ratio.clamp(0.8, 1.2) * inputs["advantages"][:, None]
            objective = torch.minimum(ratio * inputs["advantages"][:, None], bound) * mask
        else:
            objective = ratio * inputs["advantages"][:, None] * mask
        shares = mask.sum(1, keepdim=True).clamp(min=1) if loss_type == "grpo" else 1
        sums.append(float((objective / shares).sum()))
    divisor = {"dr_grpo": len(rows) * COMPLETION, "grpo": len(rows), "dapo": sum(len(row.old) for row in rows)}
    expected = -sum(sums) / max(1, divisor[loss_type])
    assert sum(loss for _, _, loss in trainer.losses[generation]) == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_rows_that_fill_up_do_not_count(tmp_path: Path, model: Path, loss_type: str) -> None:
    changes = {**METHODS["beside"][1], "ratio": 0.6}  # 16 fresh answers and 9 stored ones in two micro-batches
    trainer = trainer_of(tmp_path, model, compose="beside", weigh="ratio", max_steps=4, loss_type=loss_type, **changes)
    trainer.train()
    filled = 0
    for generation in range(4):
        rows = trainer.rows(generation)
        filled += sum(len(inputs["replayed"]) for inputs, _, _ in trainer.losses[generation]) - len(rows)
        assert_loss(trainer, rows, generation, loss_type)
    assert filled


@pytest.mark.parametrize("name", rules.names("weigh"))
def test_terms_of_replayed_answers_are_those_of_exgrpo_train(tmp_path: Path, model: Path, name: str) -> None:
    # Two optimiser steps a generation: then no pass can be spared. A trigger of 0.9 and a bound of 0.001 bite here.
    limits = {"trigger": 0.9, "second_moment": 1e-3, "coefficient": 0.3, "replay_beta": 0.2}
    trainer = trainer_of(
        tmp_path,
        model,
        **{"compose": "appended", **METHODS["appended"][1]},
        **limits,
        weigh=name,
        max_steps=3,
        steps_per_generation=2,
        gradient_accumulation_steps=1,
    )
    checked = []
    inside = trainer._trained_batch

    def compared(output: Any, groups: Sequence[Group], trained: Sequence[Group]) -> dict[str, Any]:
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        plain.load_state_dict(trainer.model.state_dict())
        batch = inside(output, groups, trained)
        checked.append(assert_as_in_train(trainer, batch, trained, plain))
        return batch

    trainer._trained_batch = compared
    trainer.train()
    assert checked[-1] > 0


def assert_as_in_train(trainer: Recorded, batch: dict[str, Any], trained: Sequence[Group], plain: Any) -> int:
    """Compare with the rows of `exgrpo.train`, on scores by plain torch in float64; returns how many are replayed."""

    def prompt(question: int) -> np.ndarray:
        return np.array(tokenizer()(trainer.train_dataset[question]["prompt"])["input_ids"], np.int32)

    def score(rows: Sequence[Trajectory]) -> list[Score]:
        scores = []
        for row in rows:
            ids = torch.tensor([[*prompt(row.question), *row.response]])
            with torch.no_grad():
                full = plain(ids).logits[0, -len(row.response) - 1 : -1].log_softmax(-1)
            own = full.gather(1, ids[0, -len(row.response) :, None])[:, 0].float().numpy()
            scores.append(Score(own, own))
        return scores

    args, of_groups = trainer.args, advantages(trained)
    objective = ObjectiveConfig(
        weigh=args.weigh,
        beta=args.replay_beta,
        second_moment=args.second_moment,
        trigger=args.trigger,
        coefficient=args.coefficient,
    )
    weigher = Weigher(objective, 1.0, score, one_update=False)
    rows = build_rows(trained, of_groups, prompt, replayed=weigher(trained, of_groups))
    found = trainer._objective(batch)
    assert_term(found, batch, weigher.term, args.replay_beta)
    place = {
        (tuple(ids[:length]), replayed): i
        for i, (ids, length, replayed) in enumerate(
            zip(
                batch["completion_ids"].tolist(),
                batch["completion_mask"].sum(1).tolist(),
                batch["replayed"].tolist(),
                strict=True,
            )
        )
    }
    for row in (row for of_group in rows for row in of_group):
        i, length = place[tuple(row.response.tolist()), row.replayed], len(row.response)
        np.testing.assert_allclose(found.old_log_prob[i, :length].numpy(), row.old_log_prob, atol=1e-5)
        advantage = batch["advantages"][i]
        advantage = advantage[:length] if advantage.dim() else advantage.expand(length)
        weight = np.ones(length) if row.weight is None else row.weight
        np.testing.assert_allclose(advantage.numpy(), row.advantage * weight, atol=1e-5)
    return sum(row.replayed for of_group in rows for row in of_group)


def assert_term(found: Objective, batch: dict[str, Any], term: str, beta: float) -> None:
    clip = (0.2, 0.2) if term == "clipped" or not batch["replayed"].any() else None
    assert found.clip == clip
    assert found.beta == (beta if term == "shaped" else None)
    if term == "clipped":
        assert found.replayed is None
    else:
        assert torch.equal(found.replayed, batch["replayed"])


def test_where_one_update_sees_the_policy_nobody_computes_it_before(tmp_path: Path, model: Path) -> None:
    changes = METHODS["appended"][1]
    trainer = trainer_of(tmp_path, model, compose="appended", weigh="as_fresh", max_steps=2, **changes)
    trainer._scores = pytest.fail
    trainer.train()
    replayed = [row for row in trainer.rows(1) if row.replayed]
    assert replayed
    assert {old for row in replayed for old in row.old} == {math.inf}


def test_a_resumed_run_goes_on_with_a_method_that_settles(tmp_path: Path, model: Path) -> None:
    changes = {"compose": "beside", **METHODS["beside"][1], "weigh": "clipped", "max_uses": 3, "asked": 8}
    changes |= {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "lr_scheduler_type": "constant"}
    whole, resumed = (trainer_of(tmp_path / name, model, **changes) for name in ("run", "resumed"))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    for generation in range(2):
        found, expected = resumed.rows(generation), whole.rows(generation + 2)
        assert [row[:2] for row in sorted(found)] == [row[:2] for row in sorted(expected)]
        for one, other in zip(sorted(found), sorted(expected), strict=True):
            assert one.advantage == pytest.approx(other.advantage, abs=1e-6)
            np.testing.assert_allclose(one.old, other.old, atol=1e-5)
    for name, array in whole.replay.memory.arrays().items():
        np.testing.assert_allclose(resumed.replay.memory.arrays()[name], array, atol=1e-6)


def test_options_are_those_of_the_recipes() -> None:
    own = {field.name for field in fields(GRPOConfig)}
    added = {field.name: field for field in fields(ExGRPOConfig) if field.name not in own}
    of_recipes = {**ExperienceConfig.model_fields, **ObjectiveConfig.model_fields}
    missing = {name for name in of_recipes if name not in added}
    assert missing - {"entropy_coef"} == set(NOT_HERE)  # entropy_coef TRL has, too
    assert not set(of_recipes) & own - {"entropy_coef", "beta"}
    of_line = ["--compose", "beside", "--expire", "age", "uses", "--max_age", "3", "--max_uses", "2"]
    on_cpu = ["--output_dir", "out", "--use_cpu", "true", "--bf16", "false"]
    default, given = (TrlParser((ExGRPOConfig,)).parse_args_and_config([*on_cpu, *line])[0] for line in ([], of_line))
    assert given.experience == ExperienceConfig(compose="beside", expire=("age", "uses"), max_age=3, max_uses=2)
    assert default.experience == ExperienceConfig()
    assert default.objective == ObjectiveConfig()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compose": "besides"}, "unknown compose function 'besides'; did you mean 'beside'"),
        ({"weigh": "clip"}, "unknown weigh function 'clip'"),
        ({"expire": ["age"]}, "needs its limit"),
        ({"replay_beta": None}, "replay_beta: expected a number .* weigh='ratio'"),
        ({"admit": "solutions"}, "admit='solutions': .* use admit='successes'"),
        ({"compose": "beside", "scale_rewards": "batch"}, "scale_rewards='batch': .*compose='beside'"),
        (
            {"advantage": "stored", "multi_objective_aggregation": "normalize_then_sum"},
            "multi_objective_aggregation='normalize_then_sum': .* advantage='stored'",
        ),
    ],
    ids=str,
)
def test_refused(tmp_path: Path, model: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, model, max_steps=1, **changes)
