"""Checkpoints without a model: written whole, rotated, continued exactly, refused where they would be another run."""

import hashlib
import json
import math
import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from huggingface_hub import ModelCard

from exgrpo.train.checkpoint import checkpoint, listing
from exgrpo.train.common.distributed import ALONE
from exgrpo.train.common.durable import DamagedFileError
from exgrpo.train.common.errors import CheckpointError
from exgrpo.train.run.model_folder import write_model
from tests.programs import printed
from tests.train.checkpoint.parts import SavingPolicy, checkpoints, load, saved_run, story


def test_old_checkpoints_are_rotated_with_what_only_they_needed_and_files_have_sha256sums(tmp_path):
    saved_run(tmp_path)
    assert [found.step for found in listing.find(tmp_path)] == [6, 4]
    needed = {name for found in listing.find(tmp_path) for name in found.manifest.experience}
    assert {path.stem for path in (tmp_path / "experience").iterdir()} == needed
    for found in listing.find(tmp_path):
        listed = {name: file.sha256 for name, file in found.manifest.files.items()}
        sums = printed("sha256sum", *listed, cwd=found.folder)
        assert {line[66:]: line[:64] for line in sums.splitlines()} == listed
        names = {str(path.relative_to(found.folder)) for path in found.folder.rglob("*") if path.is_file()}
        assert names - set(listed) == {"manifest.json"}
    with pytest.raises(CheckpointError, match="other training questions"):
        load(tmp_path, fingerprint="other")


@pytest.fixture
def renamed(monkeypatch):
    """Has a watched folder renamed: of it and of other folders, the files and names that are not on disk by then."""
    forced, fsync, replace = set(), os.fsync, os.replace

    def record(descriptor):
        forced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def watch(name, *others):
        seen = []

        def move(source, target):
            if source.name == name:
                needed = [path for root in (source, *others) for path in [root, *root.rglob("*")]]
                seen.append([path for path in needed if path.stat().st_ino not in forced])
            replace(source, target)

        monkeypatch.setattr(Path, "replace", move)
        return seen

    monkeypatch.setattr(os, "fsync", record)
    return watch


def test_everything_is_on_disk_before_a_checkpoint_has_its_name(tmp_path, renamed):
    lacking = renamed("step_00000002.unfinished", tmp_path / "experience")
    saved_run(tmp_path, steps=(2,))
    assert lacking == [[]]


def test_everything_is_on_disk_before_a_model_has_its_name(tmp_path, renamed):
    def save(folder):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")

    lacking = renamed("model.unfinished")
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: (folder / "tokenizer.json").touch())
    write_model(tmp_path / "model", SimpleNamespace(save=save, world=ALONE), tokenizer, ModelCard("---\n---\n"))
    assert lacking == [[]]
    assert len(list((tmp_path / "model").iterdir())) == 3


@pytest.mark.parametrize("where", ["shards", "experience", "space"])
def test_a_full_disk_is_one_clear_error_and_the_last_checkpoint_stays(tmp_path, monkeypatch, where):
    trainer = saved_run(tmp_path, steps=(2, 4))

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    if where == "shards":
        monkeypatch.setattr(SavingPolicy, "save_checkpoint", fail)
    elif where == "experience":
        monkeypatch.setattr(checkpoint, "write_checked", fail)
    else:
        monkeypatch.setattr(SavingPolicy, "checkpoint_bytes", 1 << 60)
    with pytest.raises(CheckpointError, match=r"step 6 .* cannot be written: .*; the last complete one is .*00000004"):
        checkpoints(tmp_path).save(6, trainer.policy, trainer, {})
    assert [found.step for found in listing.find(tmp_path)] == [4, 2]
    monkeypatch.undo()
    checkpoints(tmp_path).save(6, trainer.policy, trainer, {})
    assert listing.find(tmp_path)[0].step == 6


class Killed(BaseException):
    """The process ends here: nothing handles it."""


def contents(run):
    """Of the files of checkpoints, by the names of these."""
    folders = {folder.name: folder for folder in (run / listing.FOLDER).iterdir()}
    files = {name: [path for path in sorted(folder.rglob("*")) if path.is_file()] for name, folder in folders.items()}
    return {name: {path: path.read_bytes() for path in paths} for name, paths in files.items()}


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
    found, problems = listing.survey(tmp_path)
    assert ([one.step for one in found], problems) == ([6, 4], [])
    before = contents(tmp_path)
    assert before["step_00000002.deleted"]
    story(trainer, 7, 9)
    checkpoints(tmp_path).save(8, trainer.policy, trainer, {})  # remains are in the way of no other deletion
    assert sorted(contents(tmp_path)) == ["step_00000002.deleted", "step_00000006", "step_00000008"]
    assert load(tmp_path)[1] == 8
    assert sorted(contents(tmp_path)) == ["step_00000006", "step_00000008"]


@pytest.mark.parametrize(
    "killed", [(checkpoint, "_flush_and_hash"), (checkpoint, "write_manifest"), (Path, "replace")], ids=str
)
def test_a_save_killed_midway_is_gone_after_the_next_load(tmp_path, monkeypatch, killed):
    trainer = saved_run(tmp_path, steps=(2, 4))
    before = contents(tmp_path)

    def kill(*_):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(*killed, kill)
        with pytest.raises(Killed):
            checkpoints(tmp_path).save(6, trainer.policy, trainer, {})
    assert "step_00000006.unfinished" in contents(tmp_path)
    assert load(tmp_path)[1] == 4
    assert contents(tmp_path) == before


WHOLE = listing.Manifest(
    step=20,
    fingerprint="data",
    config={"seed": 0, "output": {"name": None, "trackers": ["tensorboard"]}},
    files={"policy/rank_00000_00000.safetensors": listing.SavedFile(size=1000, sha256="ab" * 32)},
    arrays="cd" * 32,
    experience={"cd" * 32: 17},
    values={"open": True, "rng": np.random.default_rng(3).bit_generator.state, "rate": 0.1 + 0.2},
    progress={"before": 5e-324, "log": {"step": 20, "metrics": 100}},
)


def signed(content: dict) -> str:
    """A manifest whose checksum is right, whatever it says."""
    return json.dumps({"sha256": hashlib.sha256(json.dumps(content).encode()).hexdigest(), **content})


def plain(manifest: listing.Manifest = WHOLE) -> dict:
    return {"format": listing.FORMAT, **manifest.model_dump()}


def test_what_is_written_is_read(tmp_path):
    listing.write_manifest(tmp_path, WHOLE)
    assert listing.read_manifest(tmp_path) == WHOLE
    assert json.loads((tmp_path / listing.MANIFEST).read_text()) == json.loads(signed(plain()))
    listing.write_manifest(
        tmp_path, WHOLE.model_copy(update={"progress": {"before": math.nan, "by step": {3: [math.inf]}}})
    )
    progress = listing.read_manifest(tmp_path).progress
    assert math.isnan(progress["before"])
    assert progress["by step"] == {"3": [math.inf]}


@pytest.mark.parametrize("bit", [0, 5])  # the latter changes the case of letters
def test_no_flipped_bit_goes_unseen(tmp_path, bit):
    listing.write_manifest(tmp_path, WHOLE)
    content = (tmp_path / listing.MANIFEST).read_bytes()
    unseen = []
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << bit
        (tmp_path / listing.MANIFEST).write_bytes(damaged)
        with suppress(DamagedFileError):
            listing.read_manifest(tmp_path)
            unseen.append(place)
    assert not unseen


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"null", b"3", b'"step"', b"{", b"\0" * 900, b"\xff\xfe", b"[" * 100_000, b"9" * 10_000],
)
def test_what_is_no_manifest_is_damaged(tmp_path, content):
    (tmp_path / listing.MANIFEST).write_bytes(content)
    with pytest.raises(DamagedFileError, match=rf"/{listing.MANIFEST} is damaged"):
        listing.read_manifest(tmp_path)
    (tmp_path / listing.MANIFEST).unlink()
    with pytest.raises(DamagedFileError, match=rf"/{listing.MANIFEST} is missing"):
        listing.read_manifest(tmp_path)
