"""What a killed save or a killed rotation leaves: no checkpoint by its name, and gone after the next load."""

import os
import shutil
from pathlib import Path

import pytest

from exgrpo.train.checkpoint import checkpoint
from exgrpo.train.checkpoint.listing import FOLDER, survey
from tests.train.checkpoint.test_checkpoint import checkpoints, make_trainer, saved_run, story


class Killed(BaseException):
    """The process ends here: nothing handles it."""


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(run):
    return sorted(path.name for path in (run / FOLDER).iterdir())


def load(run):
    trainer = make_trainer()
    return checkpoints(run).load(trainer.policy, trainer)[0]


def half_delete(folder, ignore_errors=False):
    """Delete some of a folder's files, the manifest last, and end."""
    if Path(folder).exists():
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        for path in files[: len(files) // 2] or files:
            path.unlink()
        raise Killed


def test_a_rotation_killed_midway_leaves_only_sound_checkpoints_by_name(tmp_path, monkeypatch):
    trainer = saved_run(tmp_path, steps=(2, 4))
    story(trainer, 5, 7)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.shutil, "rmtree", half_delete)
        with pytest.raises(Killed):
            checkpoints(tmp_path).save(6, trainer.policy, trainer, {})
    found, problems = survey(tmp_path)
    assert ([one.step for one in found], problems) == ([6, 4], [])
    assert "step_00000002.deleted" in names(tmp_path)
    before = {one.folder: contents(one.folder) for one in found}
    assert load(tmp_path) == 6
    assert names(tmp_path) == ["step_00000004", "step_00000006"]
    assert {folder: contents(folder) for folder in before} == before


@pytest.mark.parametrize("moment", ["shards", "manifest", "rename"])
def test_a_save_killed_midway_is_gone_after_the_next_load(tmp_path, monkeypatch, moment):
    trainer = saved_run(tmp_path, steps=(2, 4))
    before = {name: contents(tmp_path / FOLDER / name) for name in names(tmp_path)}

    def kill(*arguments, **options):
        raise Killed

    with monkeypatch.context() as patched:
        if moment == "shards":
            patched.setattr(checkpoint, "_flush_and_hash", kill)
        elif moment == "manifest":
            patched.setattr(checkpoint, "write_manifest", kill)
        else:
            patched.setattr(Path, "replace", kill)
        with pytest.raises(Killed):
            checkpoints(tmp_path).save(6, trainer.policy, trainer, {})
    assert "step_00000006.unfinished" in names(tmp_path)
    assert load(tmp_path) == 4
    assert {name: contents(tmp_path / FOLDER / name) for name in names(tmp_path)} == before


def test_remains_of_one_deletion_are_in_the_way_of_no_other(tmp_path):
    trainer = saved_run(tmp_path, steps=(2, 4))
    remains = tmp_path / FOLDER / "step_00000002.deleted"
    (remains / "policy").mkdir(parents=True)
    (remains / "policy" / "version").write_text("half")
    story(trainer, 5, 7)
    checkpoints(tmp_path).save(6, trainer.policy, trainer, {})
    assert names(tmp_path) == ["step_00000004", "step_00000006"]


def test_nothing_goes_where_no_checkpoint_is_sound(tmp_path):
    saved_run(tmp_path, steps=(2,))
    whole = tmp_path / FOLDER / "step_00000002"
    shutil.copytree(whole, whole.with_suffix(".unfinished"))
    os.unlink(whole / "manifest.json")
    with pytest.raises(checkpoint.CheckpointError, match="no sound checkpoint"):
        load(tmp_path)
    assert names(tmp_path) == ["step_00000002", "step_00000002.unfinished"]
