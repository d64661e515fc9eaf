"""ExGRPO in TRL, on written answers: what is replayed, the loss of mixed batches, checkpoints and refusals."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed: pip install 'trl>=1.16,<2'", exc_type=ImportError)

from datasets import Dataset, IterableDataset, concatenate_datasets
from transformers import AutoModelForCausalLM

from exgrpo.integrations import trl_loss
from exgrpo.integrations.trl import EXPERIENCE, ExGRPOConfig, ExGRPOTrainer
from exgrpo.integrations.trl_replay import STATE, distinct_rows
from exgrpo.train.common.errors import ConfigError
from tests.integrations.trl_trainers import (
    ACCUMULATION,
    COMPLETION,
    QUESTIONS,
    WrittenExGRPO,
    exgrpo,
    grpo,
    options,
    outcome,
    questions,
    reward,
    tokenizer,
)

pytestmark = pytest.mark.usefixtures("one_thread")


class Recorded(WrittenExGRPO):
    """What each generation put out is kept."""

    outputs: list[dict[str, Any]]

    def _generate_and_score_completions(self, inputs: list) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        self.outputs = [*getattr(self, "outputs", []), output]
        return output


def trainer_of(folder: Path, model: Path, **changes: Any) -> Recorded:
    return exgrpo(folder, model, Recorded, **{"learning_rate": 1e-3, **changes})


def with_clips(trainer: Recorded) -> tuple[Recorded, list[Any]]:
    """The trainer after its training, and the clips of its losses."""
    clips, objective = [], trainer._objective

    def recorded(inputs: dict[str, Any]) -> trl_loss.PolicyLossInputs:
        clips.append(objective(inputs).clip)
        return objective(inputs)

    trainer._objective = recorded
    trainer.train()
    return trainer, clips


RUN = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "lr_scheduler_type": "constant", "entropy_coef": 0.01}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Recorded, list[Any]]:
    """A training that several tests read, with a checkpoint after two of its four steps."""
    return with_clips(trainer_of(tmp_path_factory.mktemp("run"), model, **RUN))


def test_trajectories_are_compared_at_temperature_1_and_stored_at_that_of_sampling(tmp_path: Path, model: Path) -> None:
    trainer = trainer_of(tmp_path, model, max_steps=4, temperature=0.5, learning_rate=0.0)
    trainer.train()
    table = trainer.replay.memory.table
    stored = table.answers(table.rows(), np.arange(len(table)), table.column("question"))
    assert len(stored)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    for row, (entropy, nll) in enumerate(zip(*trainer._mean_scores(stored)[:2], strict=True)):
        prompt = tokenizer()(trainer.train_dataset[int(stored.question[row])]["prompt"])["input_ids"]
        response = torch.from_numpy(stored.token[stored.at(row)]).long()
        with torch.no_grad():
            logits = plain(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        full = logits.log_softmax(-1)
        # Plain torch in float32 is off by a few 1e-6 nats per token here.
        assert entropy == pytest.approx(float(-(full.exp() * full).sum(-1).mean()), abs=2e-5)
        assert nll == pytest.approx(float(-full.gather(1, response[:, None]).mean()), abs=2e-5)
        sampled = (logits / 0.5).log_softmax(-1).gather(1, response[:, None])[:, 0]
        np.testing.assert_allclose(stored.old_log_prob[stored.at(row)], sampled.numpy(), atol=5e-5)


@pytest.mark.parametrize("keep", [False, True])
def test_clipping_is_off_in_steps_that_replay_and_only_there(
    run: tuple[Recorded, list[Any]], tmp_path: Path, model: Path, keep: bool
) -> None:
    trainer, clips = with_clips(trainer_of(tmp_path, model, max_steps=4, clip_with_replay=True)) if keep else run
    replayed = [log["experience/replayed"] > 0 for log in trainer.state.log_history[:4]]
    assert replayed[0] is False
    assert any(replayed)
    assert [clip is None for clip in clips[:4]] == [of_step and not keep for of_step in replayed]


def test_rewards_that_peak_below_one(tmp_path: Path, model: Path) -> None:
    trainer = trainer_of(tmp_path, model, max_steps=2, success=0.9)
    trainer.reward_funcs = [lambda **kwargs: [0.9 * one for one in reward(**kwargs)]]
    trainer.train()
    assert len(trainer.replay.memory) > 0


@pytest.mark.parametrize("changes", [{}, {"compose": "beside", "admit": "all", "advantage": "stored"}], ids=str)
def test_replayed_rows_have_no_importance_weight_of_the_sampler(
    tmp_path: Path, model: Path, changes: dict[str, Any]
) -> None:
    trainer = trainer_of(tmp_path, model, max_steps=3, **changes)
    trainer.log_prob = -5.0
    trainer.train()
    for output in trainer.outputs:
        assert torch.equal(output["importance_sampling_ratio"][:, 0] == 1, output["replayed"])
    assert output["replayed"].any()
    assert np.isfinite(trainer.state.log_history[2]["loss"])


def test_loss_of_a_mixed_batch_is_the_formula_of_the_paper(run: tuple[Recorded, list[Any]]) -> None:
    trainer, _ = run
    inputs = next(output for output in reversed(trainer.outputs) if output["replayed"].any())
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


def test_a_checkpoint_of_another_trainer_is_refused(
    run: tuple[Recorded, list[Any]], tmp_path: Path, model: Path
) -> None:
    checkpoint = Path(shutil.copytree(Path(run[0].args.output_dir) / "checkpoint-2", tmp_path / "checkpoint-2"))
    (checkpoint / EXPERIENCE / STATE).unlink()
    with pytest.raises(ValueError, match="holds no experience"):
        trainer_of(tmp_path, model, max_steps=4).train(resume_from_checkpoint=str(checkpoint))


def test_training_stops_when_every_question_is_solved(tmp_path: Path, model: Path) -> None:
    trainer = trainer_of(tmp_path, model, max_steps=50)
    trainer.reward_funcs = [lambda completions, **_: [1.0] * len(completions)]
    trainer.train()
    assert trainer.state.global_step == 3  # 12 questions, 4 at a time
    assert trainer.replay.memory.retired.all()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"beta": 0.1}, r"beta=0\.1"),
        ({"replay_beta": 0.0}, "replay_beta"),
        ({"generation_kwargs": {"top_k": 5}}, "top_k=5: "),
        ({"repetition_penalty": 1.1}, r"repetition_penalty=1\.1: "),
        ({"shuffle_dataset": False}, "shuffle_dataset=False: "),
        ({"ratio": "half", "mu": -1}, r"ratio: .*\(got 'half'\); mu: .*\(got -1\)"),
        ({"replay_beta": "x"}, "replay_beta: .*got 'x'"),
        ({"loss_type": "cispo"}, "loss_type='cispo': "),
        ({"top_p": 0.9}, r"top_p=0\.9: "),
        ({"epsilon": "wide"}, "epsilon: .*got 'wide'"),
        ({"kernel_memory_gib": 0.1}, "kernel_memory_gib: .*0\\.25"),
        ({"compose": "besides"}, "unknown compose function 'besides'"),
        ({"expire": ["age"]}, "needs its limit"),
        ({"replay_beta": None}, "replay_beta: expected a number .* weigh='ratio'"),
        ({"admit": "solutions"}, "admit='solutions': .* use admit='successes'"),
        ({"compose": "beside", "scale_rewards": "batch"}, "scale_rewards='batch': .*compose='beside'"),
        ({"advantage": "stored", "multi_objective_aggregation": "normalize_then_sum"}, "_sum': .* advantage='stored'"),
        ({"refills": -1}, r"refills: .*\(got -1\)"),
        ({"refills": 2, "compose": "in_place", "admit": "with_advantage"}, "compose='in_place' puts stored groups"),
        ({"refills": 2, "scale_rewards": "batch"}, r"scale_rewards='batch': divides .* refills=2"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_in_a_line(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    """By the configuration, before TRL does anything with it."""
    with pytest.raises(ConfigError, match=named) as told:
        ExGRPOConfig(**options(tmp_path, max_steps=1) | {"num_generations": 1} | changes)  # TRL: at least 2
    assert len(str(told.value).splitlines()) == 1


def test_other_arguments_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    with pytest.raises(TypeError, match="expected an ExGRPOConfig"):
        grpo(ExGRPOTrainer, tmp_path, model)
    config = ExGRPOConfig(**options(tmp_path, max_steps=1))
    config.loss_type = "cispo"  # after its own check
    with pytest.raises(ConfigError, match="loss_type='cispo'"):
        ExGRPOTrainer("no/such/model", reward, config, questions())
    with pytest.raises(ValueError, match="lower generation_batch_size"):
        trainer_of(tmp_path, model, per_device_train_batch_size=64)
    with pytest.raises(ValueError, match=r"temperature=0\.5: "):
        trainer_of(tmp_path, model, generation_kwargs='{"temperature": 0.5}')  # as a command line has it
    stream = IterableDataset.from_generator(lambda: iter(questions()))
    config = ExGRPOConfig(**options(tmp_path, max_steps=1))
    with pytest.raises(TypeError, match=r"Dataset\.from_generator"):
        ExGRPOTrainer(str(model), reward, config, stream, processing_class=tokenizer())
    with pytest.raises(ValueError, match="tools: compose='mixed' puts stored answers in the places of fresh ones"):
        ExGRPOTrainer(str(model), reward, config, questions(), processing_class=tokenizer(), tools=[len])
    trainer = trainer_of(tmp_path, model)
    trainer.model.train()
    with pytest.raises(ValueError, match="replay supports only text"):  # images within messages, or from tools
        trainer._generate_single_turn([[5]], [["an image"]], {}, 1)


ROW = {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": "1 + 1"}],
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"index": 0, "split": "train"},
}


def test_a_run_in_trl_on_repeated_rows_is_that_on_each_row_once(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once = questions().add_column("index", list(range(QUESTIONS)))
    often = concatenate_datasets([once, *(once.map(lambda row: {"index": row["index"] + 100}) for _ in range(4))])
    runs = [
        exgrpo(tmp_path / str(len(data)), model, data=data, num_train_epochs=2, refills=1) for data in (once, often)
    ]
    assert capsys.readouterr().out == f"train_dataset: {5 * QUESTIONS} rows, {QUESTIONS} questions\n"
    for trainer in runs:
        trainer.train()
    histories = [trainer.state.log_history for trainer in runs]
    assert len(histories[0]) > 4
    assert histories[0][-2]["experience/replayed"] > 0
    for log, other in zip(*histories, strict=True):  # where tensors begin in memory changes the last bit of their sums
        measured = {name for name in log if "time" in name or "second" in name}
        for name in log.keys() - measured:
            assert log[name] == pytest.approx(other[name], rel=1e-5, abs=1e-6), name
    tables = [trainer.replay.memory.table.column("question").tolist() for trainer in runs]
    assert tables[0] == tables[1]
    with pytest.raises(ValueError, match=r"takes 16 different questions and there are 12 in 60 rows"):
        exgrpo(tmp_path, model, data=often, per_device_train_batch_size=64)


@pytest.mark.parametrize("whole", [False, True], ids=["rows", "data set"])
def test_rows_are_one_question_unless_a_column_differs_that_may_decide_on_a_reward(whole: bool) -> None:
    rows = [
        ROW,
        ROW | {"extra_info": {"index": 7, "split": "train"}},
        ROW | {"reward_model": {"ground_truth": "3", "style": "rule"}},
        ROW | {"extra_info": {"index": 0, "split": "test"}},
        ROW | {"prompt": [{"role": "system", "content": "Be brief."}, *ROW["prompt"]]},
        ROW,
    ]
    data = Dataset.from_list(rows) if whole else rows
    assert distinct_rows(data) == [0, 2, 3, 4]
    assert distinct_rows(data, ()) == [0, 1, 2, 3, 4]
