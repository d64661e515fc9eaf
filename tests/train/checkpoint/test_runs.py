"""Runs as programs: killed or damaged, and continued to the same end, by any number of processes."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from exgrpo.train.checkpoint.listing import find
from exgrpo.train.checkpoint.resume import FINISHED
from tests.programs import wait_for
from tests.train.checkpoint.parts import flip
from tests.train.launch import MAIN, Ranks, completed
from tests.train.run.test_run import untimed

SMALL = (
    *("--steps=4", "--questions=8", "--rollout.samples=4", "--rollout.engine=transformers"),
    *("--data.train_limit=40", "--data.test_limit=16", "--experience.start_pass_rate=0"),
    *("--checkpoint.every=1", "--evaluation.every=3", "--output.save_model=False"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of two processes that was not interrupted."""
    root = tmp_path_factory.mktemp("whole")
    completed(MAIN, *SMALL, f"--output.folder={root}", "--output.name=run", ranks=2)
    return root / "run"


def wait_for_progress(folder, run):
    """Until the run has a complete checkpoint more than it had."""
    before = find(folder)[0].step if find(folder) else 0
    wait_for(lambda: not run.running() or (find(folder) and find(folder)[0].step > before))


DECISIONS = ("step", "reward", "pass_rate", "generated_tokens", "replayed", "buffer_trajectories", "retired")
ROUNDED = {"entropy": 1e-4, "loss": 1e-3, "grad_norm": 1e-3}
"""Of these the order of sums is visible, as between one and two processes that are not interrupted."""


def test_a_killed_run_goes_on_with_another_number_of_processes(tmp_path, whole):
    """Killed behind a checkpoint, and continued by more, then by fewer processes."""
    arguments = (*SMALL, f"--output.folder={tmp_path}", "--output.name=run", "--resume=auto")
    for ranks in (1, 3):
        running = Ranks(MAIN, *arguments, ranks=ranks)
        wait_for_progress(tmp_path / "run", running)
        running.ranks[-1].send(signal.SIGKILL)
        running.finish()
    assert find(tmp_path / "run")[0].step < 4
    done = completed(MAIN, *arguments, ranks=2)
    assert "going on with" in done.stdout
    assert_same_but_for_rounding(untimed(tmp_path / "run"), untimed(whole))


def assert_same_but_for_rounding(records, rights):
    for mine, right in zip(records, rights, strict=True):
        assert {key: mine.get(key) for key in DECISIONS} == {key: right.get(key) for key in DECISIONS}
        for key, bound in ROUNDED.items():
            if right.get(key) is None:  # an evaluation, or a step without an update
                assert mine.get(key) is None
            else:
                assert mine[key] == pytest.approx(right[key], rel=bound, abs=1e-6), (key, right["step"])


def test_a_run_that_0_1_0_wrote_goes_on_by_its_recipe_as_it_went_on_there(tmp_path):
    """Two steps, on any processor, of a random Llama with two layers of width 16, begun on one thread of a CPU.

    Other instructions round otherwise, by 1e-7 of a log-prob, and would change an answer whose random number is so near
    to the border between two words. None does: with weights and moments that were off by 1e-4 of themselves, and with
    torch's and the kernels' code for AVX2 and for SSE, answers and decisions stayed the same. With moments of 0 in the
    place of those that were saved, the second step stores other answers.
    """
    of_0_1_0 = Path(__file__).parent / "v0_1_0"
    shutil.copytree(of_0_1_0 / "run", tmp_path / "run")
    named = (f"--recipe={of_0_1_0 / 'recipe.yaml'}", f"--output.folder={tmp_path}")
    done = completed(MAIN, *named, "--resume=auto", "--steps=4")
    assert f"going on with {tmp_path / 'run'} after step 2" in done.stdout
    assert str(tmp_path) not in done.stderr  # what is wrong with files names them
    records = untimed(tmp_path / "run")
    before = [json.loads(line) for line in (of_0_1_0 / "run" / "metrics.jsonl").read_text().splitlines()]
    went_on = [json.loads(line) for line in (of_0_1_0 / "went_on.jsonl").read_text().splitlines()]
    assert_same_but_for_rounding(records[2:], went_on)
    assert [record["loss"] for record in records[:2]] == [record["loss"] for record in before]


def test_a_run_of_two_ranks_with_damaged_files_gives_the_same_metrics(tmp_path, whole):
    run = tmp_path / "damaged"
    shutil.copytree(whole, run)
    (run / FINISHED).unlink()
    shard = sorted((run / "checkpoints" / "step_00000004" / "policy").glob("rank_00001_*.safetensors"))[0]
    flip(shard)
    (run / "config.yaml").write_text("")
    done = completed(MAIN, f"--resume={run}", ranks=2)
    assert f"going on with {run} after step 3" in done.stdout
    assert done.stderr.count(f"{shard} is damaged") == 1
    assert done.stderr.count(f"{run / 'config.yaml'} is empty") == 1
    assert untimed(run) == untimed(whole)
    assert (run / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    config = (whole / "config.yaml").read_text().replace("resume: null", f"resume: {run}")
    assert (run / "config.yaml").read_text() == config
    assert [found.step for found in find(run)] == [4, 3]


def test_the_last_checkpoint_has_the_last_evaluation(whole):
    """A run that goes on with more steps keeps it in its log, and knows which model is the best one."""
    progress = find(whole)[0].manifest.progress
    assert progress["evaluations"]["latest"]["step"] == 4
    assert progress["log"]["metrics"] == (whole / "metrics.jsonl").stat().st_size
