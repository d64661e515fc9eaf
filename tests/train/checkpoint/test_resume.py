"""Which run goes on and with what; and that one process at a time uses a folder."""

import fcntl
import time

import pytest

from exgrpo.train.checkpoint.listing import find
from exgrpo.train.checkpoint.resume import FINISHED, begun_anew, continued, locate, saved_config
from exgrpo.train.common.durable import LOCK, claim
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.config.recipe import DEFAULT_RUN, changed, parse_args, to_yaml
from exgrpo.train.main import configure
from tests.train.checkpoint.parts import saved_run
from tests.train.configs import configured


def run_of(folder, done=2, **values):
    """The folder of a run with this configuration and one checkpoint."""
    saved_run(folder, steps=(done,), config=configured(values).model_dump(mode="json"))
    time.sleep(0.01)


def test_auto_means_the_newest_unfinished_run(tmp_path):
    """Unfinished is, too, a run that was killed between its last step and its last evaluation, such as "b"."""

    def config(**output):
        return configured({"resume": "auto", "output": {"folder": tmp_path, **output}})

    assert locate(config()) is None
    for name, steps, done in (("a", 10, 4), ("b", 6, 6), ("finished", 4, 4)):
        run_of(tmp_path / name, done, steps=steps)
    (tmp_path / "unsaved").mkdir()
    (tmp_path / "finished" / FINISHED).touch()
    assert locate(config()) == tmp_path / "b"
    assert locate(config(name="a")) == tmp_path / "a"
    assert locate(config(name="finished")) is None
    assert locate(configured({"resume": str(tmp_path / "finished")})) == tmp_path / "finished"
    with pytest.raises(ConfigError, match="unsaved has no complete checkpoint"):
        locate(configured({"resume": str(tmp_path / "unsaved")}))


def test_auto_goes_on_with_the_newest_run_of_the_configuration_that_is_asked_for(tmp_path):
    def asked(**values):
        return configured({"resume": "auto", "output": {"folder": tmp_path}, **values})

    for name, values in (("old", {}), ("same", {"steps": 9, "checkpoint": {"every": 3}}), ("other", {"seed": 1})):
        run_of(tmp_path / name, **values, rollout={"engine": "transformers"})
    assert locate(asked()) == tmp_path / "same"  # the engine is one that the run has chosen by itself
    assert locate(asked(steps=50, evaluation={"every": 7})) == tmp_path / "same"
    assert locate(asked(seed=1)) == tmp_path / "other"
    run_of(tmp_path / "far", seed=2, questions=8, experience={"ratio": 0.75})
    neither = asked(seed=1, questions=32, experience={"ratio": 0.25})
    assert locate(neither) is None
    told = begun_anew(neither, tmp_path / "new")
    assert f"a new one begins in {tmp_path / 'new'}. The nearest is {tmp_path / 'other'}, where questions was" in told
    assert "experience.ratio was 0.5 and is now 0.25; to go on with that one: --resume" in told
    assert "seed" not in told
    engine = asked(rollout={"engine": "vllm"})
    assert locate(engine) is None
    assert "rollout.engine was 'transformers' and is now 'vllm'" in begun_anew(engine, "new")


def test_auto_does_not_begin_anew_beside_a_run_whose_checkpoints_are_damaged(tmp_path):
    run = tmp_path / "run"
    saved_run(run, steps=(2,))
    manifest = find(run)[0].folder / "manifest.json"
    manifest.write_text("{}")
    with pytest.raises(ConfigError, match=r"/run has no complete checkpoint .*; .*/manifest.json is damaged"):
        locate(configured({"resume": "auto", "output": {"folder": tmp_path}}))


def test_a_recipe_that_leaves_the_engine_open_goes_on_with_the_one_that_was_chosen(tmp_path):
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(f"base: {DEFAULT_RUN}\nseed: 3\n")
    options = [f"--recipe={recipe}", f"--output.folder={tmp_path}", "--resume=auto"]
    begun = parse_args([*options, "--rollout.engine=transformers"])
    saved_run(run, steps=(2,), config=begun.model_dump(mode="json"))
    assert parse_args(options).rollout.engine == "auto"
    assert configure(options) == (begun, run)


def test_a_run_keeps_its_plan_of_memory_and_other_values_may_be_given(tmp_path):
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(f"base: {DEFAULT_RUN}\npolicy.gradient_checkpointing: null\n")
    options = [f"--recipe={recipe}", f"--output.folder={tmp_path}", "--resume=auto", "--rollout.engine=vllm"]
    begun = changed(parse_args(options), {"policy.gradient_checkpointing": False, "optimizer.micro_batch_tokens": 9216})
    saved_run(run, steps=(2,), config=begun.model_dump(mode="json"))
    assert configure(options) == (begun, run)
    less, _ = configure([*options, "--optimizer.micro_batch_tokens=4096", "--policy.gradient_checkpointing=True"])
    assert (less.pass_tokens, less.policy.checkpointing) == (4096, True)


def test_a_run_goes_on_as_it_began():
    saved = configured()
    continued(saved.model_copy(update={"steps": 100, "resume": "auto"}), saved)
    here, there = (configured({"rollout": {"servers": [url]}}) for url in ("http://a:8000", "http://b:8000"))
    continued(there, here)
    here, there = (configured({"experience": {"folder": f"/scratch/{job}"}}) for job in (1, 2))
    assert continued(there, here).experience.folder == there.experience.folder
    another = configured({"seed": 1, "experience": {"ratio": 0.25}})
    with pytest.raises(ConfigError, match=r"seed was 0 and is now 1, experience.ratio was 0.5 and is now 0.25"):
        continued(another, saved)


def test_a_damaged_configuration_is_taken_from_the_checkpoint_and_a_sound_one_may_say_more_steps(tmp_path, caplog):
    saved_run(tmp_path, steps=(2,), config=configured(seed=7, steps=30).model_dump(mode="json"))
    path = tmp_path / "config.yaml"
    for content in (None, "", "seed: [", "sede: 0\n", "\0\0\0", "- 1\n"):
        if content is not None:
            path.write_text(content)
        caplog.clear()
        saved = saved_config(tmp_path)
        assert (saved.seed, saved.steps) == (7, 30)
        (warning,) = caplog.messages
        assert f"{path}" in warning
        assert "is taken from" in warning
    path.write_text(to_yaml(configured(seed=7, steps=40)))
    assert saved_config(tmp_path).steps == 40
    path.write_text(to_yaml(configured(seed=8, steps=40)))
    told = r"config\.yaml is not what .*: seed was 7 and is now 8; put it right, or rem"
    with pytest.raises(ConfigError, match=told):
        saved_config(tmp_path)


def test_a_lock_that_cannot_be_had_or_read_is_named(tmp_path, monkeypatch):
    (tmp_path / LOCK).write_bytes(b"\xff\xfe")
    for error, message in (
        (PermissionError(13, "Permission denied"), "is in use by another process"),
        (OSError(37, "No locks available"), r"cannot be locked against other processes \(No locks available\)"),
    ):

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr(fcntl, "lockf", fail)
        with pytest.raises(ConfigError, match=message), claim(tmp_path):
            pass
