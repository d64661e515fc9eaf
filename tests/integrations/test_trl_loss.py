"""The loss in TRL, against TRL's own trainer and float64 on full logits.

Tolerances. In fp32 a result may be off by what TRL's own fp32 result is off, doubled for another order of summation,
and by one part in a million of its size, where TRL's happens to be nearly exact.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.utils import _apply_to_tensors

pytest.importorskip("trl", reason="trl is not installed: pip install 'trl>=1.16,<2'", exc_type=ImportError)

from transformers import AutoConfig, AutoModelForCausalLM
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from exgrpo.integrations import trl_loss
from exgrpo.integrations.trl import FusedLossMixin
from exgrpo.integrations.trl_loss import use_kernels
from tests.integrations import tiny
from tests.integrations.trl_trainers import ACCUMULATION, COMPLETION, Outcome, grpo, outcome, tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, PROMPT = 8, 5


class FusedTrainer(FusedLossMixin, GRPOTrainer):
    """TRL's trainer with our loss."""


class FullLogitsTrainer(GRPOTrainer):
    """TRL's trainer on log-probs from full logits, in the model's dtype."""

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **_: Any
    ) -> tuple[Tensor, Tensor, None]:
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
        log_probs = (logits / self.temperature).log_softmax(-1)
        own = log_probs.gather(-1, input_ids[:, -logits_to_keep:, None])[..., 0]
        return own, -(log_probs.exp() * log_probs).sum(-1), None


def batch(*, old: bool = True) -> dict[str, Tensor]:
    """A micro-batch as TRL prepares it: prompts padded on the left, completions on the right."""
    draw = torch.Generator().manual_seed(1)
    prompt_ids = torch.randint(3, 290, (ROWS, PROMPT), generator=draw)
    completion_ids = torch.randint(3, 290, (ROWS, COMPLETION), generator=draw)
    lengths = torch.tensor([COMPLETION, 1, 4, 7, 3, COMPLETION, 2, 5])
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": (torch.arange(PROMPT) >= torch.arange(ROWS)[:, None] % 4).long(),
        "completion_ids": completion_ids,
        "completion_mask": (torch.arange(COMPLETION) < lengths[:, None]).long(),
        "advantages": torch.tensor([0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5]),
        "num_items_in_batch": torch.tensor(77),
        "ref_per_token_logps": -5.5 + torch.randn(ROWS, COMPLETION, generator=draw),
        "importance_sampling_ratio": 0.5 + torch.rand(ROWS, COMPLETION, generator=draw),
        "tool_mask": (torch.rand(ROWS, COMPLETION, generator=draw) < 0.8).long(),
    }
    return {**inputs, "old_per_token_logps": torch.empty(0)} if old else inputs


def three_outcomes(
    folder: Path, model: Path, inputs: dict[str, Tensor], *, vllm: bool = False, **changes: Any
) -> tuple[Outcome, Outcome, Outcome]:
    """Ours, TRL's, and TRL's formula in float64 on full logits."""
    changes = {"gradient_accumulation_steps": ACCUMULATION, **changes}
    trainers = [grpo(kind, folder, model, **changes) for kind in (FusedTrainer, GRPOTrainer, FullLogitsTrainer)]
    exact = trainers[-1]
    exact.model.double()
    if "old_per_token_logps" in inputs:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        with torch.no_grad():
            now, _, _ = exact._get_per_token_logps_and_entropies(exact.model, ids, mask, COMPLETION)
        noise = torch.randn(now.shape, generator=torch.Generator().manual_seed(2))
        inputs = {**inputs, "old_per_token_logps": (now + 0.3 * noise).float()}
    for trainer in trainers:
        trainer.use_vllm = vllm
    ours, trl = (outcome(trainer, inputs) for trainer in trainers[:2])
    wide = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    return ours, trl, outcome(exact, wide)


def assert_as_exact(ours: Outcome, trl: Outcome, exact: Outcome) -> None:
    assert_near_exact(ours, trl, exact)
    assert ours.metrics.keys() == trl.metrics.keys()
    for name, value in trl.metrics.items():
        assert ours.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def assert_near_exact(ours: Outcome, trl: Outcome, exact: Outcome) -> None:
    for name in ("loss", "gradient"):
        right = getattr(exact, name)
        error, of_trl = ((getattr(one, name) - right).norm() for one in (ours, trl))
        # Under the policy itself the terms of the loss, of about 0.5, cancel: what is left are their roundings.
        rounding = 0.5 * 2.0**-24 if name == "loss" else 0.0
        assert error <= 2 * of_trl + 1e-6 * right.norm() + rounding, (name, error, of_trl, right.norm())
    assert exact.gradient.norm() > 0


@pytest.mark.parametrize(
    ("loss_type", "entropy_coef", "old"),
    [
        *((loss_type, 0.02, True) for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo")),
        ("dr_grpo", 0.0, True),
        ("grpo", 0.0, False),
        ("dapo", 0.02, False),
    ],
)
def test_loss_is_that_of_trl(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path, loss_type: str, entropy_coef: float, old: bool
) -> None:
    # One kernel forms the loss, and nothing is computed twice.
    monkeypatch.setattr(trl_loss, "linear_log_prob", None)
    inputs = batch(old=old)
    del inputs["tool_mask"]
    outcomes = three_outcomes(
        tmp_path, model, inputs, loss_type=loss_type, entropy_coef=entropy_coef, epsilon=0.1, epsilon_high=0.3
    )
    assert_as_exact(*outcomes)
    if old:
        assert 0 < outcomes[0].metrics["clip_ratio/region_mean"] < 1


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.7, "steps_per_generation": 4},
        {"vllm": True, "loss_type": "grpo"},
        {"entropy_coef": 0.01, "use_adaptive_entropy": True, "entropy_target": 3.0},
        {"loss_type": "cispo", "epsilon_high": 2.0},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"beta": 0.1},
        {"delta": 1.5},
        {"top_entropy_quantile": 0.5, "entropy_coef": 0.02},
        {"off_policy_mask_threshold": 0.01},
    ],
    ids=str,
)
def test_every_objective_of_trl(tmp_path: Path, model: Path, changes: dict[str, Any]) -> None:
    assert_as_exact(*three_outcomes(tmp_path, model, batch(), **changes))


@pytest.mark.parametrize("changes", [{"bf16": True}, {"bf16": True, "cast_lm_head_to_fp32": True}], ids=str)
def test_mixed_precision_is_as_near_as_that_of_trl(tmp_path: Path, model: Path, changes: dict[str, Any]) -> None:
    assert_near_exact(*three_outcomes(tmp_path, model, batch(), entropy_coef=0.01, **changes))


def test_an_engine_that_casts_a_models_arguments_leaves_the_objective_alone(tmp_path: Path, model: Path) -> None:
    """As FSDP does in mixed precision: bfloat16 would spoil old log-probs, advantages and numbers of tokens."""
    trainer = grpo(FusedTrainer, tmp_path, model)
    inputs = {**batch(), "old_per_token_logps": torch.full((ROWS, COMPLETION), -5.71)}
    plain = outcome(trainer, inputs)

    def half(value: Tensor) -> Tensor:
        return value.bfloat16() if value.is_floating_point() else value

    trainer.model.register_forward_pre_hook(
        lambda _, args, kwargs: (args, _apply_to_tensors(half, kwargs)), with_kwargs=True
    )
    cast = outcome(trainer, inputs)
    torch.testing.assert_close((cast.loss, cast.gradient), (plain.loss, plain.gradient), rtol=0, atol=0)


def test_a_row_that_is_masked_whole(tmp_path: Path, model: Path) -> None:
    inputs = batch()
    inputs["completion_mask"][0] = 0
    assert_as_exact(*three_outcomes(tmp_path, model, inputs, loss_type="grpo", entropy_coef=0.01))


@pytest.mark.parametrize("head", ["gemma2", "cohere", "granite", "phi", "qwen3_moe"])
def test_heads(head: str) -> None:
    tokens = tiny.batch()["input_ids"]
    ours, trl = (tiny.model(head) for _ in range(2))
    for model in (ours, trl):
        add_fused_lm_head(model, temperature=0.8, outputs=("log_probs", "entropy"))
    use_kernels(ours, temperature=0.8)
    results = [
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens, fused_lm_head=True)
        for model in (ours, trl)
    ]
    for name in ("log_probs", "entropy", "aux_loss"):
        torch.testing.assert_close(getattr(results[0], name), getattr(results[1], name), rtol=1e-5, atol=1e-5)
    plain = ours(input_ids=tokens).logits.shape
    assert plain == (*tokens.shape, tiny.VOCABULARY)


def test_load_balancing_loss(tmp_path: Path) -> None:
    torch.manual_seed(0)
    experts = {**tiny.SHAPE, **tiny.ARCHITECTURES["qwen3_moe"], "vocab_size": len(tokenizer())}
    config = AutoConfig.for_model("qwen3_moe", **experts, initializer_range=0.3)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    inputs = {**batch(), "old_per_token_logps": torch.full((ROWS, COMPLETION), -5.7)}
    ours, trl = (
        outcome(grpo(kind, tmp_path, tmp_path / "model", router_aux_loss_coef=0.5), inputs)
        for kind in (FusedTrainer, GRPOTrainer)
    )
    torch.testing.assert_close(ours.loss, trl.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.gradient, trl.gradient, rtol=1e-4, atol=1e-6)
    assert ours.metrics["aux_loss"] == pytest.approx(trl.metrics["aux_loss"])
