"""Runs with partial rollouts: what their metrics say, and how they go on."""

import numpy as np
import pytest

from tests.train.launch import MAIN, completed
from tests.train.rollout.vllm.installed import real
from tests.train.run.test_run import SMALL, continued, records, untimed

PARTIAL = ("--rollout.behaviour=engine", "--rollout.partial=True", "--rollout.oversample=2", "--checkpoint.every=2")


@pytest.mark.parametrize(
    ("engine", "ranks"),
    [
        ("transformers", 1),
        pytest.param("transformers", 2, marks=pytest.mark.long),
        pytest.param("vllm", 1, marks=[real, pytest.mark.long]),
    ],
)
def test_a_run_continues_answers_by_newer_policies_and_goes_on_from_its_middle_to_the_same_metrics(
    tmp_path, engine, ranks
):
    arguments = (*SMALL, *PARTIAL, f"--rollout.engine={engine}", f"--output.folder={tmp_path}")
    completed(MAIN, *arguments, ranks=ranks, vllm=engine == "vllm")
    steps = [record for record in records(tmp_path / "small") if "reward" in record]
    assert [step["groups"] for step in steps] == [8] * 4
    assert all(step["groups_underway"] == 8 for step in steps)
    assert steps[0]["staleness"] == steps[0]["earlier_tokens"] == 0
    later = steps[1:]
    assert all(0 < step["earlier_tokens"] < 1 and step["staleness"] > 0 for step in later)
    assert all(step["continued_answers"] > 0 for step in later)
    # Only tokens of the present policy are compared with it.
    assert all(step["mismatch/mean"] < 1e-5 for step in steps)
    assert np.isfinite([step["loss"] for step in steps]).all()
    assert any(step["replayed"] for step in steps)
    resumed = continued(tmp_path / "small", ranks=ranks, vllm=engine == "vllm")
    assert untimed(resumed) == untimed(tmp_path / "small")
