"""A run with the calculator, on 1 and 2 ranks: what it generates, stores and exports, and how it goes on."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from exgrpo.tools.experience.export import export
from exgrpo.tools.experience.sources import RunExperience
from exgrpo.train.checkpoint.listing import survey
from exgrpo.train.metrics.log_files import SAMPLES, read_samples
from tests.tools.experience.runs import pretrained
from tests.train.launch import MAIN, ROOT, completed
from tests.train.run.test_run import SMALL, continued, records

CALCULATOR = f"--recipe={ROOT}/recipes/environments/calculator.yaml"


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)], ids=["1 rank", "2 ranks"])
def runs(request, tmp_path_factory):
    """A run, and one that went on from its middle."""
    root = tmp_path_factory.mktemp("runs")
    recipe = (f"--recipe={ROOT}/exgrpo/assets/arithmetic/recipe.yaml", CALCULATOR)
    options = ("--checkpoint.every=2", "--objective.normalize=token", f"--output.folder={root}")
    completed(MAIN, *recipe, *SMALL, *options, ranks=request.param)
    return root / "small", continued(root / "small", ranks=request.param)


def steps(folder):
    return [record for record in records(folder) if "reward" in record]


def test_the_engine_and_the_trainer_read_the_same_conversations(runs):
    """The engine goes on behind replies turn by turn, the trainer reads whole answers: their log-probs are the same."""
    for step in steps(runs[0]):
        assert step["turns"] > 1.5
        assert step["observed_tokens"] > 1
        assert step["environment_failed"] == 0
        assert step["mismatch/mean"] < 1e-5
    assert any(step["replayed"] for step in steps(runs[0]))


def test_a_run_that_goes_on_is_the_same_run(runs):
    straight, resumed = map(steps, runs)
    assert len(straight) == 4
    for name in ("reward", "loss", "grad_norm", "entropy", "replayed", "turns", "observed_tokens", "generated_tokens"):
        assert [step[name] for step in resumed] == [step[name] for step in straight]


def test_samples_say_who_wrote_what_and_are_the_same_after_a_resume(runs):
    straight, resumed = ((run / SAMPLES).read_bytes() for run in runs)
    assert straight == resumed
    answers = [answer for sample in read_samples(runs[0] / SAMPLES) for answer in sample.answers]
    replies = [part for answer in answers for part in answer.parts[1::2]]
    assert replies
    assert {writer for writer, _ in replies} == {"environment"}
    assert all(text.strip().lstrip("-").isdecimal() for _, text in replies)
    assert {writer for answer in answers for writer, _ in answer.parts[::2]} == {"policy"}


def test_what_is_stored_and_exported_says_who_wrote_it(runs, tmp_path):
    """Every reply is the value of the equation before it, and nothing else is one."""
    (newest, *_), _ = survey(runs[0])
    experience = RunExperience(runs[0], newest)
    stored, masks = experience.answers, []
    decode, replies = pretrained().tokenizer.decode, 0
    for at in map(stored.at, range(len(stored))):
        mask = stored.response_mask[at]
        masks.append(None if mask.all() else mask.tolist())
        assert (stored.old_log_prob[at][~mask] == 0).all()
        starts = np.flatnonzero(np.diff(mask)) + 1
        turns = [decode(part) for part in np.split(stored.token[at], starts)]
        for before, told in zip(turns[::2], turns[1::2], strict=False):
            expression = (
                before.removesuffix(" = ").replace(":", ",").replace(">", ",").replace(";", ",").rpartition(",")[2]
            )
            assert before.endswith(" = ")
            assert int(told) == eval(expression)
            replies += 1
    assert replies
    export(runs[0], tmp_path / "set")
    assert pq.read_table(tmp_path / "set" / "data").column("response_mask").to_pylist() == masks
