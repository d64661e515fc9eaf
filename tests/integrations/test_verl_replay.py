"""Replay in verl's trainer: its options; and, with --long, verl's own command on this CPU.

The oracles are the project's loss in float64, and the advantages by their formula.
"""

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from exgrpo.integrations.verl_method import METHODS, PACKAGES, UNCLIPPED, configure
from exgrpo.kernels import reference
from exgrpo.train.common.errors import ConfigError
from tests.compatibility.promises import ROOT
from tests.compatibility.trial import NotReached, run
from tests.integrations.verl_task import write_task

ANSWERS, QUESTIONS, LONGEST = 4, 4, 8
"""K and B, and the most tokens of an answer."""
BESIDE_VERL = ("torch==2.13.0", "pyzmq", "msgspec", "cachetools", "fastapi", "uvicorn")
NOT_IN_VERL = {
    "dynamic_sampling": "rollout.refills",
    "luffy": "experience.start_log_prob",
    "oapl": "objective.surrogate='oapl'",
    "redr": "experience.admit='solutions'",
    "rlep": "experience.admit='nothing'",
}
"""Recipes that are refused, and the option that is why."""


class Options(dict):
    """What these tests need of verl's configuration, which is read and set by attributes."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


def of_verl(**changes: Any) -> Options:
    """The defaults of verl, but for the estimator of advantages."""

    def node(values: Any) -> Any:
        return Options({name: node(value) for name, value in values.items()}) if isinstance(values, dict) else values

    config = node(
        {
            "actor_rollout_ref": {
                "actor": {"policy_loss": {"loss_mode": "vanilla"}, "ppo_mini_batch_size": 2, "ppo_epochs": 1},
                "rollout": {"n": 8, "temperature": 1.0, "top_p": 1, "top_k": -1},
            },
            "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
            "critic": {"enable": None},
            "data": {"train_batch_size": 4, "max_response_length": 100},
            "trainer": {"v1": {"sampler": {}}},
        }
    )
    for key, value in changes.items():
        *sections, name = key.split("__")
        target = config
        for section in sections:
            target = target[section]
        target[name] = node(value)
    return config


def refusal(given: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        configure(of_verl(**changes), given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_defaults_are_the_papers() -> None:
    config = of_verl()
    options = configure(config, {})
    actor = config.actor_rollout_ref.actor
    assert (options.experience.compose, options.objective.weigh) == ("mixed", "shaped")
    assert (options.questions, options.rollout.samples, options.optimizer.minibatches) == (4, 8, 2)
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.entropy_coeff) == (0.2, 0.2, 0.001)
    assert (actor.loss_agg_mode, actor.loss_scale_factor) == ("seq-mean-token-sum-norm", 100)
    assert config.algorithm.norm_adv_by_std_in_grpo is False
    assert config.trainer.v1.trainer_mode == "sync"


@pytest.mark.parametrize("name", sorted(path.stem for path in METHODS.glob("*.yaml")))
def test_a_recipe_of_a_method_sets_the_options_of_verl(name: str) -> None:
    if name in NOT_IN_VERL:
        assert NOT_IN_VERL[name] in refusal({"recipe": name})
        return
    config = of_verl()
    options = configure(config, {"recipe": name})
    by_path = configure(of_verl(), {"recipe": [str(METHODS / f"{name}.yaml")]})
    assert options == by_path
    low, high = options.objective.clip or (UNCLIPPED["clip_ratio_low"], UNCLIPPED["clip_ratio_high"])
    actor = config.actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (low, high)
    assert config.algorithm.norm_adv_by_std_in_grpo == options.objective.scale_by_std
    assert actor.entropy_coeff == options.objective.entropy_coef


def test_options_beside_a_recipe_win() -> None:
    given = {
        "recipe": "rlep",
        "experience": {"admit": "successes", "ratio": 0.25},
        "reward": {"success": 0.5},
        "seed": 3,
    }
    options = configure(of_verl(), given)
    assert (options.experience.ratio, options.reward.success, options.seed) == (0.25, 0.5, 3)
    assert options.experience.compose == "appended"


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("algorithm__adv_estimator", "gae", "algorithm.adv_estimator=gae"),
        ("algorithm__use_kl_in_reward", True, "algorithm.use_kl_in_reward"),
        ("algorithm__filter_groups", {"enable": True}, "algorithm.filter_groups.enable"),
        ("algorithm__rollout_correction", {"bypass_mode": True}, "rollout_correction.bypass_mode"),
        ("actor_rollout_ref__actor__policy_loss", {"loss_mode": "gspo"}, "loss_mode=gspo"),
        ("actor_rollout_ref__rollout__top_p", 0.9, "top_p=0.9"),
        ("actor_rollout_ref__rollout__top_k", 20, "top_k=20"),
        ("critic__enable", True, "critic.enable"),
        ("data__gen_batch_size", 1, "data.gen_batch_size=1"),
        ("distillation", {"enabled": True}, "distillation.enabled"),
    ],
)
def test_an_option_of_verl_that_excludes_replay_is_refused_by_name(option: str, value: Any, named: str) -> None:
    assert named in refusal({}, **{option: value})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"recipe": "exgpro"}, "exgpro: no such recipe"),
        ({"experience": {"ratoi": 1}}, "did you mean 'experience.ratio'"),
        ({"experience": {"start": "answers.jsonl"}}, "experience.start"),
        ({"experience": {"admit": "solutions"}}, "experience.admit='solutions'"),
        ({"experience": {"compose": "nowhere:at_all"}}, "nowhere"),
        ({"objective": {"kl_coef": 0.1}}, "use_kl_loss"),
        ({"objective": {"surrogate": "nowhere:at_all"}}, "objective.surrogate"),
        ({"rollout": {"samples": 8}}, "rollout.samples"),
    ],
)
def test_an_option_of_replay_that_verl_cannot_have_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    assert named in refusal(given)


@pytest.fixture(scope="session")
def python() -> Path:
    """The Python of an environment with verl, which is made once and kept in the user's cache."""
    wanted = [*PACKAGES, *BESIDE_VERL, "numpy", "pytest"]
    if sys.version_info >= (3, 13):
        pytest.skip("verl is for Python below 3.13")
    mark = hashlib.sha256(f"{sys.version} {wanted}".encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "exgrpo" / f"verl_{mark}"
    there, whole = cache / "bin" / "python", cache / "whole"
    if not whole.exists():
        shutil.rmtree(cache, ignore_errors=True)
        try:
            run([sys.executable, "-m", "venv", str(cache)])
            run([str(there), "-m", "pip", "install", "--quiet", *wanted])
        except NotReached as error:
            pytest.skip(f"an environment with verl cannot be made: {error}")
        whole.touch()
    return there


ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # the engines that are registered for it
    "VERL_USE_EXTERNAL_MODULES": "tests.integrations.verl_cpu",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HYDRA_FULL_ERROR": "1",
}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_loss_is_the_projects_in_float64(python: Path) -> None:
    environment = {**os.environ, **ENVIRONMENT, "VERL_USE_EXTERNAL_MODULES": ""}
    done = subprocess.run(
        [python, "-m", "tests.integrations.verl_loss"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    cases = json.loads(done.stdout.splitlines()[-1])
    assert len(cases) == 24
    for case in cases:
        assert case["error"] < 1e-5, case


def train(
    python: Path, folder: Path, *options: str, workers: int = 1, steps: int = 3, reward: str = "len(solution_str) % 2"
) -> dict[int, dict[str, Any]]:
    """Train by verl's own command, and what each step has written; see `verl_cpu.Traced`."""
    folder.mkdir(exist_ok=True)
    task = write_task(folder / "task", reward)
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
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}
    for step, of_step in told.items():
        if (path := folder / f"{step}.npz").exists():
            with np.load(path, allow_pickle=True) as saved:
                of_step["columns"] = dict(saved)
    return told


def flat(values: Any) -> np.ndarray:
    return np.concatenate([np.asarray(row, np.float64) for row in values])


def answers_only(columns: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Of each row, the log-probs of its answer's tokens; verl has them of all tokens, one place earlier."""
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
    repeat = [len(answer) for answer in columns["responses"]]
    loss = reference.policy_loss(
        *(torch.from_numpy(flat(values)) for values in (present, old, columns["advantages"])),
        replayed=torch.from_numpy(np.repeat(replayed, repeat)),
        clip=(0.2, 0.2) if columns["clip"] else None,
        beta=0.1 if term == "shaped" else None,
        normalizer=float(columns["rows"]) * LONGEST,
        mask=torch.from_numpy(flat(columns["response_mask"]) > 0),
    ).loss.item()
    metrics = of_step["metrics"]
    assert metrics["actor/pg_loss"] + metrics["actor/replay_loss"] == pytest.approx(loss, abs=1e-6)
    assert metrics["experience/replayed"] == replayed.sum()


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


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_two_workers_train_and_a_resumed_run_has_the_same_plan(python: Path, tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    options = ("+exgrpo.recipe=exgrpo", "+exgrpo.experience.start_pass_rate=0", "trainer.save_freq=2")
    told = train(python, folder, *options, workers=2, steps=4)
    assert sorted(told) == [1, 2, 3, 4]
    model = LlamaForCausalLM.from_pretrained(folder / "task" / "model").double()
    candidates = 0
    for of_step in told.values():
        check_step(of_step)
        candidates += check_choice(of_step, model)
    assert candidates > sum(of_step["columns"]["replayed"].sum() for of_step in told.values())
    assert sum(of_step["columns"]["replayed"].sum() for of_step in told.values()) > 0
    assert any(not of_step["columns"]["clip"] for of_step in told.values())
    resumed = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}/checkpoints/global_step_2")
    again = train(python, tmp_path / "again", *options, *resumed, workers=2, steps=3)
    assert sorted(again) == [3]
    assert again[3]["plan"] == told[3]["plan"]
    check_step(again[3])


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_method_by_functions_of_ones_own_and_stored_answers_alone(python: Path, tmp_path: Path) -> None:
    options = (
        *("+exgrpo.recipe=rollout_level", "+exgrpo.experience.start_pass_rate=0"),
        "+exgrpo.objective.weigh=tests.integrations.verl_own:doubled",
    )
    told = train(python, tmp_path / "own", *options, steps=3)
    late = told[3]["columns"]
    assert late["replayed"].sum() == told[3]["metrics"]["experience/replayed"] > 0
    present = answers_only(late)
    for row in np.flatnonzero(late["replayed"]):
        uids = np.flatnonzero(late["uid"] == late["uid"][row])
        assert uids.tolist() == [row]  # a group by itself, with the advantage of the group that it was written in
        assert not math.isclose(late["advantages"][row][0], 0)
        assert np.isinf(late["old_log_probs"][row]).all()  # own: as if the present policy had written it
        assert len(present[row]) == len(late["advantages"][row])


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_replay_starts_late_questions_retire_and_a_run_ends_once_all_are_solved(python: Path, tmp_path: Path) -> None:
    told = train(python, tmp_path, "trainer.save_freq=100", steps=20, reward="1")
    numbers = [told[step]["metrics"] for step in sorted(told)]
    # Eight questions, four in a step; what opens with the first step counts from the second one on.
    assert [step["experience/retired"] for step in numbers] == [4, 8]
    assert [step["experience/replay_open"] for step in numbers] == [1, 1]
    assert [step["experience/buffer_trajectories"] for step in numbers] == [0, 0]
    assert sorted(question for step in told.values() for question, *_ in step["plan"]) == list(range(8))
    assert (tmp_path / "checkpoints" / "global_step_2" / "experience" / "state.json").is_file()
