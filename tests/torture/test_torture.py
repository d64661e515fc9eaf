"""The torture program: damages that start no run, and a short run of it."""

import json
import re

import pytest

from tests.torture.campaign import Campaign, drawn
from tests.torture.faults import files_of, needed
from tests.torture.runs import KEEP, References
from tests.train.checkpoint.parts import checkpoints, make_trainer, story
from tests.train.configs import configured
from tests.train.launch import launch_module


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with checkpoints, without a model."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    folder.mkdir()
    trainer = make_trainer()
    writer = checkpoints(folder, keep=KEEP, config=configured().model_dump(mode="json"))
    for step in range(1, 6):
        story(trainer, step, step + 1)
        writer.save(step, trainer.policy, trainer, {"evaluations": []})
    return folder


def done(run, folder, monkeypatch, number):
    """The records of the first cases of a plan that start no run; its runs are all copies of that one."""
    monkeypatch.setattr(References, "of", lambda self, kind: run)
    loads = [case for case in (drawn(0, i) for i in range(2 * number)) if case.what == "load"]
    campaign = Campaign(folder)
    return [campaign.do(case) for case in loads[:number]]


@pytest.mark.long
def test_damage_is_found_and_named_and_the_checkpoint_before_is_loaded(run, tmp_path, monkeypatch):
    records = done(run, tmp_path, monkeypatch, 60)
    assert [record.problems for record in records] == [[]] * 60
    assert {record.step for record in records} == {None, 3, 4, 5}
    assert not (tmp_path / "failed").exists()
    assert {str(path.relative_to(run)) for path in files_of(run)} == set().union(*needed(run).values())


@pytest.mark.long
def test_the_program_finds_nothing_wrong(tmp_path):
    """Some damages, a run that is killed twice, and a damaged run that goes on; then one case more."""
    options = (f"--folder={tmp_path}", "--seed=58", "--minutes=9", "--kinds=plain-1")
    for cases in (17, 18):
        done = launch_module("tests.torture", *options, f"--cases={cases}")
        assert done.returncode == 0, done.stdout + done.stderr
        records = [json.loads(line) for line in (tmp_path / "records_58.jsonl").read_text().splitlines()]
        assert [record["case"] for record in records] == list(range(cases))
    (killed,) = (record for record in records if record["what"] == "kills")
    assert killed["kills"]
    assert re.search(r"cases with a problem: 0\b", done.stdout), done.stdout
