"""Replay in verl's trainer: with --long, verl's own command on this CPU, in an environment of its own."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from exgrpo.integrations.verl_method import PACKAGES, solution_keys
from tests.integrations.verl_runs import (
    ENVIRONMENT,
    EXPERT,
    answers_only,
    begun,
    check_choice,
    check_loss,
    check_replay,
    check_step,
    options_of,
    replay_of,
    stored,
    train,
    write_expert,
)

pytestmark = pytest.mark.timeout(3600)
UNCONSTRAINED = {"PIP_CONSTRAINT": os.devnull}
"""A machine's own constraints may exclude what verl needs."""
BESIDE_VERL = ("torch==2.13.0", "pyzmq", "msgspec", "cachetools", "fastapi", "uvicorn")


def is_unreachable(errors: str) -> bool:
    """True if pip could not ask for packages; False if it did, and no versions fit together."""
    return "after connection broken by" in errors and "ResolutionImpossible" not in errors


def test_without_a_network_verls_tests_are_skipped_and_a_conflict_of_versions_fails(tmp_path: Path) -> None:
    wheels = {"first": "common==1", "second": "common==2", "common": ""}
    for name, needed in wheels.items():
        with zipfile.ZipFile(tmp_path / f"{name}-1-py3-none-any.whl", "w") as wheel:
            require = f"Requires-Dist: {needed}\n" * bool(needed)
            wheel.writestr(
                f"{name}-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{require}"
            )
            wheel.writestr(f"{name}-1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{name}-1.dist-info/RECORD", "")

    def errors(*names: str) -> str:
        offline = ("--isolated", "--retries=1", "--index-url=http://127.0.0.1:9", f"--find-links={tmp_path}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", *offline, *names]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode
        return done.stderr

    assert is_unreachable(errors("elsewhere"))
    assert not is_unreachable(errors("first", "second"))


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
        for command in ([sys.executable, "-m", "venv", cache], [there, "-m", "pip", "install", "--quiet", *wanted]):
            done = subprocess.run(command, env={**os.environ, **UNCONSTRAINED}, capture_output=True, text=True)
            if is_unreachable(done.stderr):
                pytest.skip(f"an environment with verl cannot be made without a network: {done.stderr[-300:]}")
            assert done.returncode == 0, done.stderr[-3000:]
        whole.touch()
    return there


@pytest.mark.long
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


@pytest.mark.long
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
def test_replay_starts_late_questions_retire_and_a_run_ends_once_all_are_solved(python: Path, tmp_path: Path) -> None:
    # Rows that repeat a question are that question.
    told = train(python, tmp_path, "trainer.save_freq=100", steps=20, reward="1", copies=5)
    numbers = [told[step]["metrics"] for step in sorted(told)]
    # Eight questions, four in a step; what opens with the first step counts from the second one on.
    assert [step["experience/retired"] for step in numbers] == [4, 8]
    assert [step["experience/replay_open"] for step in numbers] == [1, 1]
    assert [step["experience/buffer_trajectories"] for step in numbers] == [0, 0]
    assert sorted(question for step in told.values() for question, *_ in step["plan"]) == list(range(8))
    assert (tmp_path / "checkpoints" / "global_step_2" / "experience" / "state.json").is_file()


@pytest.mark.long
def test_a_run_begins_with_answers_of_files_and_goes_on_exactly(python: Path, tmp_path: Path) -> None:
    source = write_expert(tmp_path / "expert.jsonl")
    given = ("+exgrpo.recipe=rlep", f"+exgrpo.experience.start={source}", "trainer.save_freq=1")
    folder, options = tmp_path / "whole", options_of("rlep", experience={"start": source})
    told = train(python, folder, *given)
    replay, questions = begun(options, folder)
    check_replay(told, options, replay)
    model = LlamaForCausalLM.from_pretrained(folder / "task" / "model").double()
    found = stored(folder, 1, options)
    assert [questions[one.question].text for one in found] == [question for question, _ in EXPERT[:4]]
    for one, (_, text) in zip(found, EXPERT, strict=False):
        assert (one.reward, one.response[-1], len(one.response)) == (len(text) % 2, 2, len(text) + 1)
        ids = torch.tensor([[*questions[one.question].prompt, *one.response.tolist()]])
        with torch.no_grad():
            log_probs = model(ids).logits[0, -len(one.response) - 1 : -1].log_softmax(-1)
        expected = log_probs.gather(1, ids[0, -len(one.response) :, None])[:, 0]
        np.testing.assert_allclose(one.log_prob, expected.numpy(), atol=1e-5)
    for of_step in told.values():
        assert of_step["columns"]["replayed"].any()
        check_loss(of_step, clip=(0.2, 0.28), beta=None, by_token=True)
    resumed = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}/checkpoints/global_step_2")
    again = train(python, tmp_path / "again", *given, *resumed)
    assert sorted(again) == [3]
    assert again[3]["plan"] == told[3]["plan"]
    for one, other in zip(stored(tmp_path / "again", 3, options), stored(folder, 3, options), strict=True):
        np.testing.assert_array_equal(one.log_prob, other.log_prob)


@pytest.mark.long
def test_further_questions_are_asked_until_enough_groups_have_a_gradient(python: Path, tmp_path: Path) -> None:
    few = ("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
    told = train(python, tmp_path, "+exgrpo.recipe=dynamic_sampling", *few, reward="float(solution_str[:1] == '1')")
    options = options_of("dynamic_sampling", 2)
    check_replay(told, options, replay_of(options))
    assert sum(of_step["metrics"]["experience/refilled"] for of_step in told.values()) > 0
    updated = [of_step for of_step in told.values() if "actor/pg_loss" in of_step["metrics"]]
    assert 0 < len(updated) < len(told)  # all answers of a step may be wrong, and nothing is learnt from it
    for of_step in updated:
        check_loss(of_step, clip=(0.2, 0.28), beta=None, by_token=True)


@pytest.mark.long
def test_a_regression_learns_from_stored_answers_without_ratios(python: Path, tmp_path: Path) -> None:
    told = train(python, tmp_path, "+exgrpo.recipe=oapl")
    options = options_of("oapl")
    check_replay(told, options, replay_of(options))
    assert told[3]["columns"]["replayed"].any()
    for of_step in told.values():
        columns, total = of_step["columns"], 0.0
        rows = zip(answers_only(columns), columns["old_log_probs"], columns["advantages"], strict=True)
        for row, (present, old, advantage) in enumerate(rows):
            if not columns["padding"][row]:
                log_ratio = np.sum(np.asarray(present, np.float64) - np.asarray(old))
                total += (options.objective.beta2 * log_ratio - advantage[0]) ** 2
        assert of_step["metrics"]["actor/pg_loss"] == pytest.approx(total / float(columns["rows"]), abs=1e-5)


@pytest.mark.long
def test_one_success_of_each_solution_is_kept(python: Path, tmp_path: Path) -> None:
    reward = "{'score': float(len(solution_str) % 2), 'key': solution_str[:1]}"
    told = train(python, tmp_path, "+exgrpo.recipe=redr", "trainer.save_freq=1", reward=reward)
    options = options_of("redr")
    check_replay(told, options, replay_of(options))
    kept, seen = stored(tmp_path, 3, options), set()
    for one in kept:
        assert one.key == solution_keys([{"key": str(one.response[0] - 5)}], "solutions")[0]
        assert (one.question, one.key) not in seen
        seen.add((one.question, one.key))
    successes = sum(
        sum(np.array(of_step["graded"]["reward"])[~np.array(of_step["graded"]["replayed"])] > 0)
        for of_step in told.values()
    )
    assert 0 < len(kept) < successes
    for row in np.flatnonzero(told[3]["columns"]["replayed"]):
        assert told[3]["columns"]["advantages"][row][0] == pytest.approx(options.objective.coefficient)
