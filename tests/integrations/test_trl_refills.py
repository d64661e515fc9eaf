"""Dynamic sampling in TRL: further questions in the place of groups without a gradient, at most so many times."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl", reason="trl is not installed: pip install 'trl>=1.16,<2'", exc_type=ImportError)

from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.replay import PlannedGroup
from tests.integrations.test_trl_methods import assert_loss
from tests.integrations.trl_methods import B, K, Recorded, answers, trainer_of
from tests.integrations.trl_trainers import QUESTIONS

pytestmark = pytest.mark.usefixtures("one_thread")
GRPO = {"ratio": 0.0, "asked": QUESTIONS, "max_steps": 3}


def test_the_first_groups_with_a_gradient_are_trained_on(tmp_path: Path, model: Path) -> None:
    trainer = trainer_of(tmp_path, model, refills=2, **GRPO)
    trainer.train()
    refilled, tokens = 0, 0
    for generation, log in enumerate(trainer.state.log_history[:3]):
        groups, rows = trainer.history[generation], trainer.rows(generation)
        assert len({group.question for group in groups}) == len(groups)
        with_signal = [group for group in groups if group.differs][:B]
        assert sorted(row.answer for row in rows) == sorted(answers(with_signal))
        mean = {group.question: group.mean for group in with_signal}
        worth = {one: reward for group in with_signal for one, reward in zip(group.answers, group.rewards, strict=True)}
        for row in rows:
            assert row.advantage == pytest.approx(worth[row.answer] - mean[row.answer[0]], abs=1e-6)
            np.testing.assert_array_equal(np.float32(row.old), trainer.log_probs[row.answer])
        assert_loss(trainer, rows, generation, "dr_grpo")
        # TRL's numbers are those of the first draw, once; what was generated has been generated.
        assert log["reward"] == pytest.approx(np.mean([group.mean for group in groups[:B]]))
        assert log["frac_reward_zero_std"] == pytest.approx(np.mean([not group.differs for group in groups[:B]]))
        assert log["experience/refilled"] == len(groups) - B
        assert log["experience/pass_rate"] == pytest.approx(np.mean([group.mean for group in groups]))
        refilled += len(groups) - B
        prompts = {question: ids for ids, question in trainer.question_of.items()}
        tokens += sum(len(prompts[question]) + len(ids) for question, ids in answers(groups))
        assert log["num_tokens"] == tokens
    assert refilled
    assert trainer.asked == K * sum(map(len, trainer.history))


@pytest.mark.parametrize("refills", [1, 5])
def test_no_more_is_asked_than_the_bound_or_the_questions_allow(tmp_path: Path, model: Path, refills: int) -> None:
    trainer = trainer_of(tmp_path, model, refills=refills, **{**GRPO, "max_steps": 1})
    trainer.reward_funcs = [lambda completions, **_: [0.0] * len(completions)]
    trainer.train()
    assert len(trainer.history[0]) == min(QUESTIONS, B * (1 + refills))
    rows = trainer.rows(0)
    assert sorted(row.answer for row in rows) == sorted(answers(trainer.history[0][:B])), "the batch keeps its size"
    assert {row.advantage for row in rows} == {0.0}


def test_answers_that_are_masked_count_in_their_group_with_their_reward(tmp_path: Path, model: Path) -> None:
    """As in TRL: equal rewards teach nothing, whether or not an answer was cut off."""
    trainer = trainer_of(tmp_path, model, refills=1, mask_truncated_completions=True, **{**GRPO, "max_steps": 1})
    trainer.reward_funcs = [lambda completions, **_: [-1.0] * len(completions)]
    generate = trainer._generate_single_turn

    def cut(*args: Any, **kwargs: Any) -> tuple[list, Any]:
        ids, log_probs = generate(*args, **kwargs)
        return [one[:-1] if i % 2 else one for i, one in enumerate(ids)], log_probs

    trainer._generate_single_turn = cut
    trainer.train()
    assert trainer.state.log_history[0]["experience/refilled"] == min(QUESTIONS, 2 * B) - B


class Sampled(Recorded):
    """The importance weights of each answer are kept."""

    def _answer(
        self, groups: Sequence[PlannedGroup], stored: StepBatch, **how: Any
    ) -> tuple[dict[str, Any], StepBatch]:
        output, batch = super()._answer(groups, stored, **how)
        self.ratios = getattr(self, "ratios", {})
        rows = zip(output["completion_ids"], output["completion_mask"], strict=True)
        for i, (ids, mask) in enumerate(rows):
            ratio = output["importance_sampling_ratio"][i].expand(len(mask))[mask.bool()]
            self.ratios[tuple(ids[mask.bool()].tolist())] = ratio.tolist()
        return output, batch


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate"])
def test_refilled_answers_keep_the_weights_of_the_sampler(tmp_path: Path, model: Path, mode: str) -> None:
    trainer = trainer_of(tmp_path, model, refills=2, vllm_importance_sampling_mode=mode, **{**GRPO, "max_steps": 1})
    trainer.__class__ = Sampled
    trainer.log_prob = -5.5
    trainer.train()
    assert len(trainer.history[0]) > B
    group_of = {one: group for group in trainer.history[0] for one in group.answers}
    checked = 0
    for inputs, _, _ in trainer.losses[0]:
        for i, length in enumerate(inputs["completion_mask"].sum(1).tolist()):
            ids = tuple(inputs["completion_ids"][i, :length].tolist())
            prompt = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()].tolist()
            group = group_of[trainer.question_of[tuple(prompt)], ids] if length else None
            if group is None:
                continue
            own = group.rewards[group.answers.index((group.question, ids))] - group.mean
            weight = inputs["advantages"][i] * inputs["importance_sampling_ratio"][i]
            expected = own * np.array(trainer.ratios[ids])
            np.testing.assert_allclose(weight[:length].expand(length).numpy(), expected, rtol=1e-5)
            checked += trainer.history[0].index(group) >= B
    assert checked
