"""Methods of replay in TRL: which rows reach the loss, and with what.

The oracle is what was written, what the replay has chosen of it, and the loss by its formula.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed: pip install 'trl>=1.16,<2'", exc_type=ImportError)

from trl import GRPOConfig, TrlParser

from exgrpo.integrations.trl import ExGRPOConfig
from exgrpo.train.config.options import ExperienceConfig, ObjectiveConfig
from tests.integrations.trl_methods import METHODS, Recorded, Row, trainer_of
from tests.integrations.trl_trainers import COMPLETION, reward

pytestmark = pytest.mark.usefixtures("one_thread")

NOT_HERE = (
    *("anchor", "baseline", "beta", "beta1", "beta2", "clip", "dual_clip", "folder", "kl", "kl_coef", "kl_corrected"),
    *("normalize", "overlong_filter", "overlong_penalty", "overlong_tokens", "prefix", "scale_by_std", "surrogate"),
    "train_on",
)
"""Options of a recipe that ExGRPOConfig does not have: TRL has its own, or a trainer of its own."""


@pytest.mark.parametrize(
    ("name", "more"),
    [
        *((name, {}) for name in METHODS),
        ("mixed", {"advantage": "stored", "max_steps": 2}),
        ("appended", {"scale_rewards": "group"}),
    ],
    ids=str,
)
def test_the_rows_of_a_method_reach_the_loss(tmp_path: Path, model: Path, name: str, more: dict[str, Any]) -> None:
    changes = {"max_steps": 4, **METHODS[name], **more}
    trainer = trainer_of(tmp_path, model, compose=name, weigh="ratio", **changes)
    trainer.train()
    replays = 0
    for generation in range(changes["max_steps"]):
        batch, rows = trainer.settled[generation], trainer.rows(generation)
        chosen = [
            ((int(batch.question[batch.group[row]]), tuple(batch.token[batch.at(row)].tolist())), batch.replayed[row])
            for row in batch.rows_of(batch.trained)
        ]
        assert sorted(row[:2] for row in rows) == sorted(chosen)
        assert_terms(trainer, rows, generation, stored=changes.get("advantage") == "stored")
        assert_loss(trainer, rows, generation, "dr_grpo")
        replayed = sum(row.replayed for row in rows)
        assert trainer.state.log_history[generation]["experience/replayed"] == replayed
        replays += replayed
    assert replays
    written = sum(len(group.answers) for groups in trainer.history for group in groups)
    assert trainer.asked == written, "nothing is generated for a row that is replayed"


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
        scaled = trainer.args.scale_rewards == "group"
        # TRL adds 1e-4 to a deviation, exgrpo.train 1e-6; those of rewards of 0 and 1 are at least 0.3 or 0.
        scale, tolerance = (np.std(counted, ddof=1) + 1e-4, 1e-3) if scaled else (1.0, 1e-6)
        for row, own in zip(of_group, rewards, strict=True):
            mean = written[row.answer].mean if stored and row.replayed else np.mean(counted)
            assert row.advantage == pytest.approx((own - mean) / scale, rel=tolerance, abs=1e-6)
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
    changes = {**METHODS["beside"], "ratio": 0.6}  # 16 fresh answers and 9 stored ones in two micro-batches
    trainer = trainer_of(tmp_path, model, compose="beside", weigh="ratio", max_steps=4, loss_type=loss_type, **changes)
    trainer.train()
    filled = 0
    for generation in range(4):
        rows = trainer.rows(generation)
        filled += sum(len(inputs["replayed"]) for inputs, _, _ in trainer.losses[generation]) - len(rows)
        assert_loss(trainer, rows, generation, loss_type)
    assert filled


def test_where_one_update_sees_the_policy_nobody_computes_it_before(tmp_path: Path, model: Path) -> None:
    changes = METHODS["appended"]
    trainer = trainer_of(tmp_path, model, compose="appended", weigh="as_fresh", max_steps=2, **changes)
    trainer._scores = pytest.fail
    trainer.train()
    replayed = [row for row in trainer.rows(1) if row.replayed]
    assert replayed
    assert {old for row in replayed for old in row.old} == {math.inf}


def test_a_resumed_run_goes_on_with_a_method_that_settles(tmp_path: Path, model: Path) -> None:
    changes = {"compose": "beside", **METHODS["beside"], "weigh": "clipped", "max_uses": 3, "asked": 8}
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


def test_a_wrong_function_of_ones_own_is_refused_before_there_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def mine(candidates, options):\n    return -candidates.count\n")
    with pytest.raises(ValueError, match=r"experience.prioritise .*mine.py:mine: it gave an array .*it gives Priority"):
        ExGRPOConfig(output_dir=str(tmp_path), prioritise=f"{tmp_path}/mine.py:mine")
