"""Steps that teach nothing: they are told, and end the run."""

import pytest

from exgrpo.train.metrics.soundness import Soundness
from exgrpo.train.records import Counts, EngineCounts
from exgrpo.train.reward.contract import Failure
from tests.train.launch import MAIN, launch
from tests.train.test_run import SMALL, records
from tests.train.trainers import half, make


def ten(*, failed: int = 0, slow: int = 0) -> Counts:
    """Those of a step of ten answers."""
    failures = (Failure("r", "KeyError: 1", "q", "g", "a", failed), Failure("r", "late", "q", "g", "a", slow))
    told = tuple(failure for failure in failures if failure.count)
    return Counts(10, slow, failed, 0.0, 0.0, EngineCounts(), failures=told)


def stops_after(soundness: Soundness, steps) -> int | None:
    """The number of the step after which the run stops."""
    for number, counts in enumerate(steps, 1):
        soundness.observe(counts, (True,))
        if soundness.problem(counts):
            return number
    return None


@pytest.mark.parametrize(
    ("most", "failed", "expected"),
    [
        (0.5, [6, 6, 6], 3),
        (0.5, [5, 5, 5, 5], None),
        (0.5, [10, 10, 5, 10, 10], None),
        (0.5, [0, 10, 0, 6, 7, 8, 9], 6),
        (0.0, [1, 1, 1], 3),
        (0.0, [0, 0, 0, 0], None),
        (1.0, [10] * 9, None),
    ],
)
@pytest.mark.parametrize("how", ["failed", "slow"])
def test_three_steps_in_a_row_with_more_failures_than_are_borne_end_the_run(most, failed, expected, how):
    assert stops_after(Soundness(most), [ten(**{how: count}) for count in failed]) == expected


def test_the_cause_that_is_told_is_the_most_frequent_one_with_its_remedy():
    soundness = Soundness(0.5)
    steps = [ten(failed=2, slow=5), ten(failed=4, slow=4), ten(failed=6, slow=2)]
    assert [soundness.observe(counts, (True,)) for counts in steps] == [None] * 3
    assert soundness.problem(steps[-1]) == (
        "in each of the last 3 steps more than 50% of the answers could not be graded, 80% in the last one: reward "
        "'r': KeyError: 1. Mend the function, or bear more by --reward.max_failed"
    )


def test_skipped_optimiser_steps_are_told_after_three_and_end_the_run_after_ten():
    soundness, told = Soundness(0.5), []
    steps = [(True, False, False), (True,), (False, False), (), (False, False), (False,) * 4]
    for applied in steps:
        told.append(soundness.observe(ten(), applied) is not None)
        assert soundness.problem(ten()) is None
    assert told == [False] * 4 + [True, False], "a step without an update is neither"
    assert soundness.observe(ten(), (False,) * 2) is None
    assert "the last 10 optimiser steps were skipped" in soundness.problem(ten())


def test_a_training_step_says_which_of_its_optimiser_steps_were_applied():
    trainer = make(half(30))
    applied = [trainer.step(number).applied for number in (1, 2, 3)]
    assert applied == [(True, True), (False, True), (True, False)]  # the recording policy skips every third


def test_a_run_whose_gradients_are_not_finite_says_so_and_stops(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import dataclasses\n"
        "from exgrpo.train.objective.surrogate import clipped\n"
        "def surrogate(tokens, options):\n"
        "    fresh = clipped(tokens, options)\n"
        "    return dataclasses.replace(fresh, value=fresh.value * float('nan'))\n"
    )
    done = launch(
        MAIN,
        *(*SMALL, "--optimizer.minibatches=4", f"--objective.surrogate={tmp_path}/mine.py:surrogate"),
        f"--output.folder={tmp_path}/runs",
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "3 optimiser steps in a row were skipped" in " ".join(done.stdout.split())
    error = done.stderr.strip().splitlines()[-1]
    run = tmp_path / "runs" / "small"
    stopped = records(run)[-1]["step"]
    assert records(run)[-1]["skipped_updates"] >= 10
    assert error.startswith("error: the last ")
    assert f"To go on after step {stopped}: " in error
    assert error.endswith(f" --resume {run}")
    assert "Traceback" not in done.stderr
