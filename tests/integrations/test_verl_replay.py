"""Replay in verl's trainer: with --long, verl's own command on this CPU, in an environment of its own."""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from exgrpo.integrations.verl_method import PACKAGES, solution_keys
from tests.integrations import verl_runs
from tests.programs import printed, ran

pytestmark = pytest.mark.timeout(3600)
UNCONSTRAINED = {"PIP_CONSTRAINT": os.devnull}
"""A machine's own constraints may exclude what verl needs."""
BESIDE_VERL = ("torch==2.13.0", "pyzmq", "msgspec", "cachetools", "fastapi", "uvicorn")


def is_unreachable(errors: str) -> bool:
    """True if pip could not ask for packages; False if it did, and no versions fit together."""
    return "after connection broken by" in errors and "ResolutionImpossible" not in errors


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
            done = ran(*command, env={**os.environ, **UNCONSTRAINED})
            if is_unreachable(done.stderr):
                pytest.skip(f"an environment with verl cannot be made without a network: {done.stderr[-300:]}")
            assert done.returncode == 0, done.stderr[-3000:]
        whole.touch()
    return there


@pytest.mark.long
def test_the_loss_is_the_projects_in_float64(python: Path) -> None:
    environment = {**os.environ, **verl_runs.ENVIRONMENT, "VERL_USE_EXTERNAL_MODULES": ""}
    cases = json.loads(printed(python, "-m", "tests.integrations.verl_loss", env=environment).splitlines()[-1])
    assert len(cases) == 24
    for case in cases:
        assert case["error"] < 1e-5, case


@pytest.mark.long
def test_two_workers_train_and_a_resumed_run_has_the_same_plan(python: Path, tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    options = ("+exgrpo.recipe=exgrpo", "+exgrpo.experience.start_pass_rate=0", "trainer.save_freq=2")
    told = verl_runs.train(python, folder, *options, workers=2, steps=4)
    assert sorted(told) == [1, 2, 3, 4]
    model = LlamaForCausalLM.from_pretrained(folder / "task" / "model").double()
    candidates = 0
    for of_step in told.values():
        verl_runs.check_step(of_step)
        candidates += verl_runs.check_choice(of_step, model)
    assert candidates > sum(of_step["columns"]["replayed"].sum() for of_step in told.values())
    assert sum(of_step["columns"]["replayed"].sum() for of_step in told.values()) > 0
    assert any(not of_step["columns"]["clip"] for of_step in told.values())
    resumed = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}/checkpoints/global_step_2")
    again = verl_runs.train(python, tmp_path / "again", *options, *resumed, workers=2, steps=3)
    assert sorted(again) == [3]
    assert again[3]["plan"] == told[3]["plan"]
    verl_runs.check_step(again[3])


@pytest.mark.long
def test_replay_starts_late_questions_retire_and_a_run_ends_once_all_are_solved(python: Path, tmp_path: Path) -> None:
    # Rows that repeat a question are that question.
    told = verl_runs.train(python, tmp_path, "trainer.save_freq=100", steps=20, reward="1", copies=5)
    numbers = [told[step]["metrics"] for step in sorted(told)]
    # Eight questions, four in a step; what opens with the first step counts from the second one on.
    assert [step["experience/retired"] for step in numbers] == [4, 8]
    assert [step["experience/replay_open"] for step in numbers] == [1, 1]
    assert [step["experience/buffer_trajectories"] for step in numbers] == [0, 0]
    assert sorted(question for step in told.values() for question, *_ in step["plan"]) == list(range(8))
    assert (tmp_path / "checkpoints" / "global_step_2" / "experience" / "state.json").is_file()


@pytest.mark.long
def test_a_run_begins_with_answers_of_files_and_goes_on_exactly(python: Path, tmp_path: Path) -> None:
    source = verl_runs.write_expert(tmp_path / "expert.jsonl")
    given = ("+exgrpo.recipe=rlep", f"+exgrpo.experience.start={source}", "trainer.save_freq=1")
    folder, options = tmp_path / "whole", verl_runs.options_of("rlep", experience={"start": source})
    told = verl_runs.train(python, folder, *given)
    replay, questions = verl_runs.begun(options, folder)
    verl_runs.check_replay(told, options, replay)
    model = LlamaForCausalLM.from_pretrained(folder / "task" / "model").double()
    found = verl_runs.stored(folder, 1, options)
    assert [questions[one.question].text for one in found] == [question for question, _ in verl_runs.EXPERT[:4]]
    for one, (_, text) in zip(found, verl_runs.EXPERT, strict=False):
        assert (one.reward, one.response[-1], len(one.response)) == (len(text) % 2, 2, len(text) + 1)
        ids = torch.tensor([[*questions[one.question].prompt, *one.response.tolist()]])
        with torch.no_grad():
            log_probs = model(ids).logits[0, -len(one.response) - 1 : -1].log_softmax(-1)
        expected = log_probs.gather(1, ids[0, -len(one.response) :, None])[:, 0]
        np.testing.assert_allclose(one.log_prob, expected.numpy(), atol=1e-5)
    for of_step in told.values():
        assert of_step["columns"]["replayed"].any()
        verl_runs.check_loss(of_step, clip=(0.2, 0.28), beta=None, by_token=True)
    resumed = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}/checkpoints/global_step_2")
    again = verl_runs.train(python, tmp_path / "again", *given, *resumed)
    assert sorted(again) == [3]
    assert again[3]["plan"] == told[3]["plan"]
    for one, other in zip(
        verl_runs.stored(tmp_path / "again", 3, options), verl_runs.stored(folder, 3, options), strict=True
    ):
        np.testing.assert_array_equal(one.log_prob, other.log_prob)


@pytest.mark.long
def test_further_questions_are_asked_until_enough_groups_have_a_gradient(python: Path, tmp_path: Path) -> None:
    few = ("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
    told = verl_runs.train(
        python, tmp_path, "+exgrpo.recipe=dynamic_sampling", *few, reward="float(solution_str[:1] == '1')"
    )
    options = verl_runs.options_of("dynamic_sampling", 2)
    verl_runs.check_replay(told, options, verl_runs.replay_of(options))
    assert sum(of_step["metrics"]["experience/refilled"] for of_step in told.values()) > 0
    updated = [of_step for of_step in told.values() if "actor/pg_loss" in of_step["metrics"]]
    assert 0 < len(updated) < len(told)  # all answers of a step may be wrong, and nothing is learnt from it
    for of_step in updated:
        verl_runs.check_loss(of_step, clip=(0.2, 0.28), beta=None, by_token=True)


@pytest.mark.long
def test_a_regression_learns_from_stored_answers_without_ratios(python: Path, tmp_path: Path) -> None:
    told = verl_runs.train(python, tmp_path, "+exgrpo.recipe=oapl")
    options = verl_runs.options_of("oapl")
    verl_runs.check_replay(told, options, verl_runs.replay_of(options))
    assert told[3]["columns"]["replayed"].any()
    for of_step in told.values():
        columns, total = of_step["columns"], 0.0
        rows = zip(verl_runs.answers_only(columns), columns["old_log_probs"], columns["advantages"], strict=True)
        for row, (present, old, advantage) in enumerate(rows):
            if not columns["padding"][row]:
                log_ratio = np.sum(np.asarray(present, np.float64) - np.asarray(old))
                total += (options.objective.beta2 * log_ratio - advantage[0]) ** 2
        assert of_step["metrics"]["actor/pg_loss"] == pytest.approx(total / float(columns["rows"]), abs=1e-5)


@pytest.mark.long
def test_one_success_of_each_solution_is_kept(python: Path, tmp_path: Path) -> None:
    reward = "{'score': float(len(solution_str) % 2), 'key': solution_str[:1]}"
    told = verl_runs.train(python, tmp_path, "+exgrpo.recipe=redr", "trainer.save_freq=1", reward=reward)
    options = verl_runs.options_of("redr")
    verl_runs.check_replay(told, options, verl_runs.replay_of(options))
    kept, seen = verl_runs.stored(tmp_path, 3, options), set()
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
