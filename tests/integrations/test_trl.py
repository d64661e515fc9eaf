"""The loss and ExGRPO in TRL, against TRL's own trainer and float64 on full logits.

Tolerances. In fp32 a result may be off by what TRL's own fp32 result is off, doubled for another order of summation,
and by one part in a million of its size, where TRL's happens to be nearly exact.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="trl is not installed: pip install 'trl>=1.16,<2'", exc_type=ImportError)

from datasets import IterableDataset
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    PhiConfig,
    Qwen3MoeConfig,
)
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from exgrpo.integrations import trl_loss
from exgrpo.integrations.trl import ExGRPOConfig, ExGRPOTrainer, FusedLossMixin
from exgrpo.integrations.trl_loss import use_kernels
from tests.integrations.trl_trainers import (
    COMPLETION,
    WrittenAnswers,
    grpo,
    options,
    questions,
    reward,
    save_model,
    tokenizer,
)

ROWS, PROMPT = 8, 5
ACCUMULATION = 2


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


class WrittenExGRPO(ExGRPOTrainer, WrittenAnswers):
    """ExGRPO on written answers; what each generation put out is kept."""

    outputs: list[dict[str, Any]]

    def _generate_and_score_completions(self, inputs: list) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        self.outputs = [*getattr(self, "outputs", []), {**output, "stored": dict(self._stored)}]
        return output


class Outcome(NamedTuple):
    loss: Tensor
    gradient: Tensor
    metrics: dict[str, float]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return folder


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


def outcome(trainer: GRPOTrainer, inputs: dict[str, Tensor]) -> Outcome:
    trainer.model.train()
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = ACCUMULATION
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    gradient = torch.cat([parameter.grad.double().flatten() for parameter in trainer.model.parameters()])
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    return Outcome(loss.detach().double(), gradient, metrics)


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
        assert error <= 2 * of_trl + 1e-6 * right.norm(), (name, error, of_trl, right.norm())
    assert exact.gradient.norm() > 0


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.02])
@pytest.mark.parametrize("old", [True, False])
def test_loss_is_that_of_trl(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path, loss_type: str, entropy_coef: float, old: bool
) -> None:
    # Where the policy of before is known one kernel forms the loss, and nothing is computed twice.
    monkeypatch.setattr(trl_loss, "linear_log_prob" if old else "linear_policy_loss", None)
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
        {"loss_type": "sapo"},
        {"loss_type": "vespo"},
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


def test_a_row_that_is_masked_whole(tmp_path: Path, model: Path) -> None:
    inputs = batch()
    inputs["completion_mask"][0] = 0
    assert_as_exact(*three_outcomes(tmp_path, model, inputs, loss_type="grpo", entropy_coef=0.01))


SMALL = {
    "vocab_size": 120,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
HEADS = {
    "softcap": Gemma2Config(**SMALL, final_logit_softcapping=2.0),
    "scaled": CohereConfig(**SMALL, logit_scale=0.5),
    "divided": GraniteConfig(**SMALL, logits_scaling=3.0),
    "bias": PhiConfig(**SMALL),
    "experts": Qwen3MoeConfig(
        **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, output_router_logits=True
    ),
}


@pytest.mark.parametrize("head", HEADS)
def test_heads(head: str) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(1, 120, (2, 7))
    ours, trl = (AutoModelForCausalLM.from_config(HEADS[head]) for _ in range(2))
    ours.load_state_dict(trl.state_dict())
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
    assert plain == (2, 7, 120)


def test_load_balancing_loss(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**{**HEADS["experts"].to_dict(), "vocab_size": len(tokenizer())})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    inputs = {**batch(), "old_per_token_logps": torch.full((ROWS, COMPLETION), -5.7)}
    ours, trl = (
        outcome(grpo(kind, tmp_path, tmp_path / "model", router_aux_loss_coef=0.5), inputs)
        for kind in (FusedTrainer, GRPOTrainer)
    )
    torch.testing.assert_close(ours.loss, trl.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.gradient, trl.gradient, rtol=1e-4, atol=1e-6)
    assert ours.metrics["aux_loss"] == pytest.approx(trl.metrics["aux_loss"])


def exgrpo(folder: Path, model: Path, kind: type[ExGRPOTrainer] = WrittenExGRPO, **changes: Any) -> ExGRPOTrainer:
    changes = {"start_pass_rate": 0.0, "learning_rate": 1e-3, **changes}
    config = ExGRPOConfig(**options(folder, **{"per_device_train_batch_size": 16, **changes}))
    return kind(str(model), reward, config, questions(), processing_class=tokenizer())


def test_replayed_rows_carry_the_past_policy_and_share_the_mean(tmp_path: Path, model: Path) -> None:
    trainer = exgrpo(tmp_path, model, max_steps=4)
    trainer.train()
    logs = trainer.state.log_history
    assert logs[0]["experience/replayed"] == 0
    assert logs[3]["experience/replayed"] > 0
    assert trainer.asked == sum(16 - log["experience/replayed"] for log in logs[:4])
    for output in trainer.outputs:
        for row, stored in output["stored"].items():
            length = len(stored.response)
            assert output["completion_ids"][row, :length].tolist() == stored.response.tolist()
            assert output["completion_mask"][row].sum() == length
            np.testing.assert_array_equal(output["old_per_token_logps"][row, :length].numpy(), stored.log_prob)
            group = output["advantages"].view(-1, 4)[row // 4]
            successes = 1 - group[row % 4].item()  # the mean of four rewards, of which the replayed one is 1
            assert group.sum().item() == pytest.approx(0, abs=1e-6)
            assert successes == pytest.approx(sum(a > 0 for a in group.tolist()) / 4)
        assert output["replayed"].nonzero().flatten().tolist() == sorted(output["stored"])


def test_trajectories_are_compared_at_temperature_1_and_stored_at_that_of_sampling(tmp_path: Path, model: Path) -> None:
    trainer = exgrpo(tmp_path, model, max_steps=4, temperature=0.5, learning_rate=0.0)
    trainer.train()
    stored = trainer.replay.memory.all_trajectories()
    assert stored
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    for row, (entropy, nll) in zip(stored, trainer._score(stored), strict=True):
        prompt = tokenizer()(trainer.train_dataset[row.question]["prompt"])["input_ids"]
        response = torch.from_numpy(row.response).long()
        with torch.no_grad():
            logits = plain(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        full = logits.log_softmax(-1)
        # Plain torch in float32 is off by a few 1e-6 nats per token here.
        assert entropy == pytest.approx(float(-(full.exp() * full).sum(-1).mean()), abs=2e-5)
        assert nll == pytest.approx(float(-full.gather(1, response[:, None]).mean()), abs=2e-5)
        sampled = (logits / 0.5).log_softmax(-1).gather(1, response[:, None])[:, 0]
        np.testing.assert_allclose(row.log_prob, sampled.numpy(), atol=5e-5)


@pytest.mark.parametrize("keep", [False, True])
def test_clipping_is_off_in_steps_that_replay_and_only_there(tmp_path: Path, model: Path, keep: bool) -> None:
    trainer = exgrpo(tmp_path, model, max_steps=4, clip_with_replay=keep)
    clips, objective = [], trainer._objective

    def recorded(inputs: dict[str, Any]) -> trl_loss.Objective:
        clips.append(objective(inputs).clip)
        return objective(inputs)

    trainer._objective = recorded
    trainer.train()
    replayed = [log["experience/replayed"] > 0 for log in trainer.state.log_history[:4]]
    assert replayed[0] is False
    assert any(replayed)
    assert [clip is None for clip in clips] == [of_step and not keep for of_step in replayed]


@pytest.mark.parametrize("success", [0.9, 1.0])
def test_rewards_that_peak_below_one(tmp_path: Path, model: Path, success: float) -> None:
    trainer = exgrpo(tmp_path, model, max_steps=2, success=success)
    trainer.reward_funcs = [lambda **kwargs: [0.9 * one for one in reward(**kwargs)]]
    trainer.replay.watch.patience = 16
    if success == 1.0:
        with pytest.warns(UserWarning, match=r"no answer is a success: .* between 0 and 0\.9, and success is 1"):
            trainer.train()
    else:
        trainer.train()
    pass_rates = [log["experience/pass_rate"] for log in trainer.state.log_history[:2]]
    assert [rate > 0 for rate in pass_rates] == [success == 0.9] * 2
    assert (len(trainer.replay.memory) > 0) == (success == 0.9)


class SampledExGRPO(WrittenExGRPO):
    """As with vLLM, which says how probable what it sampled was."""

    def _generate_and_score_completions(self, inputs: list) -> dict[str, Any]:
        self.use_vllm = True
        return super()._generate_and_score_completions(inputs)


def test_replayed_rows_have_no_importance_weight_of_the_sampler(tmp_path: Path, model: Path) -> None:
    trainer = exgrpo(tmp_path, model, SampledExGRPO, max_steps=3)
    trainer.log_prob = -5.0
    trainer.train()
    for output in trainer.outputs:
        assert torch.equal(output["importance_sampling_ratio"][:, 0] == 1, output["replayed"])
    assert output["replayed"].any()
    assert np.isfinite(trainer.state.log_history[2]["loss"])


def test_loss_of_a_mixed_batch_is_the_formula_of_the_paper(tmp_path: Path, model: Path) -> None:
    trainer = exgrpo(tmp_path, model, max_steps=3, entropy_coef=0.01)
    trainer.train()
    output = next(output for output in reversed(trainer.outputs) if output["replayed"].any())
    inputs = {name: value for name, value in output.items() if name != "stored"}
    trainer._metrics["train"].clear()
    found = outcome(trainer, inputs)
    log_prob, entropy = trainer._log_probs(inputs, entropy=True)
    mask = inputs["completion_mask"].double()
    ratio = (log_prob - inputs["old_per_token_logps"]).double().exp()
    shaped = torch.where(inputs["replayed"][:, None], ratio / (ratio + 0.1), ratio)
    policy = -(shaped * inputs["advantages"][:, None] * mask).sum() / (16 * COMPLETION)
    expected = (policy - 0.01 * (entropy * mask).sum() / mask.sum()) / ACCUMULATION
    # A sum of at most 16 x 9 fp32 terms of size 1, each with a log-prob that is right to 1e-6.
    torch.testing.assert_close(found.loss, expected, rtol=1e-5, atol=1e-6)


def test_a_resumed_run_goes_on_with_its_experience(tmp_path: Path, model: Path) -> None:
    changes = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "lr_scheduler_type": "constant"}
    whole = exgrpo(tmp_path / "run", model, **changes)
    whole.train()
    resumed = exgrpo(tmp_path / "resumed", model, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert resumed.state.global_step == 4
    found, expected = resumed.replay.memory, whole.replay.memory
    np.testing.assert_array_equal(found.count, expected.count)
    np.testing.assert_array_equal(found.retired, expected.retired)
    assert len(found) > 0
    for one, other in zip(found.all_trajectories(), expected.all_trajectories(), strict=True):
        np.testing.assert_array_equal(one.response, other.response)
        np.testing.assert_allclose(one.log_prob, other.log_prob, atol=1e-5)
    for log, other in zip(resumed.state.log_history[2:4], whole.state.log_history[2:4], strict=True):
        assert log["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert log["experience/replayed"] == other["experience/replayed"]


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path: Path, model: Path) -> None:
    plain = grpo(GRPOTrainer, tmp_path, model, max_steps=1, save_strategy="steps", save_steps=1)
    plain.train()
    with pytest.raises(ValueError, match="holds no experience"):
        exgrpo(tmp_path, model, max_steps=2).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_training_stops_when_every_question_is_solved(tmp_path: Path, model: Path) -> None:
    trainer = exgrpo(tmp_path, model, max_steps=50)
    trainer.reward_funcs = [lambda completions, **_: [1.0] * len(completions)]
    trainer.train()
    assert trainer.state.global_step == 3  # 12 questions, 4 at a time
    assert trainer.replay.memory.retired.all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_type": "cispo"}, "loss_type='cispo'"),
        ({"beta": 0.1}, r"beta=0\.1"),
        ({"ratio": 1.5}, "ratio"),
        ({"replay_beta": 0.0}, "replay_beta"),
        ({"top_p": 0.9}, r"top_p=0\.9: .*lower temperature"),
        ({"generation_kwargs": {"top_k": 5}}, "top_k=5: "),
        ({"success": float("nan")}, "success: expected a finite number"),
        ({"per_device_train_batch_size": 64}, "lower generation_batch_size"),
    ],
    ids=str,
)
def test_refused(tmp_path: Path, model: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exgrpo(tmp_path, model, **changes)


def test_other_arguments_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    with pytest.raises(TypeError, match="expected an ExGRPOConfig"):
        grpo(ExGRPOTrainer, tmp_path, model)
    stream = IterableDataset.from_generator(lambda: iter(questions()))
    config = ExGRPOConfig(**options(tmp_path, max_steps=1))
    with pytest.raises(TypeError, match=r"Dataset\.from_generator"):
        ExGRPOTrainer(str(model), reward, config, stream, processing_class=tokenizer())
    with pytest.raises(ValueError, match="rollout_func, tools"):
        ExGRPOTrainer(str(model), reward, config, questions(), processing_class=tokenizer(), rollout_func=lambda *_: {})
