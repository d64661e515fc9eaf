"""Interrupted runs: killed at any moment, continued exactly, refused where they would become other runs."""

import random
import shutil
import signal
import time

import pytest

from exgrpo.train.checkpoint.checkpoint import Checkpoints
from exgrpo.train.checkpoint.listing import find
from exgrpo.train.checkpoint.resume import FINISHED, begun_anew, continued, locate
from exgrpo.train.errors import CheckpointError, ConfigError
from exgrpo.train.main import configure
from exgrpo.train.recipe import DEFAULT_RUN, parse_args, to_yaml
from exgrpo.train.trainer import Trainer
from tests.train.configs import configured
from tests.train.fakes import LoneWorld, RecordingPolicy, ScriptedEngine, answerer, question_set
from tests.train.launch import MAIN, Ranks, launch
from tests.train.test_run import untimed

SMALL = (
    "--steps=8",
    "--questions=8",
    "--rollout.samples=4",
    "--data.train_limit=40",
    "--data.test_limit=16",
    "--experience.start_pass_rate=0",
    "--rollout.engine=transformers",
    "--checkpoint.every=2",
    "--evaluation.every=3",
    "--output.save_model=False",
)


class SavingPolicy(RecordingPolicy):
    """What it saves is its version."""

    checkpoint_bytes = 1

    def save_checkpoint(self, folder):
        folder.mkdir(parents=True)
        (folder / "version").write_text(str(self.version))

    def load_checkpoint(self, folder):
        self.version = int((folder / "version").read_text())


def make_trainer() -> Trainer:
    skill = {question: (0.25, 0.5, 0.75, 1.0)[question % 4] for question in range(24)}
    config = configured(
        {
            "questions": 6,
            "rollout": {"samples": 4, "max_tokens": 8},
            "data": {"max_prompt_tokens": 8},
            "experience": {"start_pass_rate": 0.0},
        }
    )
    return Trainer(config, question_set(24), SavingPolicy(), answerer(ScriptedEngine(skill)))


def checkpoints(folder, *, keep=2, fingerprint="data", config=None) -> Checkpoints:
    return Checkpoints(folder, LoneWorld(), fingerprint=fingerprint, config=config or {}, keep=keep)


def story(trainer: Trainer, first: int, last: int) -> list[str]:
    results = [trainer.step(step) for step in range(first, last)]
    return [
        str({k: v for k, v in r.metrics.items() if "second" not in k} | {"q": r.batch.question.tolist()})
        for r in results
    ]


def test_a_continued_trainer_takes_the_same_steps(tmp_path):
    whole = make_trainer()
    expected = story(whole, 1, 11)
    first = make_trainer()
    assert story(first, 1, 6) == expected[:5]
    checkpoints(tmp_path).save(5, first.policy, first, {"before": 0.5})
    second = make_trainer()
    assert checkpoints(tmp_path).load(second.policy, second) == (5, {"before": 0.5})
    assert story(second, 6, 11) == expected[5:]


def saved_run(folder, steps=(2, 4, 6), keep=2, config=None):
    trainer, writer, done = make_trainer(), checkpoints(folder, keep=keep, config=config), 0
    for step in steps:
        story(trainer, done + 1, step + 1)
        done = step
        writer.save(step, trainer.policy, trainer, {})
    return trainer


def test_old_checkpoints_are_rotated_with_what_only_they_needed(tmp_path):
    saved_run(tmp_path)
    assert [found.step for found in find(tmp_path)] == [6, 4]
    needed = {name for found in find(tmp_path) for name in found.manifest.experience}
    assert {path.stem for path in (tmp_path / "experience").iterdir()} == needed


@pytest.mark.parametrize("damage", ["no manifest", "half a manifest", "missing shard", "short shard", "bad segment"])
def test_a_broken_checkpoint_is_passed_over_for_the_one_before(tmp_path, damage):
    saved_run(tmp_path)
    newest = find(tmp_path)[0]
    manifest, shard = newest.folder / "manifest.json", newest.folder / "policy" / "version"
    match damage:
        case "no manifest":
            manifest.unlink()
        case "half a manifest":
            manifest.write_text(manifest.read_text()[:50])
        case "missing shard":
            shard.unlink()
        case "short shard":
            shard.write_text("")
        case "bad segment":
            (tmp_path / "experience" / f"{newest.manifest.arrays}.safetensors").write_bytes(b"damaged")
    trainer = make_trainer()
    step, _ = checkpoints(tmp_path).load(trainer.policy, trainer)
    assert step == 4


def test_without_a_sound_checkpoint_the_reason_is_given(tmp_path):
    saved_run(tmp_path, steps=(2,))
    shutil.rmtree(tmp_path / "experience")
    trainer = make_trainer()
    with pytest.raises(CheckpointError, match="no sound checkpoint to continue from.*is missing"):
        checkpoints(tmp_path).load(trainer.policy, trainer)


def test_other_data_are_refused(tmp_path):
    trainer = saved_run(tmp_path, steps=(2,))
    with pytest.raises(CheckpointError, match="other training questions"):
        checkpoints(tmp_path, fingerprint="other").load(trainer.policy, trainer)


@pytest.mark.parametrize("where", ["shards", "segments", "space"])
def test_a_full_disk_is_one_clear_error_and_the_last_checkpoint_stays(tmp_path, monkeypatch, where):
    trainer = saved_run(tmp_path, steps=(2, 4))
    full = OSError(28, "No space left on device")

    def fail(*_, **__):
        raise full

    if where == "shards":
        monkeypatch.setattr(SavingPolicy, "save_checkpoint", fail)
    elif where == "segments":
        monkeypatch.setattr("exgrpo.train.checkpoint.checkpoint.write_checked", fail)
    else:
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    with pytest.raises(CheckpointError, match=r"step 6 .* cannot be written: .*; the last complete one is .*00000004"):
        checkpoints(tmp_path).save(6, trainer.policy, trainer, {})
    assert [found.step for found in find(tmp_path)] == [4, 2]
    monkeypatch.undo()
    checkpoints(tmp_path).save(6, trainer.policy, trainer, {})
    assert find(tmp_path)[0].step == 6


def write_config(folder, **values):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(configured(values)))


def test_auto_means_the_newest_unfinished_run(tmp_path):
    """Unfinished is, too, a run that was killed between its last step and its last evaluation, such as "b"."""

    def config(**output):
        return configured({"resume": "auto", "output": {"folder": tmp_path, **output}})

    assert locate(config()) is None
    for name, steps, done in (("a", 10, 4), ("b", 6, 6), ("finished", 4, 4), ("unsaved", 10, None)):
        write_config(tmp_path / name, steps=steps)
        if done:
            saved_run(tmp_path / name, steps=(done,))
            time.sleep(0.01)
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
        write_config(tmp_path / name, **values, rollout={"engine": "transformers"})
        saved_run(tmp_path / name, steps=(2,))
        time.sleep(0.01)
    assert locate(asked()) == tmp_path / "same"  # the engine is one that the run has chosen by itself
    assert locate(asked(steps=50, evaluation={"every": 7})) == tmp_path / "same"
    assert locate(asked(seed=1)) == tmp_path / "other"
    neither = asked(seed=1, questions=32, experience={"ratio": 0.25})
    assert locate(neither) is None
    told = begun_anew(neither, tmp_path / "new")
    assert f"a new one begins in {tmp_path / 'new'}. The nearest is {tmp_path / 'other'}, where questions was" in told
    assert "experience.ratio was 0.5 and is now 0.25; to go on with that one: --resume" in told
    assert "seed" not in told
    assert locate(asked(rollout={"engine": "vllm"})) is None
    assert "rollout.engine was 'transformers' and is now 'vllm'" in begun_anew(asked(rollout={"engine": "vllm"}), "new")


@pytest.mark.parametrize("content", ["", "seed: ["])
def test_auto_compares_with_the_copy_in_a_checkpoint_where_the_configuration_of_a_run_is_damaged(tmp_path, content):
    saved_run(tmp_path / "run", steps=(2,), config=configured().model_dump(mode="json"))
    (tmp_path / "run" / "config.yaml").write_text(content)
    asked = {"resume": "auto", "output": {"folder": tmp_path}}
    assert locate(configured(asked)) == tmp_path / "run"
    assert locate(configured({**asked, "seed": 1})) is None


def test_a_recipe_that_leaves_the_engine_open_goes_on_with_the_one_that_was_chosen(tmp_path):
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(f"base: {DEFAULT_RUN}\nseed: 3\n")
    options = [f"--recipe={recipe}", f"--output.folder={tmp_path}", "--resume=auto"]
    begun = parse_args([*options, "--rollout.engine=transformers"])
    saved_run(run, steps=(2,), config=begun.model_dump(mode="json"))
    (run / "config.yaml").write_text(to_yaml(begun))
    assert parse_args(options).rollout.engine == "auto"
    assert configure(options) == (begun, run)


def test_a_run_goes_on_as_it_began():
    saved = configured()
    continued(saved.model_copy(update={"steps": 100, "resume": "auto"}), saved)
    here, there = (configured({"rollout": {"servers": [url]}}) for url in ("http://a:8000", "http://b:8000"))
    continued(there, here)
    changed = configured({"seed": 1, "experience": {"ratio": 0.25}})
    with pytest.raises(ConfigError, match=r"seed was 0 and is now 1, experience.ratio was 0.5 and is now 0.25"):
        continued(changed, saved)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_killed_at_random_moments_gives_the_same_metrics(tmp_path, ranks):
    arguments = (*SMALL, f"--output.folder={tmp_path}")
    done = launch(MAIN, *arguments, "--output.name=whole", ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    rng, kills = random.Random(ranks), 0
    while kills < 3:
        running = Ranks(MAIN, *arguments, "--output.name=killed", "--resume=auto", ranks=ranks)
        _wait_for_progress(tmp_path / "killed", running, rng.uniform(0.0, 2.0))
        alive = running.running()
        if alive:
            rng.choice(running.ranks).send(signal.SIGKILL)
            kills += 1
        done = running.finish()
        assert "Traceback" not in done.stderr
        if not alive:
            assert done.returncode == 0, done.stdout + done.stderr
            break
        if not find(tmp_path / "killed"):
            shutil.rmtree(tmp_path / "killed")  # killed before its first checkpoint: a new run needs the name
    assert kills
    if not (tmp_path / "killed" / FINISHED).exists():
        done = launch(MAIN, *arguments, "--resume=auto", ranks=ranks)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "going on with" in done.stdout
    assert untimed(tmp_path / "killed") == untimed(tmp_path / "whole")
    assert (tmp_path / "killed" / FINISHED).exists()
    assert (tmp_path / "killed" / "samples.jsonl").read_text() == (tmp_path / "whole" / "samples.jsonl").read_text()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of one process that was not interrupted."""
    root = tmp_path_factory.mktemp("whole")
    done = launch(MAIN, *SMALL, f"--output.folder={root}", "--output.name=run")
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "run"


DECISIONS = ("step", "reward", "pass_rate", "generated_tokens", "replayed", "buffer_trajectories", "retired")
ROUNDED = {"entropy": 1e-4, "loss": 1e-3, "grad_norm": 1e-3}
"""Of these the order of sums is visible, as between one and two processes that are not interrupted."""


@pytest.mark.parametrize("ways", [(1, 2, 1), (2, 3)], ids=str)
def test_a_killed_run_goes_on_with_another_number_of_processes(tmp_path, whole, ways):
    """Killed behind a checkpoint, and continued by fewer or more processes."""
    arguments = (*SMALL, f"--output.folder={tmp_path}", "--output.name=run", "--resume=auto")
    for ranks in ways[:-1]:
        running = Ranks(MAIN, *arguments, ranks=ranks)
        _wait_for_progress(tmp_path / "run", running, 0.0)
        running.ranks[-1].send(signal.SIGKILL)
        running.finish()
    assert find(tmp_path / "run")[0].step < 8
    done = launch(MAIN, *arguments, ranks=ways[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "going on with" in done.stdout
    ours, expected = untimed(tmp_path / "run"), untimed(whole)
    for mine, right in zip(ours, expected, strict=True):
        assert {key: mine.get(key) for key in DECISIONS} == {key: right.get(key) for key in DECISIONS}
        for key, bound in ROUNDED.items():
            if right.get(key) is None:  # an evaluation, or a step without an update
                assert mine.get(key) is None
            else:
                assert mine[key] == pytest.approx(right[key], rel=bound, abs=1e-6), (key, right["step"])


def _wait_for_progress(folder, run, seconds):
    """Until the run has a complete checkpoint more than it had, and then a random while."""
    before = find(folder)[0].step if find(folder) else 0
    deadline = time.monotonic() + 120
    while run.running() and time.monotonic() < deadline:
        found = find(folder)
        if found and found[0].step > before:
            time.sleep(seconds)
            return
        time.sleep(0.02)
