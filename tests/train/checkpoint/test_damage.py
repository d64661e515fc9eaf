"""Damaged files of a run: the person is told which, and the run goes on from what is sound, exactly; logs too."""

import json
import shutil

import pytest

from exgrpo.train.checkpoint import checkpoint
from exgrpo.train.checkpoint.listing import FORMAT, find, folders
from exgrpo.train.checkpoint.resume import locate
from exgrpo.train.common.errors import CheckpointError, ConfigError
from exgrpo.train.metrics.log_files import METRICS, SAMPLES, Sample, read_records, read_samples
from exgrpo.train.metrics.run_log import RunLog
from tests.train.checkpoint.parts import checkpoints, flip, load, make_trainer, saved_run, story
from tests.train.checkpoint.test_checkpoint import signed
from tests.train.configs import configured

DAMAGES = {
    "is damaged": flip,
    "is damaged: it has 0 bytes": lambda path: path.write_bytes(b""),
    "is missing": lambda path: path.unlink(),
    # All its checksums may be right: the files of both steps can have the same sizes.
    "is damaged: it belongs to step 4": lambda to: shutil.copyfile(to.parents[1] / "step_00000004" / to.name, to),
}


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((name, "is damaged") for name in ("policy/version", "manifest.json", "arrays")),
        *((name, "is missing") for name in ("policy/version", "manifest.json", "arrays")),
        *((name, "is damaged: it has 0 bytes") for name in ("policy/version", "arrays")),
        ("manifest.json", "is damaged: it belongs to step 4"),
    ],
)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_taken(tmp_path, caplog, name, damage):
    expected = story(make_trainer(), 1, 9)
    saved_run(tmp_path)
    newest, before = find(tmp_path)
    damaged = newest.folder / name
    if name == "arrays":
        damaged = tmp_path / "experience" / f"{newest.manifest.arrays}.safetensors"
    DAMAGES[damage](damaged)
    trainer, step = load(tmp_path)
    assert step == 4
    assert story(trainer, 5, 9) == expected[4:]
    (warning,) = caplog.messages
    assert f"{damaged} {damage}" in warning
    assert f"going on with {before.folder}" in warning
    assert f"{newest.folder}.damaged" in warning
    assert [found.step for found in find(tmp_path)] == [4]


def test_where_all_are_damaged_one_error_names_every_problem(tmp_path):
    saved_run(tmp_path, steps=(2, 4, 6), keep=3)
    newest, middle, oldest = find(tmp_path)
    flip(newest.folder / "policy" / "version")
    (middle.folder / "manifest.json").write_text("[]")
    (tmp_path / "experience" / f"{oldest.manifest.arrays}.safetensors").write_bytes(b"")
    remains = shutil.copytree(oldest.folder, oldest.folder.with_suffix(".unfinished"))
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    first, *parts = str(error.value).split("; ")
    assert first == f"{tmp_path} has no sound checkpoint to continue from"
    assert f"{newest.folder}/policy/version is damaged" in parts[0]
    assert f"{middle.folder}/manifest" in parts[1]
    assert f"{oldest.manifest.arrays}.safetensors is damaged: it has 0 bytes" in parts[2]
    assert folders(tmp_path) == [newest.folder, middle.folder, oldest.folder], "nothing is set aside"
    assert remains.exists()


@pytest.mark.parametrize(
    ("version", "told"),
    [
        (FORMAT + 1, f"step_00000006 has format {FORMAT + 1} and this version of exgrpo reads format {FORMAT}"),
        (FORMAT - 1, r"step_00000006 \(format 6\) was written by an earlier copy of exgrpo: begin a new run"),
    ],
)
def test_another_format_is_an_error_and_no_damage(tmp_path, version, told):
    saved_run(tmp_path)
    (find(tmp_path)[0].folder / "manifest.json").write_text(signed({"format": version}))
    before = folders(tmp_path)
    with pytest.raises(CheckpointError, match=told):
        load(tmp_path)
    assert folders(tmp_path) == before
    shutil.rmtree(find(tmp_path)[0].folder)
    with pytest.raises(ConfigError, match=f"no complete checkpoint .*{told}"):
        locate(configured({"resume": str(tmp_path)}))


def test_a_damaged_newer_checkpoint_takes_no_sound_ones_place(tmp_path):
    """The one of step 6 looks whole. Counted among the newest, it would have the one of step 5 deleted."""
    saved_run(tmp_path)
    flip(tmp_path / "checkpoints" / "step_00000006" / "policy" / "version")
    trainer, step = load(tmp_path, keep=1)
    assert step == 4
    story(trainer, 5, 6)
    checkpoints(tmp_path, keep=1).save(5, trainer.policy, trainer, {})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000005"]
    assert load(tmp_path)[1] == 5


def test_rotation_does_not_count_what_is_damaged(tmp_path):
    trainer = saved_run(tmp_path, steps=(2, 4))
    (tmp_path / "checkpoints" / "step_00000004" / "manifest.json").write_text("{}")
    checkpoints(tmp_path).save(6, trainer.policy, trainer, {})
    assert [found.step for found in find(tmp_path)] == [6, 2]
    checkpoints(tmp_path).save(8, trainer.policy, trainer, {})
    assert [path.name[-1] for path in folders(tmp_path)] == ["8", "6"]


def test_what_cannot_be_read_for_a_while_is_not_deleted(tmp_path):
    trainer = saved_run(tmp_path, steps=(2,))
    manifest = find(tmp_path)[0].folder / "manifest.json"
    manifest.rename(tmp_path / "away")
    story(trainer, 3, 5)
    checkpoints(tmp_path).save(4, trainer.policy, trainer, {})
    assert [found.step for found in find(tmp_path)] == [4]
    (tmp_path / "away").rename(manifest)
    assert [found.step for found in find(tmp_path)] == [4, 2]


@pytest.mark.parametrize("damage", ["is damaged: it has 0 bytes", "is missing"])
def test_experience_lost_while_the_run_has_it_in_memory_is_written_again(tmp_path, damage):
    expected = story(make_trainer(), 1, 9)
    trainer, writer = make_trainer(), checkpoints(tmp_path)
    story(trainer, 1, 5)
    writer.save(4, trainer.policy, trainer, {})
    for path in (tmp_path / "experience").iterdir():
        DAMAGES[damage](path)
    story(trainer, 5, 7)
    writer.save(6, trainer.policy, trainer, {})
    again, step = load(tmp_path)
    assert step == 6
    assert story(again, 7, 9) == expected[6:]


def test_what_may_not_be_read_is_an_error_and_a_disk_that_fails_is_damage(tmp_path, monkeypatch, caplog):
    """To go back to an older checkpoint would throw steps away that one command makes readable."""
    saved_run(tmp_path)
    before, sha256 = folders(tmp_path), checkpoint.sha256

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint, "sha256", refuse)
    with pytest.raises(CheckpointError, match=r"permission denied: .*/step_00000006/"):
        load(tmp_path)
    assert folders(tmp_path) == before

    def fail(path):
        if "00000006" in str(path):
            raise OSError(5, "Input/output error", str(path))
        return sha256(path)

    monkeypatch.setattr(checkpoint, "sha256", fail)
    assert load(tmp_path)[1] == 4
    assert "step_00000006/policy/version cannot be read or written: Input/output error" in caplog.text


KINDS = ("training", "evaluation", "training")
LINES = [json.dumps({"step": n, "kind": kind, "reward": 0.5 * n}).encode() for n, kind in enumerate(KINDS, start=1)]
RUBBISH = [b"\0" * 40, b"\xff\xfe\xfd", b"[1]", b"7", b"{}", b'{"step": 3, "rew', b"\0" + LINES[0], b"[" * 99_999]
RUBBISH += [b'{"step": 1, "reward": 0.5}', b'{"step": 1, "kind": "another"}']


def test_lines_that_are_no_records_are_named(tmp_path):
    path = tmp_path / METRICS
    mixed = [LINES[0], *RUBBISH[:3], LINES[1], b"", *RUBBISH[3:], LINES[2]]
    path.write_bytes(b"\n".join(mixed))
    records, unreadable = read_records(path)
    assert [record.numbers for record in records] == [{"step": n, "reward": 0.5 * n} for n in (1, 2, 3)]
    assert [(record.step, record.kind) for record in records] == list(enumerate(KINDS, start=1))
    assert unreadable == [2, 3, 4, *range(7, 14)]


@pytest.mark.parametrize("name", [METRICS, SAMPLES])
def test_a_log_that_has_lost_its_end_is_named_and_goes_on_behind_it(tmp_path, caplog, name):
    log = RunLog(tmp_path)
    for step in (1, 2):
        log.metrics("training", {"step": step, "reward": 0.5})
        log.sample(Sample(step, 0, "question", "gold", False, ()))
    position = log.position()
    log.close()
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:-5])
    log = RunLog(tmp_path, resume=position)
    log.metrics("training", {"step": 3, "reward": 0.5})
    log.sample(Sample(3, 0, "question", "gold", False, ()))
    log.close()
    (warning,) = caplog.messages
    assert warning == f"{tmp_path / name} is damaged: it has {len(content) - 5} bytes and had {len(content)}"
    cut = [record.step for record in read_records(tmp_path / METRICS)[0]]
    read = [sample.step for sample in read_samples(tmp_path / SAMPLES)]
    assert (cut, read) == (([1, 3], [1, 2, 3]) if name == METRICS else ([1, 2, 3], [1, 3]))
