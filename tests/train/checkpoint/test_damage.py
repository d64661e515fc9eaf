"""Damaged files of a run: the person is told which, and the run goes on from what is sound, exactly."""

import fcntl
import json
import os
import shutil
import subprocess

import pytest

from exgrpo.train.checkpoint.folder_lock import LOCK, claim
from exgrpo.train.checkpoint.listing import find, folders
from exgrpo.train.checkpoint.resume import FINISHED, locate, saved_config
from exgrpo.train.errors import CheckpointError, ConfigError
from exgrpo.train.recipe import to_yaml
from tests.train.checkpoint.test_checkpoint import (
    SMALL,
    checkpoints,
    make_trainer,
    saved_run,
    story,
    untimed,
)
from tests.train.configs import configured
from tests.train.launch import MAIN, launch

LOGS = ("metrics.jsonl", "samples.jsonl")


def logged_run(folder, **options):
    """A run with checkpoints and logs."""
    folder.mkdir(exist_ok=True)
    for name in LOGS:
        (folder / name).write_text(f"the content of {name}\n")
    return saved_run(folder, **options)


def flip(path):
    """Change one bit and leave the size."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def load(folder, **options):
    trainer = make_trainer()
    return trainer, checkpoints(folder, **options).load(trainer.policy, trainer)[0]


def test_every_file_has_the_checksum_that_sha256sum_computes(tmp_path):
    logged_run(tmp_path)
    for found in find(tmp_path):
        listed = {str(found.folder / name): file.sha256 for name, file in found.manifest.files.items()}
        printed = subprocess.run(["sha256sum", *listed], capture_output=True, text=True, check=True).stdout
        assert {line[66:]: line[:64] for line in printed.splitlines()} == listed
        names = {str(path) for path in found.folder.rglob("*") if path.is_file()}
        assert names - set(listed) == {str(found.folder / "manifest.json")}


def test_everything_is_on_disk_before_a_checkpoint_has_its_name(tmp_path, monkeypatch):
    forced, fsync, replace, seen = set(), os.fsync, os.replace, []

    def record(descriptor):
        forced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def watch(source, target, **options):
        if str(source).endswith("step_00000002.unfinished"):
            needed = [path for root in (source, tmp_path / "experience") for path in [root, *root.rglob("*")]]
            seen.extend(path for path in needed if path.stat().st_ino not in forced)
            seen.append("renamed")
        replace(source, target, **options)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "replace", watch)
    monkeypatch.setattr("pathlib.Path.replace", lambda self, target: watch(self, target))
    logged_run(tmp_path, steps=(2,))
    assert seen == ["renamed"]


@pytest.mark.parametrize("name", ["policy/version", *LOGS, "manifest.json", "arrays"])
def test_a_flipped_bit_is_named_and_the_checkpoint_before_is_taken(tmp_path, caplog, name):
    expected = story(make_trainer(), 1, 9)
    logged_run(tmp_path)
    newest, before = find(tmp_path)
    damaged = newest.folder / name
    if name == "arrays":
        damaged = tmp_path / "experience" / f"{newest.manifest.arrays}.safetensors"
    flip(damaged)
    trainer, step = load(tmp_path)
    assert step == 4
    assert story(trainer, 5, 9) == expected[4:]
    (warning,) = caplog.messages
    assert f"{damaged} is damaged" in warning
    assert f"going on with {before.folder}" in warning
    assert f"{newest.folder}.damaged" in warning
    assert [found.step for found in find(tmp_path)] == [4]


@pytest.mark.parametrize("content", ["{}", "[]", "no JSON", '{"step": 6}', ""])
def test_what_is_no_manifest_is_named_and_passed_over(tmp_path, caplog, content):
    logged_run(tmp_path)
    manifest = find(tmp_path)[0].folder / "manifest.json"
    manifest.write_text(content)
    assert load(tmp_path)[1] == 4
    assert f"{manifest} is damaged" in caplog.text


def test_where_all_are_damaged_one_error_names_every_problem(tmp_path):
    logged_run(tmp_path, steps=(2, 4, 6), keep=3)
    newest, middle, oldest = find(tmp_path)
    flip(newest.folder / "policy" / "version")
    (middle.folder / "manifest.json").write_text("[]")
    (tmp_path / "experience" / f"{oldest.manifest.arrays}.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    parts = str(error.value).split("; ")
    assert parts[0] == f"{tmp_path} has no sound checkpoint to continue from"
    assert [f"{newest.folder}/policy/version is damaged" in parts[1], f"{middle.folder}/manifest" in parts[2]] == [
        True
    ] * 2
    assert f"{oldest.manifest.arrays}.safetensors is damaged: it has 0 bytes" in parts[3]
    assert folders(tmp_path) == [newest.folder, middle.folder, oldest.folder], "nothing is set aside"


def test_a_damaged_newer_checkpoint_takes_no_sound_ones_place(tmp_path):
    """The one of step 6 looks whole. Counted among the newest, it would have the one of step 5 deleted."""
    logged_run(tmp_path)
    flip(tmp_path / "checkpoints" / "step_00000006" / "policy" / "version")
    trainer, step = load(tmp_path, keep=1)
    assert step == 4
    story(trainer, 5, 6)
    checkpoints(tmp_path, keep=1).save(5, trainer.policy, trainer, {})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000005"]
    assert load(tmp_path)[1] == 5


def test_rotation_does_not_count_what_is_damaged(tmp_path):
    trainer = logged_run(tmp_path, steps=(2, 4))
    (tmp_path / "checkpoints" / "step_00000004" / "manifest.json").write_text("{}")
    checkpoints(tmp_path).save(6, trainer.policy, trainer, {})
    assert [found.step for found in find(tmp_path)] == [6, 2]
    checkpoints(tmp_path).save(8, trainer.policy, trainer, {})
    assert [path.name[-1] for path in folders(tmp_path)] == ["8", "6"]


def test_what_cannot_be_read_for_a_while_is_not_deleted(tmp_path):
    trainer = logged_run(tmp_path, steps=(2,))
    manifest = find(tmp_path)[0].folder / "manifest.json"
    manifest.rename(tmp_path / "away")
    story(trainer, 3, 5)
    checkpoints(tmp_path).save(4, trainer.policy, trainer, {})
    assert [found.step for found in find(tmp_path)] == [4]
    (tmp_path / "away").rename(manifest)
    assert [found.step for found in find(tmp_path)] == [4, 2]


@pytest.mark.parametrize("damage", ["empty", "cut", "missing"])
def test_a_segment_lost_while_the_run_has_it_in_memory_is_written_again(tmp_path, damage):
    expected = story(make_trainer(), 1, 9)
    trainer, writer = make_trainer(), checkpoints(tmp_path)
    story(trainer, 1, 5)
    writer.save(4, trainer.policy, trainer, {})
    for path in (tmp_path / "experience").iterdir():
        match damage:
            case "empty":
                path.write_bytes(b"")
            case "cut":
                path.write_bytes(path.read_bytes()[:-1])
            case "missing":
                path.unlink()
    story(trainer, 5, 7)
    writer.save(6, trainer.policy, trainer, {})
    again, step = load(tmp_path)
    assert step == 6
    assert story(again, 7, 9) == expected[6:]


def test_what_may_not_be_read_is_an_error_and_no_damage(tmp_path, monkeypatch):
    """To go back to an older checkpoint would throw steps away that one command makes readable."""
    logged_run(tmp_path)
    before = folders(tmp_path)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("exgrpo.train.checkpoint.checkpoint.sha256", refuse)
    with pytest.raises(CheckpointError, match=r"permission denied: .*/step_00000006/"):
        load(tmp_path)
    assert folders(tmp_path) == before


def test_a_disk_that_fails_is_damage(tmp_path, monkeypatch, caplog):
    logged_run(tmp_path)
    from exgrpo.train.checkpoint.checkpoint import sha256

    def fail(path):
        if "00000006" in str(path):
            raise OSError(5, "Input/output error", str(path))
        return sha256(path)

    monkeypatch.setattr("exgrpo.train.checkpoint.checkpoint.sha256", fail)
    assert load(tmp_path)[1] == 4
    assert "step_00000006/metrics.jsonl cannot be read or written: Input/output error" in caplog.text


def test_an_earlier_format_is_refused_with_one_error(tmp_path):
    logged_run(tmp_path)
    for found in find(tmp_path):
        manifest = json.loads((found.folder / "manifest.json").read_text())
        files = {name: file["size"] for name, file in manifest["files"].items()}
        old = {key: manifest[key] for key in ("step", "fingerprint", "arrays", "values", "progress")}
        (found.folder / "manifest.json").write_text(json.dumps({**old, "files": files, "segments": []}))
    with pytest.raises(CheckpointError, match=r"step_00000006 was written by an earlier version .* cannot be verified"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"no complete checkpoint .* earlier version"):
        locate(configured({"resume": str(tmp_path)}))


def test_auto_does_not_begin_anew_beside_a_run_whose_checkpoints_are_damaged(tmp_path):
    run = tmp_path / "run"
    logged_run(run, steps=(2,))
    manifest = find(run)[0].folder / "manifest.json"
    manifest.write_text("{}")
    with pytest.raises(ConfigError, match=rf"{run} has no complete checkpoint to continue from; {manifest} is damaged"):
        locate(configured({"resume": "auto", "output": {"folder": tmp_path}}))


@pytest.mark.parametrize("content", [None, "", "seed: [", "sede: 0\n", "\0\0\0", "- 1\n"])
def test_a_damaged_configuration_is_taken_from_the_checkpoint(tmp_path, caplog, content):
    logged_run(tmp_path, steps=(2,), config=configured(seed=7, steps=30).model_dump(mode="json"))
    if content is not None:
        (tmp_path / "config.yaml").write_text(content)
    saved = saved_config(tmp_path)
    assert (saved.seed, saved.steps) == (7, 30)
    (warning,) = caplog.messages
    assert f"{tmp_path / 'config.yaml'}" in warning
    assert "is taken from" in warning


def test_a_sound_configuration_may_say_more_steps_and_nothing_else(tmp_path):
    logged_run(tmp_path, steps=(2,), config=configured(seed=7, steps=30).model_dump(mode="json"))
    (tmp_path / "config.yaml").write_text(to_yaml(configured(seed=7, steps=40)))
    assert saved_config(tmp_path).steps == 40
    (tmp_path / "config.yaml").write_text(to_yaml(configured(seed=8, steps=40)))
    with pytest.raises(
        ConfigError, match=r"config\.yaml is not what .*: seed was 7 and is now 8; put it right, or rem"
    ):
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
        with pytest.raises(ConfigError, match=rf"{tmp_path} {message}"), claim(tmp_path):
            pass


def test_a_run_of_two_ranks_with_damaged_files_gives_the_same_metrics(tmp_path):
    done = launch(MAIN, *SMALL, f"--output.folder={tmp_path}", "--output.name=whole", ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "damaged"
    shutil.copytree(tmp_path / "whole", run)
    (run / FINISHED).unlink()
    shard = sorted((run / "checkpoints" / "step_00000008" / "policy").glob("rank_00001_*.safetensors"))[0]
    flip(shard)
    (run / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes()[:1000])
    (run / "samples.jsonl").write_bytes(b"\0" * 100)
    (run / "config.yaml").write_text("")
    done = launch(MAIN, f"--resume={run}", ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"going on with {run} after step 6" in done.stdout
    for name in (shard, run / "metrics.jsonl", run / "samples.jsonl"):
        assert done.stderr.count(f"{name} is damaged") == 1
    assert done.stderr.count(f"{run / 'config.yaml'} is empty") == 1
    assert untimed(run) == untimed(tmp_path / "whole")
    for name in ("samples.jsonl", "config.yaml"):
        assert (run / name).read_text() == (tmp_path / "whole" / name).read_text().replace(
            "resume: null", f"resume: {run}"
        )
    assert [found.step for found in find(run)] == [8, 6]


def test_a_manifest_in_the_folder_of_another_step_is_named(tmp_path, caplog):
    """All its checksums may be right: the files of both steps can have the same sizes."""
    logged_run(tmp_path)
    newest, before = find(tmp_path)
    shutil.copyfile(before.folder / "manifest.json", newest.folder / "manifest.json")
    assert load(tmp_path)[1] == before.step
    assert f"{newest.folder / 'manifest.json'} is damaged: it is that of step 4" in caplog.text
