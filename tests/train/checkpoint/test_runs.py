"""A run that an earlier version wrote goes on."""

import json
import shutil
from pathlib import Path

from tests.train.launch import MAIN, completed
from tests.train.run.test_run import assert_same_but_for_rounding, untimed


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
