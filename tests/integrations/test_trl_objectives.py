"""The objectives of the trainer against TRL's own losses, on the same answers and the same model."""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="trl is not installed: pip install 'trl>=1.16,<2'", exc_type=ImportError)

from transformers import AutoModelForCausalLM
from trl import GRPOTrainer
from trl.experimental.a2po import A2POTrainer

from exgrpo.train.common.records import Rollout
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.config.objective import SURROGATES, MethodOptions, ObjectiveConfig
from exgrpo.train.policy.attention import PACKED
from exgrpo.train.policy.batch import build_minibatches
from exgrpo.train.policy.layout import Packed, Padded
from exgrpo.train.policy.loss import LossTerms
from exgrpo.train.policy.model import PolicyModel
from exgrpo.train.replay.groups import fill_advantages
from tests.integrations.test_trl_loss import batch
from tests.integrations.trl_trainers import ACCUMULATION, COMPLETION, grpo, outcome
from tests.train.batches import Row, make_batch

pytestmark = pytest.mark.usefixtures("one_thread")
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gspo": (
        {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 0.05, "epsilon_high": 0.1},
        {"surrogate": "gspo", "clip": (0.05, 0.1), "normalize": "sequence"},
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.2},
        {"surrogate": "cispo", "clip": (1.0, 0.2), "normalize": "token"},
    ),
    "dual clip": (
        {"delta": 1.3, "loss_type": "dr_grpo", "epsilon": 0.2},
        {"surrogate": "dual_clip", "dual_clip": 1.3, "normalize": "constant"},
    ),
    "clip-higher, divergence": (
        {"beta": 0.3, "loss_type": "bnpo", "epsilon": 0.1, "epsilon_high": 0.3},
        {"clip": (0.1, 0.3), "kl_coef": 0.3, "normalize": "token"},
    ),
    "whole answers, divergence": (
        {"beta": 0.3, "loss_type": "bnpo", "importance_sampling_level": "sequence", "use_bias_correction_kl": False},
        {"surrogate": "gspo", "kl_coef": 0.3, "kl_corrected": False, "normalize": "token"},
    ),
}


def batch_of(inputs: dict[str, Tensor], *, compared: bool) -> StepBatch:
    """The rows of a batch of TRL, beside a reference or not."""
    prompts, answers = inputs["prompt_mask"].bool(), inputs["completion_mask"].bool()
    rows = range(len(prompts))
    ids, prompt_ids = (inputs[name].numpy().astype(np.int32) for name in ("completion_ids", "prompt_ids"))
    batch = StepBatch.from_answers(
        [prompt_ids[i][prompts[i]] for i in rows], [Rollout(ids[i][answers[i]], finished=True) for i in rows]
    )
    batch.fill(
        trained=np.arange(batch.groups),
        loss_mask=np.ones(len(batch), bool),
        advantage=inputs["advantages"],
        ratio_log_prob=inputs["old_per_token_logps"][answers],
    )
    if compared:
        batch.fill(reference_log_prob=inputs["ref_per_token_logps"][answers])
    return batch


def gradient_of(model: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])


def backward(folder: Path, minibatch: Any, objective: ObjectiveConfig, layout: Any, *, term: str) -> tuple[Any, Tensor]:
    """The trainer's result on a mini-batch in one pass, and the gradient of its loss."""
    method, surrogate = MethodOptions(objective=objective), SURROGATES.find(objective.surrogate)
    terms = LossTerms.from_minibatch(minibatch, method, surrogate, ranks=1, clip=True, term=term)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.set_attn_implementation(PACKED if isinstance(layout, Packed) else "sdpa")
    result = PolicyModel(model)(layout.rows(minibatch.batch, torch.device("cpu")), terms)
    result.loss.backward()
    return result, gradient_of(model)


@pytest.mark.parametrize("name", CASES)
def test_an_objective_is_that_of_trl(tmp_path: Path, model: Path, name: str) -> None:
    theirs, ours = CASES[name]
    inputs = {**batch(), "num_items_in_batch": torch.tensor(40)}
    for unused in ("tool_mask", "importance_sampling_ratio"):
        del inputs[unused]
    trainer = grpo(GRPOTrainer, tmp_path, model, gradient_accumulation_steps=ACCUMULATION, **theirs)
    trainer.use_vllm = False
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        now = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, COMPLETION)[0]
    noise = torch.randn(now.shape, generator=torch.Generator().manual_seed(2))
    inputs["old_per_token_logps"] = now + 0.3 * noise
    expected = outcome(trainer, inputs)
    objective = ObjectiveConfig(entropy_coef=0.0, **ours)
    rows = batch_of(inputs, compared=objective.kl_coef > 0)
    (minibatch,) = build_minibatches(rows, 1, np.random.default_rng(0), objective, COMPLETION)
    for layout in (Padded(), Packed()):
        result, gradient = backward(model, minibatch, objective, layout, term="shaped")
        # TRL divides what it accumulates, of the loss type cispo by another number. Both are in fp32.
        divisor = 1 if theirs["loss_type"] == "cispo" else ACCUMULATION
        assert result.loss.item() == pytest.approx(divisor * expected.loss.item(), rel=1e-4, abs=2e-6)
        assert (gradient - divisor * expected.gradient).norm() <= 1e-5 * gradient.norm()
        if "divergence" not in name:
            assert 0 < result.clipped.sum() < result.clipped.numel()


REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0])
"""Of four groups of two: the third one is all right, and the last one all wrong."""


@pytest.mark.parametrize(("layout", "beta2"), [(Padded(), 1e-3), (Packed(), 0.05)])
def test_the_regression_is_that_of_trl(model: Path, layout: Padded | Packed, beta2: float) -> None:
    """OAPL is the loss of A2PO, with the value that A2PO estimates from answers of its reference."""
    inputs, beta1 = batch(), 0.7
    answers, reference = inputs["completion_mask"].bool(), inputs["ref_per_token_logps"]
    rewards = torch.from_numpy(REWARDS).float()
    value = beta1 * (torch.logsumexp(rewards.view(4, 2) / beta1, 1) - np.log(2))  # as A2PO estimates it
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trainer = A2POTrainer.__new__(A2POTrainer)
    trainer.model, trainer.model_kwarg_keys, trainer._metrics = policy, (), defaultdict(lambda: defaultdict(list))
    trainer.args = SimpleNamespace(beta2=beta2)
    given = {
        "input_ids": torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
        "attention_mask": torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
        "logits_to_keep": COMPLETION,
        "ref_logps": (reference * answers).sum(1),
        "rewards": rewards,
        "v_star": value.repeat_interleave(2),
    }
    expected = trainer.compute_loss(policy, given)
    expected.backward()
    gradient = gradient_of(policy)

    groups = make_batch([(question, [Row(one) for one in of]) for question, of in enumerate(REWARDS.reshape(4, 2))])
    fill_advantages(groups, ObjectiveConfig(baseline="log_mean_exp", beta1=beta1))
    rows = batch_of({**inputs, "old_per_token_logps": reference}, compared=False)
    rows.fill(advantage=groups.advantage)
    objective = ObjectiveConfig(surrogate="oapl", beta2=beta2, normalize="answer", entropy_coef=0.0)
    (minibatch,) = build_minibatches(rows, 1, np.random.default_rng(0), objective, COMPLETION, all_rows=True)
    result, found = backward(model, minibatch, objective, layout, term="clipped")
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-5)  # both are in fp32
    assert (found - gradient).norm() <= 1e-5 * gradient.norm()
