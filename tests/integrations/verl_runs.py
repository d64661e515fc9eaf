"""verl's own command on this CPU, and what its steps are compared with.

That is the project's loss in float64, advantages by their formula, and the `Replay` of the project's own trainer on the
numbers that verl's has written.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from exgrpo.integrations.trl_replay import load_replay
from exgrpo.integrations.verl_method import configure
from exgrpo.kernels import reference
from exgrpo.train.common.distributed import ALONE
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.config.options import Config
from exgrpo.train.data.questions import Question
from exgrpo.train.replay import Replay, numbers_of
from exgrpo.train.run.start_experience import Beginning, Encoding, start_experience
from tests.integrations.verl_task import write_task
from tests.programs import printed
from tests.train.batches import Row, stored_rows
from tests.train.files import write_rows
from tests.train.warm import ROOT

ANSWERS, QUESTIONS, LONGEST = 4, 4, 8
"""K and B, and the most tokens of an answer."""


class Options(dict):
    """The parts of verl's configuration that these tests use, with access by attributes."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


def of_verl(**changes: Any) -> Options:
    """The defaults of verl, but for the estimator of advantages."""

    def node(values: Any) -> Any:
        return Options({name: node(value) for name, value in values.items()}) if isinstance(values, dict) else values

    actor = {"policy_loss": {"loss_mode": "vanilla"}, "ppo_mini_batch_size": 2, "ppo_epochs": 1}
    rollout = {"n": 8, "temperature": 1.0, "top_p": 1, "top_k": -1}
    values = {"actor_rollout_ref": {"actor": actor, "rollout": rollout}, "critic": {"enable": None}}
    values |= {"algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False}, "trainer": {"v1": {"sampler": {}}}}
    config = node({**values, "data": {"train_batch_size": 4, "max_response_length": 100}})
    for key, value in changes.items():
        *sections, name = key.split("__")
        target = config
        for section in sections:
            target = target[section]
        target[name] = node(value)
    return config


ENVIRONMENT = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", "HYDRA_FULL_ERROR": "1"}
ENVIRONMENT |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "tests.integrations.verl_cpu"}
ENVIRONMENT["VERL_ENGINE_DEVICE"] = "cuda"  # the engines that are registered for it


def train(
    python: Path,
    folder: Path,
    *options: str,
    workers: int = 1,
    steps: int = 3,
    reward: str = "float(len(solution_str) % 2)",
    copies: int = 1,
) -> dict[int, dict[str, Any]]:
    """Train by verl's own command, and what each step has written; see `verl_cpu.Traced`."""
    folder.mkdir(exist_ok=True)
    task = write_task(folder / "task", reward, copies)
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    storage = "transfer_queue.backend.SimpleStorage"
    command = [
        *(python, "-m", "verl.trainer.main_ppo"),
        *(f"data.train_files={task}/questions.parquet", f"data.val_files={task}/questions.parquet"),
        *(f"data.train_batch_size={QUESTIONS}", "data.max_prompt_length=16", f"data.max_response_length={LONGEST}"),
        *("data.dataloader_num_workers=0", "data.filter_overlong_prompts=False"),
        *(f"actor_rollout_ref.model.path={task}/model", "actor_rollout_ref.model.use_remove_padding=False"),
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        *(f"{actor}.strategy=fsdp2", f"{actor}.fsdp_config.dtype=float32", f"{actor}.use_torch_compile=False"),
        f"+{actor}.fsdp_config.mixed_precision.param_dtype=fp32",
        *(f"{actor}.ppo_mini_batch_size={QUESTIONS}", f"{actor}.ppo_micro_batch_size_per_gpu=4"),
        *(f"{rollout}.name=cpu", f"{rollout}.n={ANSWERS}", f"{rollout}.tensor_model_parallel_size=1"),
        *(f"{rollout}.log_prob_micro_batch_size_per_gpu=4", f"{rollout}.agent.num_workers=1"),
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes=16",
        *("algorithm.adv_estimator=grpo", "reward.num_workers=1"),
        f"reward.custom_reward_function.path={task}/reward.py",
        *("trainer.v1.trainer_mode=traced", "trainer.device=cpu", "trainer.nnodes=1", "trainer.logger=[console]"),
        *(f"trainer.n_gpus_per_node={workers}", "trainer.val_before_train=False", "trainer.test_freq=-1"),
        *(f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={folder}/checkpoints"),
        *("trainer.total_epochs=10", f"{storage}.num_data_storage_units=1", f"{storage}.total_storage_size=1000"),
        *("ray_kwargs.ray_init.num_cpus=16", f"+ray_kwargs.ray_init.num_gpus={workers}"),
        *options,
    ]
    environment = {**os.environ, **ENVIRONMENT, "EXGRPO_TRACE": str(folder)}
    printed(*command, cwd=folder, env=environment, timeout=1200)
    told = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}
    for step, of_step in told.items():
        if (path := folder / f"{step}.npz").exists():
            with np.load(path, allow_pickle=True) as saved:
                of_step["columns"] = dict(saved)
    return told


def flat(values: Any) -> np.ndarray:
    return np.concatenate([np.asarray(row, np.float64) for row in values])


def answers_only(columns: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return the log-probs of each row's response; verl has them for all tokens, one place earlier."""
    pairs = zip(columns["log_probs"], columns["responses"], strict=True)
    return [np.asarray(log_probs)[-len(answer) - 1 : -1] for log_probs, answer in pairs]


def check_step(of_step: dict[str, Any], *, term: str = "shaped") -> None:
    """Ratios, advantages and the loss of a step."""
    columns = of_step["columns"]
    replayed, padding = columns["replayed"], columns["padding"]
    present, old = answers_only(columns), columns["old_log_probs"]
    for row in np.flatnonzero(~replayed & ~padding):  # fresh: their ratios are 1, but for how rows are padded
        np.testing.assert_allclose(present[row], old[row], rtol=0, atol=1e-6)
    reward = np.array([sum(scores) for scores in columns["rm_scores"]])
    for uid in set(columns["uid"][~padding].tolist()):
        rows = np.flatnonzero(columns["uid"] == uid)
        assert len(rows) == ANSWERS
        for row in rows:
            np.testing.assert_allclose(columns["advantages"][row], reward[row] - reward[rows].mean(), atol=1e-6)
    check_loss(of_step, clip=(0.2, 0.2) if columns["clip"] else None, beta=0.1 if term == "shaped" else None)
    assert of_step["metrics"]["experience/replayed"] == replayed.sum()


def check_loss(
    of_step: dict[str, Any], *, clip: tuple[float, float] | None, beta: float | None, by_token: bool = False
) -> None:
    columns = of_step["columns"]
    present, mask = flat(answers_only(columns)), torch.from_numpy(flat(columns["response_mask"]) > 0)
    weighed = flat(columns["advantages"]) * flat(columns["weights"])
    repeat = [len(answer) for answer in columns["responses"]]
    loss = reference.policy_loss(
        *(torch.from_numpy(values) for values in (present, flat(columns["old_log_probs"]), weighed)),
        replayed=torch.from_numpy(np.repeat(columns["replayed"], repeat)),
        clip=clip,
        beta=beta,
        normalizer=float(mask.sum()) if by_token else float(columns["rows"]) * LONGEST,
        mask=mask,
    ).loss.item()
    assert of_step["metrics"]["actor/pg_loss"] == pytest.approx(loss, abs=1e-6)


OF_FRESH = ("length", "reward", "key", "finished", "token", "old_log_prob")


def check_replay(told: dict[int, dict[str, Any]], options: Config, replay: Replay) -> None:
    """Compare each step's plan, further questions, stored answers and trained rows with `exgrpo train`."""
    questions = options.questions
    for step, of_step in sorted(told.items()):
        graded = {name: np.array(values) for name, values in of_step["graded"].items()}

        def fresh(first: int, end: int, step: int = step, graded: dict[str, np.ndarray] = graded) -> StepBatch:
            """The graded answers of some groups."""
            mask = ~graded["replayed"] & (first <= graded["group"]) & (graded["group"] < end)
            masks = {"token": np.repeat(mask, graded["length"]), "old_log_prob": np.repeat(mask, graded["length"])}
            columns = {name: graded[name][masks.get(name, mask)] for name in OF_FRESH}
            nothing = dict.fromkeys(("replayed", "replays", "old_log_probs_from", "penalty"), np.zeros(mask.sum()))
            group, own = graded["group"][mask] - first, np.ones(len(columns["token"]))
            length, steps = columns.pop("length"), np.full(mask.sum(), step)
            return StepBatch(
                graded["question"][first:end], group, length, **columns, **nothing, response_mask=own, step=steps
            )

        planned = replay.plan(questions, step)
        batch = fresh(0, len(planned)).append_rows(
            replay.select(planned, lambda candidates: pytest.fail("nothing scores"))
        )
        for _ in range(options.rollout.refills):
            missing = questions - int(batch.has_signal.sum())
            more = replay.more(missing, step, batch.question.tolist()) if missing > 0 else []
            if more:
                batch = batch.append_groups(fresh(len(planned), len(planned) + len(more)))
            planned += more
        assert numbers_of(planned, replay.memory.table.rows()) == of_step["plan"]
        replay.store(batch, step)
        among = np.arange(batch.groups)
        if options.rollout.refills and batch.has_signal.any():
            among = np.flatnonzero(batch.has_signal)[:questions]
        batch = replay.settle(batch, questions, step, among=among)
        for name in ("trained", "question", "group", "replayed", "reward", "key", "token"):
            np.testing.assert_array_equal(getattr(batch, name), graded[name], err_msg=f"{name} of step {step}")


def options_of(recipe: str, questions: int = QUESTIONS, **given: Any) -> Config:
    """Return the options in the command of `train`."""
    config = of_verl(
        data__train_batch_size=questions, data__max_response_length=LONGEST, actor_rollout_ref__rollout__n=ANSWERS
    )
    config.actor_rollout_ref.actor.ppo_mini_batch_size = questions
    return configure(config, {"recipe": recipe, **given})


def replay_of(options: Config, questions: int = 8) -> Replay:
    return Replay(options.method, questions, options.seed)


def stored(folder: Path, step: int, options: Config) -> list[Row]:
    """Return the experience in a checkpoint."""
    replay = replay_of(options)
    load_replay(folder / "checkpoints" / f"global_step_{step}" / "experience", replay)
    return stored_rows(replay.memory.table.stored())


def check_choice(of_step: dict[str, Any], model: LlamaForCausalLM) -> int:
    """Each replayed answer has the lowest entropy of its candidates; how many there were to choose from."""
    columns, scored = of_step["columns"], of_step["scored"]
    for group, uid in enumerate(of_step["uids"]):
        candidates = [(entropy, answer) for of_group, answer, entropy in scored if of_group == group]
        (rows,) = np.nonzero((columns["uid"] == uid) & columns["replayed"])
        assert len(rows) == bool(candidates)
        for row in rows:
            assert list(columns["responses"][row]) == min(candidates)[1]
            for entropy, answer in candidates:
                ids = torch.tensor([[*columns["prompts"][row], *answer]])
                with torch.no_grad():
                    log_probs = model(ids).logits[0, -len(answer) - 1 : -1].log_softmax(-1)
                # A learning rate of 1e-6 leaves the model almost as it was.
                assert entropy == pytest.approx(-(log_probs.exp() * log_probs).sum(-1).mean().item(), abs=1e-3)
    return len(scored)


def begun(options: Config, folder: Path) -> tuple[Replay, list[Question]]:
    """A replay that begins as a run of `exgrpo train` does, and its questions."""
    tokenizer, replay = AutoTokenizer.from_pretrained(folder / "task" / "model"), replay_of(options)
    texts = [f"{a}+{b}=" for a in range(4) for b in range(2)]
    prompts = [tokenizer(f"<s>{text}</s><s>", add_special_tokens=False)["input_ids"] for text in texts]
    questions = [Question(i, tuple(prompts[i]), text, "", "sums") for i, text in enumerate(texts)]
    start_experience(
        Beginning(
            *(questions, replay, LONGEST, "", ALONE),
            grade=lambda answers: [(len(answer.text) % 2, 0) for answer in answers],
            score=lambda batch: np.zeros(len(batch.token), np.float32),
        ),
        Encoding(tokenizer, (tokenizer.eos_token_id,), len(tokenizer)),
    )
    return replay, questions


EXPERT = [("0+0=", "0"), ("0+1=", "123"), ("1+0=", "77"), ("2+1=", "3"), ("9+9=", "3")]


def write_expert(path: Path) -> str:
    return write_rows(path, [{"question": question, "response": response} for question, response in EXPERT])
