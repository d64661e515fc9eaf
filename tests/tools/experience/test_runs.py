"""The programs one after the other, as a user starts them: a run begins with what another has stored."""

import numpy as np
import pytest

from exgrpo.tools.experience.program import main
from exgrpo.tools.experience.sources import open_run
from tests.tools.experience.runs import QUESTIONS, K, make_run, some
from tests.train.batches import same, stored_rows
from tests.train.launch import MAIN, completed

ARGUMENTS = (
    *("--steps=1", "--questions=3", f"--rollout.samples={K}", f"--data.train_limit={QUESTIONS}", "--data.test=None"),
    *("--experience.start_pass_rate=0", "--optimizer.minibatches=1", "--rollout.engine=transformers"),
    *("--checkpoint.every=1", "--output.save_model=False", "--output.trackers", "--experience.expire"),
)


@pytest.mark.long
def test_a_run_begins_with_the_experience_of_another(tmp_path):
    source = make_run(tmp_path / "run", some())
    assert main(["export", str(source), str(tmp_path / "set")]) == 0
    folders = (f"--output.folder={tmp_path}", f"--experience.start={tmp_path / 'set'}")
    done = completed(MAIN, *ARGUMENTS, "--output.name=next", *folders, ranks=2)
    assert "the experience starts with 7 answers to 3 questions from " in " ".join(done.stdout.split())
    found = open_run(tmp_path / "next")
    stored = stored_rows(found.answers)
    assert all(any(same(one, other, besides=["step"]) for other in stored if other.step == 0) for one in some())
    assert np.any(found.arrays["replays"] > 0)

    # A run that goes on has what its checkpoint has, and needs the file no more.
    (tmp_path / "set").rename(tmp_path / "gone")
    done = completed(MAIN, f"--resume={tmp_path / 'next'}", "--steps=2", ranks=2)
    assert "the experience starts with" not in " ".join(done.stdout.split())
    assert len(open_run(tmp_path / "next")) >= len(stored)
